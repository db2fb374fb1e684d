"""Changes one thing at a time in a module, and lists the changes that no test notices.

It shows how good the tests are: ``scripts/mutate fsdpckpt/plan/copies.py --tests tests/plan``. Comparisons,
arithmetic, boolean operators, constants and conditions are changed, statements deleted. Each change is tried in a
forked process, and no file is written. Tests that run past the limit have noticed the change. The exit code is 1 if a
change survives.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LATE = 99  # exit code of a trial that ran past its limit


def other_constant(value: object) -> object:
    """A constant that is not ``value``; strings stay: most are messages."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value


def mutations(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None], Callable[[], None]]]:
    """``(line, what, do, undo)`` for every change of ``tree`` in place."""

    def swap(node: ast.AST, field: str, new: object, index: int | None = None) -> tuple[Callable[[], None], ...]:
        old = getattr(node, field) if index is None else getattr(node, field)[index]

        def put(value: object) -> None:
            if index is None:
                setattr(node, field, value)
            else:
                getattr(node, field)[index] = value

        return (lambda: put(new)), (lambda: put(old))

    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                if type(operator) in SWAPS:
                    yield line, "comparison", *swap(node, "ops", SWAPS[type(operator)](), index)
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
            yield line, "operator", *swap(node, "op", SWAPS[type(node.op)]())
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield line, "condition", *swap(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Constant) and other_constant(node.value) != node.value:
            yield line, f"constant {node.value!r}", *swap(node, "value", other_constant(node.value))
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if not isinstance(block, list) or isinstance(node, (ast.Module, ast.ClassDef)):
                continue
            for index, statement in enumerate(block):
                documentation = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not documentation and not isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom)):
                    yield statement.lineno, "deleted", *swap(node, name, ast.Pass(), index)


def trial(source: ast.Module, path: Path, tests: list[str], limit: int) -> int:
    """The exit code of the tests, run in a new process with ``source`` in place of ``path``."""
    child = os.fork()
    if child:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return LATE
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 70
    try:
        sys.meta_path.insert(0, Replaced(path, compile(source, str(path), "exec")))
        code = int(pytest.main(["-x", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    finally:
        os._exit(code)


class Replaced:
    """Imports one module from code."""

    def __init__(self, path: Path, code: object) -> None:
        self.name = ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        self.path, self.code = path, code

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        from importlib.machinery import ModuleSpec

        if name != self.name:
            return None
        spec = ModuleSpec(name, self, origin=str(self.path), is_package=self.path.name == "__init__.py")
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(self.path.parent))
        return spec

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: object) -> None:
        exec(self.code, module.__dict__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", type=Path, help="files below fsdpckpt")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is given")
    parser.add_argument("--sample", type=int, help="try so many changes of each module, chosen at random")
    parser.add_argument("--lines", type=int, nargs="+", help="try only changes of these lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="seconds for one trial; default: three unchanged runs and 10")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import numpy  # noqa: F401
    import torch  # noqa: F401  # once, not in every trial

    survived = 0
    for module in options.modules:
        tree = ast.parse(module.read_text())
        began = time.monotonic()
        if trial(copy.deepcopy(tree), module, options.tests, options.limit or 600):
            raise SystemExit(f"{module}: the tests fail without any change")
        limit = options.limit or int(3 * (time.monotonic() - began)) + 10
        found = sorted(mutations(tree), key=lambda one: one[:2])
        if options.lines is not None:
            found = [one for one in found if one[0] in options.lines]
        if options.sample is not None and options.sample < len(found):
            found = sorted(random.Random(options.seed).sample(found, options.sample), key=lambda one: one[:2])
        noticed = 0
        for line, what, change, restore in found:
            change()
            try:
                code = trial(ast.fix_missing_locations(copy.deepcopy(tree)), module, options.tests, limit)
            finally:
                restore()
            if code:
                noticed += 1
            else:
                survived += 1
                text = module.read_text().splitlines()[line - 1].strip()
                print(f"{module}:{line}: survived: {what}: {text}", flush=True)
        print(f"{module}: {noticed} of {len(found)} changes noticed", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
