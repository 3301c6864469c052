"""Functions in source files: find, fingerprint, rewrite, recompile, show.

Everything here reads the module's *file*. The live object is no witness: many DeepSpeed methods
sit behind a decorator that hides signature, name and source of what it wraps.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import decode_source
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_gradfix.errors import RewriteError

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Fields that differ between Python versions for one and the same source, or say nothing.
_SILENT_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})
_BLOCKS = (ast.If, ast.Try, ast.With)


@dataclass(frozen=True)
class Function:
    """A function as it stands in a source file, with the ``__future__`` imports it lives under."""

    path: Path
    qualname: str
    node: FunctionNode
    future: tuple[ast.ImportFrom, ...] = ()

    @property
    def line(self) -> int:
        return self.node.lineno


def find_functions(path: Path, qualnames: Iterable[str]) -> dict[str, Function | None]:
    """Find each ``Class.method`` or ``function`` in one file; None for what isn't there.

    Raises OSError if the file can't be read and SyntaxError or ValueError if it isn't Python.
    The last definition of a name wins, as it does at run time.
    """
    data = path.read_bytes()
    text = decode_source(data)
    tree: ast.Module | None = None
    future: tuple[ast.ImportFrom, ...] | None = None
    found: dict[str, Function | None] = {}
    for qualname in qualnames:
        node = _cut_out(text, qualname)
        if node is None:
            tree = tree or ast.parse(data, filename=str(path))
            node = _descend(tree, qualname)
        if future is None:
            future = _future_imports(text)
        found[qualname] = Function(path, qualname, node, future) if node else None
    return found


def _future_imports(text: str) -> tuple[ast.ImportFrom, ...]:
    if "__future__" not in text:
        return ()
    return tuple(n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom) and n.module == "__future__")


_MOST_CUTS = 8


def _cut_out(text: str, qualname: str) -> FunctionNode | None:
    """The function's syntax tree from its own lines alone: parsing a whole module of DeepSpeed takes far longer.

    None wherever the lines alone could mislead: a name that is defined twice, a class in a class, a definition under
    a condition. The lines end where the indentation does; a cut inside a signature or a string does not parse.
    """
    *classes, name = qualname.split(".")
    starts = _heads(text, name)
    if len(classes) > 1 or len(starts) != 1:
        return None
    start = starts[0]
    depth = len(text[start:]) - len(text[start:].lstrip(" "))
    if bool(classes) != bool(depth):
        return None
    if classes:
        heads = _heads(text, classes[0])
        between = text[heads[0] : start] if len(heads) == 1 and heads[0] < start else None
        # The class is the block that the function is in: nothing but comments stands further left in between.
        if between is None or between[0] != "c" or re.search(rf"\n {{0,{depth - 1}}}[^\s#]", between):
            return None
    lines = text.split("\n")
    line = first = text.count("\n", 0, start)
    for number in range(line - 1, -1, -1):
        if _is_at_or_left_of(lines[number], depth):
            if not lines[number].lstrip().startswith("@"):
                break
            first = number
    ends = (number for number in range(line + 1, len(lines)) if _is_at_or_left_of(lines[number], depth))
    for end in islice(chain(ends, [len(lines)]), _MOST_CUTS):
        try:
            # Under a class of one line, to keep the indentation: strings of several lines would change without it.
            tree = ast.parse("\n".join([*("class _:" for _ in classes), *lines[first:end]]))
        except SyntaxError:
            continue
        (node,) = tree.body[0].body if classes else tree.body  # type: ignore[attr-defined]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        return ast.increment_lineno(node, first - len(classes))
    return None


_KEYWORDS = ("def", "async def", "class")


def _heads(text: str, name: str) -> list[int]:
    """Where the lines begin that define a function or class of this name."""
    found = []
    at = text.find(name)
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        end = at + len(name)
        whole = not (text[end : end + 1].isalnum() or text[end : end + 1] == "_")
        if whole and " ".join(text[start:at].split()) in _KEYWORDS:
            found.append(start)
        at = text.find(name, end)
    return found


def _is_at_or_left_of(line: str, depth: int) -> bool:
    """Whether a line that says something starts in this column or further left."""
    return bool(line[: depth + 1].strip()) and not line.lstrip().startswith("#")


def _descend(node: ast.AST, qualname: str) -> FunctionNode | None:
    for name in qualname.split("."):
        named = [child for child in _definitions(node) if child.name == name]
        if not named:
            return None
        node = named[-1]
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | FunctionNode]:
    """Classes and functions defined directly in a module or class body, conditional ones too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, (*_BLOCKS, ast.ExceptHandler)):
            yield from _definitions(child)


