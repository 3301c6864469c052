"""Functions in source files: found, told apart, rewritten and compiled again."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ds_gradfix.errors import RewriteError
from ds_gradfix.source import (
    Function,
    Rule,
    diff,
    find_functions,
    fingerprint,
    mangled,
    recompile,
    rewrite,
)

STAGE3 = "deepspeed.runtime.zero.stage3"
DEEPSPEED = importlib.util.find_spec("deepspeed")
assert DEEPSPEED is not None and DEEPSPEED.origin is not None
STAGE3_FILE = Path(DEEPSPEED.origin).parent.joinpath(*STAGE3.split(".")[1:]).with_suffix(".py")


Writer = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write a module's source to a file of its own."""

    def writer(text: str) -> Path:
        path = tmp_path / "subject.py"
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return writer


def find(path: Path, qualname: str) -> Function:
    function = find_functions(path, [qualname])[qualname]
    assert function is not None
    return function


def run_file(path: Path) -> types.ModuleType:
    module = types.ModuleType("subject")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    return module


def remade(
    path: Path, qualname: str, rules: tuple[Rule, ...] = (), helper: object = None
) -> tuple[Any, types.ModuleType]:
    module = run_file(path)
    return recompile(rewrite(find(path, qualname), rules), module, helper, qualname), module


# -------------------------------------------------------------------------------------- find


def test_find_functions_methods_and_nested_classes(write: Writer) -> None:
    path = write(
        """
        def function(): return "function"
        async def coroutine(): return "coroutine"
        class A:
            def method(self): return "A.method"
            async def waits(self): return "A.waits"
            class B:
                def __private(self): return "A.B.__private"
            method_of_none = 3
        """
    )
    names = ["function", "coroutine", "A.method", "A.waits", "A.B.__private"]
    found = find_functions(path, names)
    assert list(found) == names
    for name, function in found.items():
        assert function is not None
        assert (function.path, function.qualname) == (path, name)
        assert function.line == function.node.lineno
        assert function.node.name == name.rpartition(".")[2]
        assert ast.unparse(function.node.body[-1]) == f"return {name!r}"
    assert isinstance(found["coroutine"].node, ast.AsyncFunctionDef)


def test_what_is_not_a_function_there_is_none(write: Writer) -> None:
    path = write(
        """
        value = lambda: 1
        class A:
            def method(self):
                def inner(): pass
            attribute = 1
        def outer():
            def local(): pass
            class C:
                def method(self): pass
        """
    )
    names = ["absent", "A", "A.absent", "value", "A.attribute", "local", "inner", "B.method", "C.method", "method"]
    assert find_functions(path, names) == dict.fromkeys(names)


@pytest.mark.parametrize(
    "text",
    [
        "if x:\n    def f(): return 'first'\nelse:\n    pass",
        "if x:\n    pass\nelif y:\n    def f(): return 'first'",
        "try:\n    def f(): return 'first'\nexcept ImportError:\n    pass",
        "try:\n    pass\nexcept ImportError:\n    def f(): return 'first'",
        "try:\n    pass\nfinally:\n    def f(): return 'first'",
        "with x:\n    def f(): return 'first'",
        "if x:\n    with y:\n        try:\n            z\n        except E:\n            def f(): return 'first'",
    ],
)
def test_conditional_definitions_are_found(write: Writer, text: str) -> None:
    assert ast.unparse(find(write(text), "f").node.body[0]) == "return 'first'"
    in_class = "class A:\n" + "\n".join(f"    {line}" for line in text.splitlines())
    assert ast.unparse(find(write(in_class), "A.f").node.body[0]) == "return 'first'"


def test_the_last_definition_wins_as_it_does_at_run_time(write: Writer) -> None:
    path = write(
        """
        def f(): return 1
        class A:
            def g(self): return 1
        class A:
            def g(self): return 2
            if True:
                def g(self): return 3
        def f(): return 2
        """
    )
    module = run_file(path)
    for qualname, value in (("f", module.f()), ("A.g", module.A().g())):
        assert ast.unparse(find(path, qualname).node.body[0]) == f"return {value}"


def test_a_later_class_without_the_method_hides_an_earlier_one(write: Writer) -> None:
    path = write("class A:\n    def f(self): pass\nclass A:\n    pass\n")
    assert not hasattr(run_file(path).A, "f")
    assert find_functions(path, ["A.f"]) == {"A.f": None}


