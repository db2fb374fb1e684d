"""Counts what a reader of the code has to follow, and prints two tables for docs/architecture.md.

usage: scripts/walks.py [CHECKOUT ...]     (default: this one; each gets a column)

*Walks*: a value is followed through the calls of a command, as they happen, with a profile hook. ``SRC`` is the path
and every checkpoint that is made of it; ``options`` is every record of options and the decision made of them. A *room*
is a module of the package that is called with such a value, and not that of the value's own class. A *climb* goes from
one room to one on a higher floor (the rows of the layers contract in pyproject.toml); a *return* goes to a room that
was left before. A *re-binding* is an assignment, in a function that was entered, to a name that has the value already
(``options = replace(options, ...)``). ``prepare`` and ``transform`` are the parts of ``convert`` below the functions of
these names. The source is a DCP directory and everything is converted: a selection would be read more than once.

*Table*: from the source alone. A circle is a strongly connected part of the graph of imports, those inside functions
and by a constant name included. A duplicate is a class name that stands twice, or a function whose body of four lines
or more does.
"""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = {
    "SRC": {"Checkpoint", "Draft", "TransformedCheckpoint", "Prepared"},  # ``_Steps``: what Draft and Decision replaced
    "options": {
        "ConvertOptions",
        "InspectOptions",
        "VerifyOptions",
        "TargetSpec",
        "Decision",
        "UnitsRequest",
        "WriteSpec",
        "_Steps",
    },
}
VALUES = ("ir/", "converters/steps/draft", "converters/target/decision", "options", "option_fields", "flags")
NAMES = {
    "SRC": {
        "source",
        "opened",
        "checkpoint",
        "adapted",
        "transformed",
        "prepared",
        "draft",
        "named",
        "chosen",
        "distinct",
    },
    "options": {"options", "spec", "decision", "request", "decided", "asked", "chosen"},
}
STARTS = ("convert", "prepare", "transform", "inspect", "verify")


# --- Walks.


@dataclass
class Walk:
    """The rooms that one value was seen in, in their order, and the functions that got it."""

    rooms: list[str] = field(default_factory=list)
    functions: set[tuple[str, int]] = field(default_factory=set)


