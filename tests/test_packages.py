"""``__init__.py`` only exports: what a package does stands in its modules."""

from __future__ import annotations

import ast
from pathlib import Path

import fsdpckpt

PACKAGE = Path(fsdpckpt.__file__).parent
# Names that are imported on first use, and a package that is called.
LAZY = {
    "__init__.py",
    "comm/__init__.py",
    "verify/__init__.py",
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