def test_a_later_class_of_a_function_s_name_hides_it(write: Writer) -> None:
    assert find_functions(write("def f(): pass\nclass f: pass\n"), ["f"]) == {"f": None}


def test_future_imports_come_along(write: Writer) -> None:
    path = write('"""doc"""\nfrom __future__ import annotations\nimport os\nfrom os import path\ndef f(): pass\n')
    assert [ast.unparse(n) for n in find(path, "f").future] == ["from __future__ import annotations"]


def test_a_source_in_another_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "subject.py"
    path.write_bytes("# -*- coding: latin-1 -*-\ndef f(): return 'é'\n".encode("latin-1"))
    assert ast.unparse(find(path, "f").node.body[0]) == "return 'é'"


@pytest.mark.parametrize("data", [b"def f(:\n", b"\x00", b"\xff\xfe\xfa", b"# coding: nonsense\n"])
def test_what_is_no_python_raises_what_the_caller_expects(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "subject.py"
    path.write_bytes(data)
    with pytest.raises((SyntaxError, ValueError)):
        find_functions(path, ["f"])
    with pytest.raises(OSError):
        find_functions(tmp_path / "absent.py", ["f"])


# ------------------------------------------------------------------------------- fingerprint

PLAIN = '''
@decorated(1)
def f(self, a: int, b=2, *c, d=None, **e) -> str:
    """A docstring."""
    x = a + 1.0  # a comment
    if x != b and self.g(x, key=a[1:2]):
        x.div_(b)
    for i in range(3):
        x += i
    def inner():
        """Another docstring."""
        return x
    return [x, "text", (y for y in c if y)]
'''


def mark(text: str) -> str:
    return fingerprint(ast.parse(text).body[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """A docstring."""\n', ""),
        ("A docstring.", "Something else"),
        ('        """Another docstring."""\n', ""),
        ("  # a comment", ""),
        ("a comment", "an other comment"),
        ("x = a + 1.0", "x = (a   +\n        1.00)"),
        ("a: int, b=2", "a:int,b = 2"),
        ("    return [x,", "\n\n    # lines\n    return [\n        x,"),
        ('"text"', "'text'"),
        ('"text"', "'te' 'xt'"),
        ('"text"', "u'text'"),
        ("    x.div_(b)", "    x.div_(b);"),
        ("range(3)", "range(0x3)"),
        ("f(self, a: int", "f(\n    self,\n    a: int"),
        ("x += i", "x += (i)"),
        ("    ", "\t"),
    ],
    ids=repr,
)
def test_the_fingerprint_ignores_comments_layout_and_docstrings(old: str, new: str) -> None:
    changed = PLAIN.replace(old, new) if new == "\t" else PLAIN.replace(old, new, 1)
    assert changed != PLAIN
    assert mark(changed) == mark(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@decorated(1)\n", ""),
        ("@decorated(1)", "@decorated(2)"),
        ("@decorated(1)", "@decorated(True)"),
        ("@decorated(1)", "@decorated(1.0)"),
        ("@decorated(1)", "@decorated(1)\n@decorated(1)"),
        ("def f", "async def f"),
        ("def f", "def g"),
        ("self, a", "this, a"),
        ("a: int", "a"),
        ("a: int", "a: float"),
        ("b=2", "b=3"),
        ("b=2", "b"),
        ("*c, d", "*, d"),
        ("d=None", "d"),
        ("d=None", "d=0"),
        (", **e", ""),
        (" -> str", ""),
        ("a: int, b=2", "a: int, /, b=2"),
        ("a + 1.0", "a - 1.0"),
        ("a + 1.0", "a + 1"),
        ("a + 1.0", "1.0 + a"),
        ("x != b", "x == b"),
        ("x != b and", "x != b or"),
        ("key=a", "kay=a"),
        ("key=a", "a"),
        ("self.g", "self.h"),
        ("[1:2]", "[1:2:1]"),
        ("[1:2]", "[1:]"),
        ("[1:2]", "[:2]"),
        ("x.div_(b)", "x.div(b)"),
        ("x.div_(b)", "pass"),
        ("        x += i\n", "        x += i\n        x += i\n"),
        ("x += i", "x -= i"),
        ("x += i", "x = i"),
        ("def inner()", "def other()"),
        ('"text"', 'b"text"'),
        ('"text"', '"Text"'),
        ('"text"', 'f"text"'),
        ("(y for y in c if y)", "[y for y in c if y]"),
        ("(y for y in c if y)", "(y for y in c)"),
        ("return [x", "yield [x"),
        ('    x = a', '    0\n    "no docstring"\n    x = a'),
        ('"""Another docstring."""', 'b"no docstring"'),
    ],
    ids=repr,
)
def test_the_fingerprint_sees_everything_else(old: str, new: str) -> None:
    assert PLAIN.count(old) >= 1
    assert mark(PLAIN.replace(old, new, 1)) != mark(PLAIN)


