"""What SECURITY.md promises: which files can run code that is not their own, start a process or reach a network."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARP = {"eval", "exec", "compile", "__import__", "breakpoint", "system", "popen", "spawnv", "execv", "fork"}
MODULES = {"subprocess", "runpy", "multiprocessing", "pickle", "marshal", "shelve", "ctypes", "socket", "urllib"}
USED = {
    "ds_gradfix/source.py": {"exec", "compile"},
    "ds_gradfix/cli/doctor/look.py": {"subprocess"},
    "ds_gradfix/cli/run.py": {"runpy"},
    "ds_gradfix/verify/launch.py": {"subprocess"},
}


def sharp_things(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and not ast.unparse(node.value) == "re":
            yield node.attr


def test_nothing_else_runs_code_starts_processes_or_reaches_a_network() -> None:
    files = [*(ROOT / "ds_gradfix").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]
    assert len(files) > 50
    found = {
        str(file.relative_to(ROOT)): used
        for file in files
        if (used := (SHARP | MODULES) & set(sharp_things(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert found == USED


def test_the_start_up_file_is_one_plain_line_that_looks_at_the_variable_first() -> None:
    (line,) = (ROOT / "ds_gradfix_startup.pth").read_text(encoding="utf-8").splitlines()
    first, second = ast.parse(line).body
    assert ast.unparse(first) == "import os"
    assert isinstance(second, ast.Expr) and isinstance(second.value, ast.BoolOp)
    assert isinstance(second.value.op, ast.And)
    guard, start = map(ast.unparse, second.value.values)
    assert guard == "os.getenv('DS_GRADFIX', os.getenv('PYTHON_DS_GRADFIX'))"
    assert start == "__import__('ds_gradfix._boot')._boot.main()"
