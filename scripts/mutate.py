"""Changes one thing at a time in a module, and lists the changes that no test notices.

It shows how good the tests are: ``scripts/mutate fsdpckpt/plan/copies.py --tests tests/plan``. Comparisons,
arithmetic, boolean operators, constants and conditions are changed, statements deleted. Each change is tried in a
forked process, and no file is written. The tests that run the changed line come first, and all others only if these
notice nothing. Tests that run past the limit have noticed the change. The exit code is 1 if a change survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    decorators = {id(each) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())}
    settings = {id(inner) for node in ast.walk(tree) if id(node) in decorators for inner in ast.walk(node)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if id(node) in settings:  # as frozen and slots of a dataclass, which no behaviour shows
            continue
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


def statements(tree: ast.Module) -> dict[int, range]:
    """The lines of the innermost statement at each line; of a compound statement, those before its body."""
    lines: dict[int, range] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            of_node = range(node.lineno, max(end, node.lineno + 1))
            lines.update(dict.fromkeys(of_node, of_node))
    return lines


@dataclass(frozen=True)
class Runs:
    """What an unchanged run of the tests has shown.

    ``lines``: the lines of the module that each test runs, by its id. ``seconds``: how long each took. ``always``: the
    lines that run as the module is imported, and in fixtures that tests share. ``start``: seconds until the first test.
    """

    lines: dict[str, set[int]]
    seconds: dict[str, float]
    always: set[int]
    start: float

    def of(self, lines: range) -> list[str] | None:
        """The tests that run one of ``lines``; all of them is None."""
        found = [test for test, run in self.lines.items() if not run.isdisjoint(lines)]
        return found if self.always.isdisjoint(lines) and len(found) < len(self.lines) else None

    def limit(self, tests: Collection[str] | None) -> int:
        """The seconds that these tests may take: three unchanged runs and 10."""
        seconds = [self.seconds[test] for test in (self.seconds if tests is None else tests)]
        return int(3 * (self.start + sum(seconds))) + 10


class Recorder:
    """A plugin of pytest that notes, in the file ``noted``, which lines of one module each test runs."""

    def __init__(self, path: Path, noted: str) -> None:
        self.path, self.noted, self.began = str(path), noted, time.monotonic()
        self.lines: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}
        self.always: set[int] = set()
        self.now = self.always
        sys.settrace(self.trace)
        threading.settrace(self.trace)

    def trace(self, frame: Any, event: str, argument: object) -> Any:
        return self.trace_lines if frame.f_code.co_filename == self.path else None

    def trace_lines(self, frame: Any, event: str, argument: object) -> Any:
        self.now.add(frame.f_lineno)
        return self.trace_lines

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now = self.lines.setdefault(nodeid, set())
        self.seconds[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.now = self.always
        self.seconds[nodeid] = time.monotonic() - self.seconds[nodeid]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What several tests share is none of the first one's."""
        before = self.now
        if fixturedef.scope != "function":
            self.now = self.always
        try:
            return (yield)
        finally:
            self.now = before

    def pytest_sessionfinish(self) -> None:
        """For the process that forked this one: what was noted, and what was imported from other packages."""
        sys.settrace(None)
        start = time.monotonic() - self.began - sum(self.seconds.values())
        ours = ("fsdpckpt", "tests", "scripts", "__main__")
        packages = [name for name in sys.modules if name.partition(".")[0] not in ours]
        lines = {test: sorted(run) for test, run in self.lines.items()}
        Path(self.noted).write_text(json.dumps([lines, self.seconds, sorted(self.always), start, packages]))


class Chosen:
    """A plugin of pytest that runs these tests alone, the files that take least time first."""

    def __init__(self, tests: list[str], runs: Runs) -> None:
        self.tests, self.files = set(tests), dict[str, float]()
        for test in tests:
            file = test.partition("::")[0]
            self.files[file] = self.files.get(file, 0) + runs.seconds[test]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests]
        items.sort(key=lambda item: self.files[item.nodeid.partition("::")[0]])


def trial(
    source: ast.Module, path: Path, tests: list[str], limit: int, plugin: Callable[[], object] | None = None
) -> int:
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
        plugins = [] if plugin is None else [plugin()]
        code = int(
            pytest.main(["-x", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins)
        )
    finally:
        os._exit(code)


def unchanged(tree: ast.Module, path: Path, tests: list[str]) -> Runs:
    """Run the tests without a change; what they import from other packages is imported here, too, once."""
    with tempfile.NamedTemporaryFile() as noted:
        if trial(copy.deepcopy(tree), path, tests, 1800, lambda: Recorder(path, noted.name)):
            raise SystemExit(f"{path}: the tests fail without any change")
        lines, seconds, always, start, packages = json.loads(Path(noted.name).read_text())
    for name in packages:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    return Runs({test: set(run) for test, run in lines.items()}, seconds, set(always), start)


def noticed(tree: ast.Module, path: Path, tests: list[str], runs: Runs, lines: range, limit: int | None) -> bool:
    """Whether a test notices that ``tree`` is not the module: those that run the changed lines are asked first."""
    chosen = runs.of(lines)
    if chosen:
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        if trial(tree, path, files, limit or runs.limit(chosen), lambda: Chosen(chosen, runs)):
            return True
    return trial(tree, path, tests, limit or runs.limit(None)) != 0


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
    parser.add_argument(
        "--limit", type=int, help="seconds for one trial; default: three unchanged runs of its tests and 10"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import numpy  # noqa: F401
    import torch  # noqa: F401  # once, not in every trial

    survived = 0
    for module in options.modules:
        tree = ast.parse(module.read_text())
        runs, lines_at = unchanged(tree, module, options.tests), statements(tree)
        found = sorted(mutations(tree), key=lambda one: one[:2])
        if options.lines is not None:
            found = [one for one in found if one[0] in options.lines]
        if options.sample is not None and options.sample < len(found):
            found = sorted(random.Random(options.seed).sample(found, options.sample), key=lambda one: one[:2])
        count = 0
        for line, what, change, restore in found:
            change()
            try:
                changed = ast.fix_missing_locations(copy.deepcopy(tree))
            finally:
                restore()
            if noticed(changed, module, options.tests, runs, lines_at.get(line, range(line, line + 1)), options.limit):
                count += 1
            else:
                survived += 1
                text = module.read_text().splitlines()[line - 1].strip()
                print(f"{module}:{line}: survived: {what}: {text}", flush=True)
        print(f"{module}: {count} of {len(found)} changes noticed", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