def test_every_single_node_of_a_real_function_counts() -> None:
    """Turn each name, number, text, operator and attribute of a real target into another, one at a time."""
    function = find(STAGE3_FILE, "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_contiguous_grads")
    original = fingerprint(function.node)
    tried = 0
    docstring = function.node.body[0]
    hidden = set(map(id, ast.walk(docstring))) if ast.get_docstring(function.node) else set()
    for node in ast.walk(function.node):
        if id(node) in hidden:
            continue
        name, value = next(((n, v) for n, v in ast.iter_fields(node) if isinstance(v, str | int | float)), ("", None))
        if not name or name in ("kind", "type_comment"):
            continue
        changed = not value if isinstance(value, bool) else value + (1 if isinstance(value, int | float) else "x")
        setattr(node, name, changed)
        assert fingerprint(function.node) != original, ast.dump(node)
        setattr(node, name, value)
        tried += 1
    for node in ast.walk(function.node):
        for block in ("body", "orelse", "args", "keywords", "targets", "decorator_list"):
            items = getattr(node, block, None)
            if isinstance(items, list):
                for position, item in enumerate(items):
                    if id(item) in hidden:
                        continue
                    del items[position]
                    assert fingerprint(function.node) != original, ast.dump(item)
                    items.insert(position, item)
                    tried += 1
    assert fingerprint(function.node) == original
    assert tried > 100



PINNED: dict[str, tuple[str, str]] = {
    "f-strings": (
        'def f(x, w):\n    return f"{x!r:>8} {x=} {{}} {x:%Y-%m} {x + 1:}" "tail" f"", f"a" "b", f\'{w["k"]}\'\n',
        "a35fa212c1aae558",
    ),
    "nested f-string formats": (
        'def f(x, w):\n    return f"{x:{w}}", f"{x:>{w}.{w}f}", f"{x:{w}.3f}"\n',
        "da78417674e5fe96",
    ),
    "walrus": ("def f(x):\n    while (y := x.get()) is not None and y > 1: yield y\n", "a1b9ba16c64aaa7c"),
    "match": (
        "def f(x):\n    match x:\n        case {'a': [1, *rest], **kw} if rest: return kw\n"
        "        case str() | None | P(q=-1): return 2\n        case _: return 3\n",
        "8b6e1a81170e8a09",
    ),
    "decorators and defaults": (
        '@a.b(c=1, *d)\n@e\ndef f(x: "int" = 3, /, y=(1,), *args, k, z=None, **kw) -> list[int]:\n'
        '    """doc"""\n    return x[1:2, ::3, ...]\n',
        "ea0b1b7a86719065",
    ),
    "async": (
        "async def f(x):\n    async with x as y, z: return [i async for i in y if await i]\n",
        "7d2c0b619bd85668",
    ),
    "literals": (
        "def f():\n    return 1, 1.0, 1e400, 1j, True, None, ..., b'x', u'x',"
        " -0.0, 10**20, 0xFF, 'a\\n\\x00', '\\ud800'\n",
        "ef8ff24bd0e65217",
    ),
    "statements": (
        "def f():\n    try: g()\n    except (A, B) as e: raise X from e\n    else: pass\n    finally: del y[0], z\n"
        "    global q\n    lambda *a, k=1: 3\n    assert a, 'b'\n    x: int\n    x += 1\n"
        "    with (open(a) as b, open(c) as d): pass\n",
        "c074c80e7168d59f",
    ),
}
# repr() prints a letter or escapes it, depending on whether that Python's Unicode tables have it (here: from 3.12).
NEW_LETTER = "def f():\n    return '\U0001fae8'\n"


@pytest.mark.parametrize("name", PINNED)
def test_fingerprints_do_not_move(name: str) -> None:
    text, pinned = PINNED[name]
    assert mark(text) == pinned


