"""The package as a whole: what its ``__init__.py`` files export, how modules import each other, and their names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torch

import fsdpckpt

PACKAGE = Path(fsdpckpt.__file__).parent
# Names that are imported on first use.
LAZY = {
    "__init__.py",
    "comm/__init__.py",
}
# Modules that import others of the package by a name that the linter of imports does not see, and why each may. None of
# them imports what lies above it, so none hides a circle.
BY_NAME = {
    "__init__.py": "the public names, imported on first use; nothing lies above them",
    "comm/__init__.py": "the names of its own modules, most of which need torch",
    "cli/app.py": "what a command needs and takes long to import, all of it below the command line",
    "flat/live/meta.py": "the user's module that builds a model",
}


def _is_export(statement: ast.stmt) -> bool:
    """A docstring, an import, or ``__all__``."""
    if isinstance(statement, ast.Assign):
        return [ast.unparse(target) for target in statement.targets] == ["__all__"]
    return isinstance(statement, ast.ImportFrom | ast.Expr)


def test_an_init_file_only_exports() -> None:
    code = {}
    for path in PACKAGE.rglob("__init__.py"):
        name = path.relative_to(PACKAGE).as_posix()
        lines = [statement.lineno for statement in ast.parse(path.read_text()).body if not _is_export(statement)]
        if lines and name not in LAZY:
            code[name] = lines
    assert not code, "move this code into a module of the package"


def test_a_class_name_stands_for_one_thing() -> None:
    modules: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef):
                modules.setdefault(statement.name, []).append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in modules.items() if len(found) > 1}
    assert not twice, "give one of them a name that says what it is"


def test_every_import_is_seen_by_the_linter_of_imports() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _IMPORTING:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == BY_NAME.keys(), "write an import statement: a circle must fail the build"


_IMPORTING = ("import_module", "__import__", "exec_module", "run_module", "find_loader", "reload")


def test_a_command_imports_only_what_lies_below_the_command_line() -> None:
    needed = {
        node.value
        for node in ast.walk(ast.parse((PACKAGE / "cli" / "app.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("fsdpckpt.")
    }
    assert needed and not [name for name in needed if name.startswith(("fsdpckpt.cli", "fsdpckpt.testing"))]


def test_the_package_verify_is_the_function_too_whichever_is_imported_first() -> None:
    first = "import fsdpckpt; before = fsdpckpt.verify; import fsdpckpt.verify.integrity; after = fsdpckpt.verify"
    second = "import fsdpckpt.verify.integrity, fsdpckpt.api; before = fsdpckpt.api.verify; after = fsdpckpt.verify"
    same = "; import inspect; assert inspect.signature(before) == inspect.signature(after) and callable(after)"
    for code in (first, second):
        subprocess.run([sys.executable, "-c", code + same], check=True, timeout=60)


_STARTS = """
import runpy, sys
sys.argv = ["fsdpckpt", *sys.argv[1:]]
try:
    runpy.run_module("fsdpckpt", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
found = [name for name in sys.modules if name.startswith("fsdpckpt.")]
print(*found, *{"torch", "email", "html.entities", "pydantic", "importlib.metadata"} & sys.modules.keys())
"""


def _imported(*arguments: str | Path) -> set[str]:
    done = subprocess.run([sys.executable, "-c", _STARTS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


_WRITERS = {f"fsdpckpt.writers.{name}" for name in ("dcp", "safetensors", "torch_ranks", "universal")}
_WRITERS.add("fsdpckpt.flat.flatten")
_NEEDED_BY_FEW = {
    "email", "html.entities", "importlib.metadata", "pydantic", "torch",
    "fsdpckpt.converters.output.streamed", "fsdpckpt.converters.output.upload", "fsdpckpt.flat.unflatten",
    "fsdpckpt.flat.units.source", "fsdpckpt.readers.deepspeed.read", "fsdpckpt.readers.nanotron.read",
}  # fmt: skip


def test_a_conversion_imports_the_reader_and_the_writer_that_it_needs_and_no_other(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    for source, target, *options, writer in (
        ("a.pt", "dcp", "--to", "sharded", "--world-size", "2", "dcp"),
        ("dcp", "a.safetensors", "--to", "full", "safetensors"),
    ):
        imported = _imported("convert", tmp_path / source, tmp_path / target, *options, "--quiet")
        assert imported & _WRITERS == {f"fsdpckpt.writers.{writer}"}
        assert not imported & _NEEDED_BY_FEW