def fingerprint(node: ast.AST) -> str:
    """A hash of a syntax tree: 16 hex digits, the same on every Python from 3.10.

    Comments, layout and docstrings do not count; decorators, defaults and annotations do.
    """
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    if isinstance(value, ast.AST):
        fields = []
        for name, content in ast.iter_fields(value):
            if name == "body" and isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                content = _without_docstring(content)
            if name == "values" and isinstance(value, ast.JoinedStr):
                content = [part for part in content if not (isinstance(part, ast.Constant) and part.value == "")]
            if name not in _SILENT_FIELDS and content is not None and content != []:
                fields.append(f"{name}={_canonical(content)}")
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return ascii(value)  # repr depends on the Unicode version of the interpreter


def _without_docstring(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        if isinstance(body[0].value.value, str):
            return list(body[1:])
    return list(body)


# ---------------------------------------------------------------------------------- rewriting


@dataclass(frozen=True)
class Rule:
    """One structural edit: where ``pattern`` stands, put ``replacement``.

    Both are Python text: one expression, or one statement. ``$name`` in a pattern matches any
    expression, the same one wherever it stands again, and may be used in the replacement. An empty
    replacement takes the statement out. A rule that does not match between ``times[0]`` and
    ``times[1]`` times refuses the whole rewrite.
    """

    pattern: str
    replacement: str
    times: tuple[int, int] = (1, 1)


_HOLE = "ds_gradfix_hole_"


def _template(text: str) -> ast.stmt | ast.expr | None:
    body = ast.parse(text.replace("$", _HOLE)).body
    if not body:
        return None
    if len(body) > 1:
        raise ValueError(f"a rule's text is one expression or statement: {text!r}")
    statement = body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def _hole(node: Any) -> str | None:
    if isinstance(node, ast.Name) and node.id.startswith(_HOLE):
        return node.id
    return None


def _matches(pattern: Any, value: Any, bound: dict[str, ast.AST]) -> bool:
    hole = _hole(pattern)
    if hole is not None and isinstance(value, ast.expr) and not isinstance(value, ast.Starred):
        if hole in bound:
            return _canonical(bound[hole]) == _canonical(value)
        bound[hole] = value
        return True
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(value) and all(
            _matches(getattr(pattern, name, None), getattr(value, name, None), bound)
            for name in pattern._fields
            if name not in _SILENT_FIELDS
        )
    if isinstance(pattern, list):
        return (
            isinstance(value, list)
            and len(pattern) == len(value)
            and all(_matches(p, v, bound) for p, v in zip(pattern, value, strict=True))
        )
    return type(pattern) is type(value) and bool(pattern == value)


def _copied(value: Any) -> Any:
    """A syntax tree of its own; copy.deepcopy takes ten times as long."""
    if isinstance(value, ast.AST):
        fields = {name: _copied(content) for name, content in ast.iter_fields(value)}
        places = {name: getattr(value, name) for name in value._attributes if hasattr(value, name)}
        return type(value)(**fields, **places)
    return [*map(_copied, value)] if isinstance(value, list) else value


class _Fill(ast.NodeTransformer):
    def __init__(self, bound: dict[str, ast.AST]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _copied(self.bound[node.id]) if node.id in self.bound else node


class _Edit(ast.NodeTransformer):
    def __init__(self, rule: Rule) -> None:
        self.pattern = _template(rule.pattern)
        self.replacement = _template(rule.replacement)
        if isinstance(self.pattern, ast.expr) and not isinstance(self.replacement, ast.expr):
            self.pattern = ast.Expr(self.pattern)  # an expression gives way to a statement, or to nothing
        if isinstance(self.pattern, ast.stmt) and isinstance(self.replacement, ast.expr):
            self.replacement = ast.Expr(self.replacement)
        self.count = 0

    def visit(self, node: ast.AST) -> Any:
        bound: dict[str, ast.AST] = {}
        if type(node) is type(self.pattern) and _matches(self.pattern, node, bound):
            self.count += 1
            if self.replacement is None:
                return None
            return _Fill(bound).visit(_copied(self.replacement))
        return super().visit(node)


def rewrite(function: Function, rules: Sequence[Rule]) -> Function:
    """Apply the rules to a copy of the function's syntax tree, each exactly as often as it says.

    Raises RewriteError, naming the rule, how often it matched and how often it should have.
    """
    return _rewritten(function, tuple(rules))


@lru_cache(maxsize=256)  # a plan tries what is put in place a moment later
def _rewritten(function: Function, rules: tuple[Rule, ...]) -> Function:
    node = _copied(function.node)
    for rule in rules:
        edit = _Edit(rule)
        node = edit.visit(node)
        low, high = rule.times
        if not low <= edit.count <= high:
            wanted = str(low) if low == high else f"{low} to {high}"
            raise RewriteError(
                f"{function.qualname} in {function.path}: the pattern {rule.pattern!r} stands there"
                f" {edit.count} times instead of {wanted}"
            )
    node = ast.fix_missing_locations(node)
    try:
        same = fingerprint(ast.parse(ast.unparse(node)).body[0]) == fingerprint(node)
    except SyntaxError:
        same = False
    if not same:
        raise RewriteError(f"{function.qualname}: the edits make a syntax tree that is not Python")
    return Function(function.path, function.qualname, node, function.future)


def recompile(function: Function, module: ModuleType, helper: object, label: str) -> Callable[..., Any]:
    """Compile a rewritten function in its module's own globals; decorators are applied again.

    The function is compiled inside a stub of its class, so that private names are mangled as
    before, and sees ``helper`` under the name ``_ds_gradfix``. Its text is registered with
    ``linecache`` as ``<ds-gradfix LABEL>``: tracebacks, debuggers and ``inspect`` show it.
    """
    names = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name)}
    if names & {"super", "__class__"}:
        raise RewriteError(f"{function.qualname} uses {' and '.join(names & {'super', '__class__'})}")
    # The stub's name mangles as the class's own does, and hides neither it nor the function from the body.
    *classes, _ = function.qualname.split(".")
    stub = ast.parse(f"class ___{classes[-1].lstrip('_') if classes else ''}: pass").body[0]
    factory = ast.parse("def ds_gradfix_factory(_ds_gradfix): pass").body[0]
    assert isinstance(stub, ast.ClassDef) and isinstance(factory, ast.FunctionDef)
    stub.body = [function.node]
    factory.body = [stub, *ast.parse(f"return {stub.name}").body]
    tree = ast.Module(body=[*function.future, factory], type_ignores=[])
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    filename = f"<ds-gradfix {label}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec", dont_inherit=True), vars(module), namespace)
    return vars(namespace["ds_gradfix_factory"](helper))[mangled(function.qualname)]  # type: ignore[no-any-return]


def mangled(qualname: str) -> str:
    """The attribute name of ``Class.__method`` as Python stores it."""
    *classes, name = qualname.split(".")
    if classes and name.startswith("__") and not name.endswith("__"):
        return f"_{classes[-1].lstrip('_')}{name}"
    return name


def diff(before: Function, after: Function, context: int = 3) -> str:
    """Unified diff of two versions of a function, as Python writes their syntax trees, with lines of context."""
    return "\n".join(
        difflib.unified_diff(
            ast.unparse(before.node).splitlines(),
            ast.unparse(after.node).splitlines(),
            fromfile=f"installed/{before.path.name}:{before.line} {before.qualname}",
            tofile=f"corrected/{before.path.name} {before.qualname}",
            lineterm="",
            n=context,
        )
    )