def followed(run: Callable[[], object], package: Path, source: str) -> dict[str, dict[str, Walk]]:
    """The walks of each value in ``run``: by start, then by value."""
    walks = {start: {value: Walk() for value in RECORDS} for start in STARTS}
    depth = Counter[str]()
    folder = f"{package}/"

    def hook(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(folder) or code.co_name.startswith("<"):
            return
        room = code.co_filename[len(folder) :].removesuffix(".py")
        start = code.co_name if code.co_name in STARTS and _is_start(room, code.co_name) else None
        if event == "return":
            if start is not None:
                depth[start] -= 1
            return
        if start is not None:
            depth[start] += 1
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        for value, records in RECORDS.items():
            given = any(type(each).__name__ in records or (value == "SRC" and _is(each, source)) for each in arguments)
            for active in STARTS if given else ():
                if depth[active]:
                    walk = walks[active][value]
                    walk.functions.add((code.co_filename, code.co_firstlineno))
                    if not room.startswith(VALUES) and walk.rooms[-1:] != [room]:
                        walk.rooms.append(room)

    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(None)
    return walks


def _is(argument: object, source: str) -> bool:
    return isinstance(argument, str) and argument == source


def _is_start(room: str, name: str) -> bool:
    return room in {"convert": ("api",), "inspect": ("api",), "verify": ("api",)}.get(name, (f"converters/{name}",))


def floors(checkout: Path) -> dict[str, int]:
    """The floor of each package: the number of its row in the layers contract, the highest first."""
    document = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [each["layers"] for each in document["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    return {name.strip(): -number for number, row in enumerate(layers) for name in row.split("|")}


def counted(walk: Walk, value: str, floor: dict[str, int]) -> dict[str, int]:
    climbs = returns = 0
    seen: set[str] = set()
    for before, room in zip([None, *walk.rooms], walk.rooms, strict=False):
        climbs += before is not None and floor.get(room.split("/")[0], 0) > floor.get(before.split("/")[0], 0)
        returns += room in seen
        seen.add(room)
    rebindings = sum(_rebindings(*function, NAMES[value]) for function in walk.functions)
    return {"rooms": len(seen), "climbs": climbs, "returns": returns, "re-bindings": rebindings}


def _rebindings(path: str, line: int, names: set[str]) -> int:
    """How often the function at ``line`` assigns to one of ``names`` that it has already."""
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and min(n.lineno for n in (node, *node.decorator_list)) == line:
            bound = Counter(each.arg for each in (*node.args.args, *node.args.kwonlyargs))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    bound[inner.id] += 1
            return sum(count - 1 for name, count in bound.items() if name in names)
    return 0


def walk_all(checkout: Path) -> dict[str, dict[str, dict[str, int]]]:
    """What the commands of ``checkout``, which is on ``sys.path``, do with a golden DCP directory."""
    import fsdpckpt

    package, floor = Path(str(fsdpckpt.__file__)).parent, floors(checkout)
    found: dict[str, dict[str, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what is done with a path may depend on what is in it
        source, target = "walked", "written"
        for part in ("model", "optim"):
            shutil.copytree(ROOT / "tests" / "golden" / "torch-2.4" / "f1_full_dcp" / part, f"{source}/{part}")
        runs: dict[str, Callable[[], object]] = {
            "convert": lambda: fsdpckpt.convert(
                source, target, to="sharded", container="torch", world_size=3, buffers=["buf"]
            ),
            "inspect": lambda: fsdpckpt.inspect(source),
            "verify": lambda: fsdpckpt.verify(source),
        }
        for name, run in runs.items():
            walks = followed(run, package, source)
            for start in ("convert", "prepare", "transform") if name == "convert" else (name,):
                found[start] = {value: counted(walk, value, floor) for value, walk in walks[start].items()}
    return found


# --- The table.


def modules_of(package: Path) -> dict[str, ast.Module]:
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def lines_of(path: Path, tree: ast.Module) -> Counter[str]:
    """How many lines of each kind a module has; those of a kind only."""
    text = path.read_text(encoding="utf-8")
    kinds = dict.fromkeys(range(1, text.count("\n") + 2), "blank")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        for line in range(token.start[0], token.end[0] + 1):
            comment = token.type == tokenize.COMMENT
            kinds[line] = "comments" if comment and kinds[line] == "blank" else kinds[line] if comment else "code"
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            literal = node.body[0]
            kinds.update(dict.fromkeys(range(literal.lineno, (literal.end_lineno or 0) + 1), "docstrings"))
    return Counter(kinds.values())


def imports_of(name: str, tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """The modules of the package that this one imports, wherever in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        for dotted in names:
            if dotted.split(".")[0] == "fsdpckpt":
                found = _module(dotted.split(".")[1:], modules)
                if found is not None and found != name:
                    yield found


def _module(parts: Sequence[str], modules: set[str]) -> str | None:
    for size in range(len(parts), 0, -1):
        path = "/".join(parts[:size])
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in modules:
                return name
    return None


def circles(graph: dict[str, set[str]]) -> int:
    """How many groups of modules import each other, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = 0

    def visit(name: str) -> None:
        nonlocal found
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            found += len(group) > 1

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in number:
            visit(name)
    return found


def measured(checkout: Path) -> dict[str, object]:
    """The rows of the table for ``checkout``."""
    package = checkout / "fsdpckpt"
    trees = modules_of(package)
    lines = Counter[str]()
    in_init, wide = 0, 0
    importers = Counter[str]()
    graph: dict[str, set[str]] = {}
    longest = (0, "")
    bodies, classes = Counter[str](), Counter[str]()
    for name, tree in trees.items():
        of_module = lines_of(package / name, tree)
        lines.update(of_module)
        in_init += of_module["code"] if name.endswith("__init__.py") else 0
        wide += sum(len(line) > 110 for line in (package / name).read_text(encoding="utf-8").splitlines())
        graph[name] = set(imports_of(name, tree, set(trees)))
        importers.update(graph[name])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                longest = max(longest, (size, f"{name}: {node.name}"))
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body and (body[-1].end_lineno or 0) - body[0].lineno >= 3:
                    bodies["\n".join(map(ast.dump, body))] += 1
    once = [name for name in trees if importers[name] == 1 and not name.endswith("__init__.py")]
    return {
        "modules": len(trees),
        "lines of code": lines["code"],
        "lines of comments alone": lines["comments"],
        "lines of docstrings": lines["docstrings"],
        "code in `__init__.py`": in_init,
        "lines wider than 110": wide,
        "circles": circles(graph),
        "modules with one importer": len(once),
        "longest function": f"{longest[0]} ({longest[1]})",
        "class names that stand twice": sum(count > 1 for count in classes.values()),
        "function bodies that stand twice": sum(count - 1 for count in bodies.values()),
    }


def main() -> int:
    if sys.argv[1:2] == ["--walk"]:
        print(json.dumps(walk_all(Path(sys.argv[2]))))
        return 0
    checkouts = [Path(each).resolve() for each in sys.argv[1:]] or [ROOT]
    heads = [each.name for each in checkouts]
    walks = []
    for checkout in checkouts:
        command = [sys.executable, __file__, "--walk", str(checkout)]
        done = subprocess.run(
            command,
            env={"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        walks.append(json.loads(done.stdout.splitlines()[-1]))
    print("| walk | " + " | ".join(f"{head}: rooms, climbs, returns, re-bindings" for head in heads) + " |")
    print("|---|" + "---|" * len(heads))
    for start in STARTS:
        for value in RECORDS:
            cells = [", ".join(map(str, walk[start][value].values())) for walk in walks]
            print(f"| {value} through `{start}` | " + " | ".join(cells) + " |")
    print()
    tables = [measured(checkout) for checkout in checkouts]
    print("| | " + " | ".join(heads) + " |")
    print("|---|" + "---|" * len(heads))
    for row in tables[0]:
        cells = [f"{table[row]:,}" if isinstance(table[row], int) else str(table[row]) for table in tables]
        print(f"| {row} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