@pytest.mark.skipif(
    "0.19.8" not in (STAGE3_FILE.parents[2] / "git_version_info_installed.py").read_text(), reason="of 0.19.8"
)
@pytest.mark.parametrize(
    ("qualname", "pinned"),
    [("__avg_scatter_grads", "200ec89275a7f0b7"), ("__avg_scatter_contiguous_grads", "daa846420e987c99")],
)
def test_fingerprints_of_deepspeed_do_not_move(qualname: str, pinned: str) -> None:
    assert fingerprint(find(STAGE3_FILE, f"DeepSpeedZeroOptimizer_Stage3.{qualname}").node) == pinned


def other_pythons() -> dict[str, str]:
    """Other Pythons from 3.10 on this machine, by version: on the path, or beside the one that runs this."""
    beside = sorted(str(path) for path in Path(sys.base_prefix).parent.glob("*/bin/python3"))
    named = [path for minor in range(10, 20) if (path := shutil.which(f"python3.{minor}"))]
    found: dict[str, str] = {}
    for python in [*beside, *named]:
        try:
            said = subprocess.run(
                [python, "-Ic", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True, text=True, timeout=20,
            )
        except OSError:
            continue
        version = said.stdout.strip()
        if not said.returncode and int(version.split(".")[0]) == 3 and int(version.split(".")[1]) >= 10:
            found.setdefault(version, python)
    found.pop(f"{sys.version_info.major}.{sys.version_info.minor}", None)
    return found


OTHER_PYTHONS = other_pythons()


@pytest.mark.parametrize("python", OTHER_PYTHONS.values(), ids=OTHER_PYTHONS.keys())
def test_fingerprints_are_the_same_on_other_pythons(python: str) -> None:
    """Our own source.py, run by that Python, on synthetic sources and on every function of a long DeepSpeed module."""
    texts = {**{name: text for name, (text, _) in PINNED.items()}, "letter": NEW_LETTER}
    script = dedent(
        """
        import ast, json, sys, types
        package = types.ModuleType("ds_gradfix")
        package.__path__ = [sys.argv[1]]
        sys.modules["ds_gradfix"] = package
        from ds_gradfix.source import fingerprint
        given = json.load(sys.stdin)
        marks = {name: fingerprint(ast.parse(text).body[0]) for name, text in given["texts"].items()}
        functions = [n for n in ast.walk(ast.parse(open(given["file"], "rb").read())) if isinstance(n, ast.FunctionDef)]
        print(json.dumps([marks, [fingerprint(node) for node in functions]]))
        """
    )
    package = Path(inspect.getfile(fingerprint)).parent
    said = subprocess.run(
        [python, "-IB", "-c", script, str(package)],
        input=json.dumps({"texts": texts, "file": str(STAGE3_FILE)}),
        capture_output=True, text=True, timeout=60,
    )
    assert said.returncode == 0, said.stderr
    marks, of_functions = json.loads(said.stdout)
    here = [n for n in ast.walk(ast.parse(STAGE3_FILE.read_bytes())) if isinstance(n, ast.FunctionDef)]
    assert of_functions == [fingerprint(node) for node in here]
    assert len(of_functions) > 100
    assert marks == {name: mark(text) for name, text in texts.items()}


# -------------------------------------------------------------------------------------- rules


def rewritten(text: str, *rules: Rule) -> str:
    """The function's text after the rules, as Python prints it."""
    node = ast.parse(dedent(text)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return ast.unparse(rewrite(Function(Path("subject.py"), node.name, node), rules).node)


def plain(text: str) -> str:
    return ast.unparse(ast.parse(dedent(text)))


def test_a_hole_takes_any_expression_and_gives_it_to_the_replacement() -> None:
    assert rewritten("def f(a):\n    x.y[0].div_(a + 1)", Rule("$b.div_($s)", "g($s, $b)")) == plain(
        "def f(a):\n    g(a + 1, x.y[0])"
    )


def test_a_repeated_hole_takes_the_same_expression_everywhere() -> None:
    rule = Rule("$b = $b.mul($f)", "$b *= $f")
    assert rewritten("def f():\n    x = y.mul(2)\n    x.z = x.z.mul(3)", rule) == plain(
        "def f():\n    x = y.mul(2)\n    x.z *= 3"
    )
    with pytest.raises(RewriteError):
        rewritten("def f():\n    x = y.mul(2)", rule)


def test_the_same_expression_stored_and_loaded_is_the_same() -> None:
    assert rewritten("def f():\n    x[0] = x[0] + 1", Rule("$a = $a + 1", "$a = $a + 2")) == plain(
        "def f():\n    x[0] = x[0] + 2"
    )


def test_a_failed_match_leaves_no_binding_behind() -> None:
    """``g(1, 2)`` binds $a before it fails; ``g(3, 3)`` must still match."""
    rule = Rule("g($a, $a)", "h($a)")
    assert rewritten("def f():\n    g(1, 2)\n    g(3, 3)", rule) == plain("def f():\n    g(1, 2)\n    h(3)")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    self.b.div_(n / float(s), 1)",
        "def f():\n    self.b.div_()",
        "def f():\n    self.b.div(n)",
        "def f():\n    x = self.b.div_",
        "def f():\n    self.b.div_(*n)",
        "def f():\n    self.b.div_(k=n)",
    ],
)
def test_nearly_is_not_a_match(text: str) -> None:
    with pytest.raises(RewriteError, match="stands there 0 times instead of 1"):
        rewritten(text, Rule("$b.div_($s)", "h($b)"))


@pytest.mark.parametrize("in_source", ["1", "True"])
def test_a_number_in_a_pattern_is_that_number_and_no_other_type(in_source: str) -> None:
    """1, True and 1.0 are equal, and not the same program: fingerprints tell them apart, patterns must too."""
    with pytest.raises(RewriteError):
        rewritten(f"def f():\n    g({in_source})", Rule("g(1.0)", "h()"))


def test_matches_everywhere_and_in_order() -> None:
    text = "def f():\n    if a:\n        for b in c: g(1)\n    with d:\n        return [g(2) for e in g(3)]"
    assert rewritten(text, Rule("g($x)", "h($x)", (3, 3))) == plain(text.replace("g(", "h("))


@pytest.mark.parametrize("there", range(5))
@pytest.mark.parametrize("times", [(1, 1), (0, 1), (2, 3), (0, 0)])
def test_a_rule_matches_exactly_as_often_as_it_says(there: int, times: tuple[int, int]) -> None:
    text = "def f():\n    pass\n" + "    g(1)\n" * there
    rule = Rule("g($x)", "h($x)", times)
    low, high = times
    if low <= there <= high:
        assert rewritten(text, rule) == plain(text.replace("g(", "h("))
    else:
        with pytest.raises(RewriteError) as caught:
            rewritten(text, rule)
        wanted = str(low) if low == high else f"{low} to {high}"
        assert f"the pattern 'g($x)' stands there {there} times instead of {wanted}" in str(caught.value)
        assert "f in subject.py" in str(caught.value)


def test_a_statement_is_taken_out_or_replaced() -> None:
    text = "def f():\n    a = 1\n    if x:\n        a = 2\n    return a"
    assert rewritten(text, Rule("if x:\n    a = $v", "")) == plain("def f():\n    a = 1\n    return a")
    rule = Rule("if x:\n    a = $v", "a = x and $v")
    assert rewritten(text, rule) == plain("def f():\n    a = 1\n    a = x and 2\n    return a")


def test_an_expression_statement_gives_way_to_a_statement_but_an_operand_does_not() -> None:
    rule = Rule("b.div_($s)", "p = before(b, $s)")
    assert rewritten("def f():\n    b.div_(2)", rule) == plain("def f():\n    p = before(b, 2)")
    with pytest.raises(RewriteError, match="0 times"):
        rewritten("def f():\n    c = b.div_(2)", rule)


def test_a_statement_gives_way_to_an_expression() -> None:
    """The replacement stands alone on its line: the text that is compiled must be the tree that was made."""
    text = rewritten("def f(x):\n    y = 1\n    x = y\n    return x", Rule("x = $v", "g($v)"))
    assert ast.parse(text)
    assert text == plain("def f(x):\n    y = 1\n    g(y)\n    return x")


def test_taking_the_only_statement_out_of_a_block_leaves_python_or_refuses() -> None:
    try:
        text = rewritten("def f(x):\n    if x:\n        x = 2\n    return x", Rule("x = 2", ""))
    except RewriteError:
        return
    assert ast.parse(text)


def test_rules_are_applied_one_after_the_other() -> None:
    assert rewritten("def f():\n    a()", Rule("a()", "b()"), Rule("b()", "c()")) == plain("def f():\n    c()")


def test_rewriting_leaves_its_input_alone(write: Writer) -> None:
    function = find(write("def f():\n    g(1)\n"), "f")
    before = ast.dump(function.node, include_attributes=True)
    after = rewrite(function, [Rule("g($x)", "h($x)")])
    assert ast.dump(function.node, include_attributes=True) == before
    assert (after.path, after.qualname, after.future) == (function.path, function.qualname, function.future)
    assert fingerprint(after.node) != fingerprint(function.node)


def test_a_rule_of_several_statements_is_refused(write: Writer) -> None:
    function = find(write("def f():\n    g(1)\n"), "f")
    with pytest.raises(ValueError, match="one expression or statement"):
        rewrite(function, [Rule("a()\nb()", "")])
    with pytest.raises(ValueError, match="one expression or statement"):
        rewrite(function, [Rule("g(1)", "a()\nb()")])


def test_diff_shows_what_changes_and_only_that(write: Writer) -> None:
    function = find(write("def f(x):\n    a = 1\n    b = 2\n    c = 3\n    g(x)\n    return x\n"), "f")
    text = diff(function, rewrite(function, [Rule("g($x)", "h($x)")]))
    lines = text.splitlines()
    assert lines[0] == "--- installed/subject.py:1 f"
    assert lines[1] == "+++ corrected/subject.py f"
    assert [line for line in lines[2:] if line[0] in "+-"] == ["-    g(x)", "+    h(x)"]
    assert diff(function, function) == ""


# ---------------------------------------------------------------------------------- recompile


@pytest.mark.parametrize(
    ("qualname", "attribute"),
    [
        ("f", "f"),
        ("__f", "__f"),
        ("A.f", "f"),
        ("A.__f", "_A__f"),
        ("A._f", "_f"),
        ("A.__f__", "__f__"),
        ("_A.__f", "_A__f"),
        ("__A.__f", "_A__f"),
        ("A.B.__f", "_B__f"),
        ("A_.__f_", "_A___f_"),
    ],
)
def test_private_names_are_mangled_as_python_does(write: Writer, qualname: str, attribute: str) -> None:
    assert mangled(qualname) == attribute
    *classes, name = qualname.split(".")
    lines = [f"{'    ' * depth}class {part}:" for depth, part in enumerate(classes)]
    lines.append(f"{'    ' * len(classes)}def {name}(*a): return 1")
    owner: Any = run_file(write("\n".join(lines)))
    for part in classes:
        owner = vars(owner)[part]
    assert attribute in vars(owner)


def test_a_rewritten_method_uses_its_class_s_private_names(write: Writer) -> None:
    path = write(
        """
        class Outer:
            class _Inner:
                def __init__(self): self.__x = 20
                def __step(self, __y): return self.__x + __y
                def __run(self): return self.__step(1)
        """
    )
    function, module = remade(path, "Outer._Inner.__run", (Rule("self.__step(1)", "self.__step(2)"),))
    assert function(module.Outer._Inner()) == 22


def test_a_rewritten_function_lives_in_its_module_s_own_globals(write: Writer) -> None:
    function, module = remade(write("base = 1\ndef f(): return base + there()\n"), "f", (Rule("base", "base * 2"),))
    assert function.__globals__ is vars(module)
    module.base = 10
    module.there = lambda: 5  # comes after
    assert function() == 25
    assert "ds_gradfix_factory" not in vars(module)
    assert "_ds_gradfix" not in vars(module)


def test_recompiling_leaves_nothing_in_the_module(write: Writer) -> None:
    path = write("from __future__ import annotations\nclass A:\n    def f(self): return 1\ndef g(): return 2\n")
    module = run_file(path)
    before = dict(vars(module))
    for qualname in ("A.f", "g"):
        recompile(find(path, qualname), module, None, "test")
    assert dict(vars(module)) == before
    assert vars(module)["A"] is before["A"]


def test_the_helper_is_seen_under_its_name_and_each_function_keeps_its_own(write: Writer) -> None:
    path = write("class A:\n    def f(self, x): return x\n")
    rules = (Rule("return $x", "return _ds_gradfix.after($x)"),)
    first, _ = remade(path, "A.f", rules, types.SimpleNamespace(after=lambda x: x + 1))
    second, _ = remade(path, "A.f", rules, types.SimpleNamespace(after=lambda x: x + 2))
    assert (first(None, 1), second(None, 1)) == (2, 3)


def test_decorators_are_applied_again(write: Writer) -> None:
    path = write(
        """
        import functools
        calls = []
        def noted(label):
            def decorate(f):
                @functools.wraps(f)
                def wrapper(*args):
                    calls.append(label)
                    return f(*args)
                return wrapper
            return decorate
        class A:
            @noted("outer")
            @noted("inner")
            def f(self, x): return x
        """
    )
    function, module = remade(path, "A.f", (Rule("return $x", "return $x + 1"),))
    assert function(None, 1) == 2
    assert module.calls == ["outer", "inner"]


def test_signatures_survive(write: Writer) -> None:
    path = write(
        "K = 3\nclass A:\n    def f(self, a: int, /, b=K, *c, d=(1, 2), e, **g) -> str: return a, b, c, d, e, g\n"
    )
    function, module = remade(path, "A.f")
    assert inspect.signature(function) == inspect.signature(module.A.f)
    assert function(None, 1, e=2, h=3) == (1, 3, (), (1, 2), 2, {"h": 3})


def test_generators_and_coroutines_stay_what_they_are(write: Writer) -> None:
    path = write("async def f():\n    return 1\ndef g():\n    yield 1\n")
    assert inspect.iscoroutinefunction(remade(path, "f")[0])
    assert inspect.isgeneratorfunction(remade(path, "g")[0])


def test_postponed_annotations_stay_postponed(write: Writer) -> None:
    path = write("from __future__ import annotations\ndef f(x: NotThere) -> AlsoNotThere: return x\n")
    function, _ = remade(path, "f")
    assert function.__annotations__ == {"x": "NotThere", "return": "AlsoNotThere"}
    later = write("def f(x: int): return x\n")
    assert remade(later, "f")[0].__annotations__ == {"x": int}, "our own future imports must not leak in"


def test_a_method_that_names_its_own_class_gets_that_class(write: Writer) -> None:
    path = write(
        """
        class A:
            limit = 7
            def f(self): return A.limit, isinstance(self, A), A
        """
    )
    function, module = remade(path, "A.f")
    assert function(module.A()) == (7, True, module.A)


def test_a_function_that_calls_itself_goes_through_its_module(write: Writer) -> None:
    """As the original does: what is installed in the module's place, also for the inner calls."""
    function, module = remade(write("def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"), "f")
    module.f = lambda n: 100
    assert function(1) == 101


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return super().f()", "super"),
        ("return super(A, self).f()", "super"),
        ("return __class__", "__class__"),
        ("return [super().f() for _ in x]", "super"),
        ("return (lambda: super().f())()", "super"),
    ],
)
def test_super_is_refused(write: Writer, body: str, named: str) -> None:
    path = write(f"class A:\n    def f(self, x=()):\n        {body}\n")
    with pytest.raises(RewriteError, match=rf"A\.f uses {named}$"):
        remade(path, "A.f")


def test_tracebacks_and_inspect_show_the_corrected_lines(write: Writer) -> None:
    path = write(
        """
        # far down in the file
        class A:
            def f(self, x):
                '''Docstring.'''
                y = x  # comment

                return y
        """
    )
    function, _ = remade(path, "A.f", (Rule("return $y", "return $y / (x - x)"),))
    with pytest.raises(ZeroDivisionError) as caught:
        function(None, 1)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename == "<ds-gradfix A.f>"
    assert frame.line == "return y / (x - x)"
    assert frame.name == "f"
    source = inspect.getsource(function)
    assert dedent(source).rstrip() == plain(
        "def f(self, x):\n    '''Docstring.'''\n    y = x\n    return y / (x - x)"
    )


def test_two_corrections_of_one_name_keep_their_own_text(write: Writer) -> None:
    path = write("def f(x):\n    return x\n")
    module = run_file(path)
    functions = [
        recompile(rewrite(find(path, "f"), (Rule("return x", f"return x + {n}"),)), module, None, f"patch-{n} m:f")
        for n in (1, 2)
    ]
    assert [inspect.getsource(f).splitlines()[-1].strip() for f in functions] == ["return x + 1", "return x + 2"]


def test_what_is_compiled_is_the_program_that_was_read() -> None:
    """Recompiling goes through Python's printed text: for a whole DeepSpeed module that text is the same program."""
    tree = ast.parse(STAGE3_FILE.read_bytes())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 100
    for function in functions:
        printed = ast.parse(ast.unparse(function)).body[0]
        assert fingerprint(printed) == fingerprint(function), function.name
