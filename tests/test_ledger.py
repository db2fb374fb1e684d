"""The ledger is written for people: code asks fields, and never what kind of note or problem it has before it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import fsdpckpt
from fsdpckpt.ir.ledger import Note, Problem

PACKAGE = Path(inspect.getfile(fsdpckpt)).parent
SHOWN = ("cli/", "report/", "describe/", "ir/fatal.py", "ir/ledger.py")
"""What shows notes and problems, or words them."""

OTHERS = frozenset(
    {"blocks", "contents", "declared", "dtype", "flaw", "option", "param", "reason", "request", "row", "rows", "self"}
    | {"tensor", "tensors", "value", "wrapped"}
)
"""What else has a ``kind``, by the last name before it."""


HANDED_ON = (ast.Call, ast.Dict, ast.FormattedValue, ast.List, ast.Tuple)


def asked_kinds(code: str) -> list[int]:
    """The lines that compare, match or look up the ``kind`` of what may be a note or a problem."""
    tree = ast.parse(code)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr != "kind" or not isinstance(node.ctx, ast.Load):
            continue
        if ast.unparse(node.value).rpartition(".")[2] in OTHERS:
            continue
        parent = parents[node]
        # Handed on to a ``Problem`` or a document it is shown; anything else asks for it.
        if not isinstance(parent, HANDED_ON) or _is_asked(parent, node):
            lines.append(node.lineno)
    return lines


def _is_asked(parent: ast.AST, node: ast.AST) -> bool:
    called = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and node is not parent.func
    return called and parent.func.attr in ("get", "count", "index", "startswith", "endswith")


def test_no_code_asks_for_the_kind_of_a_note_or_a_problem() -> None:
    asked = [
        f"{name}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(SHOWN)
        for line in asked_kinds(path.read_text())
    ]
    assert not asked, "make what the code needs to know a field of what it is about"


@pytest.mark.parametrize(
    "code",
    [
        'any(note.kind == "groups-rebuilt" for note in checkpoint.notes)',
        'problem.kind in ("copies", "replica")',
        "kinds = {problem.kind for problem in problems}",
        'match found.kind:\n    case "stray":\n        pass',
        "table[each.kind]",
        "table.get(note.kind)",
        "kind = self.notes[0].kind",
        'if note.kind.startswith("units"):\n    pass',
    ],
)
def test_every_way_to_ask_is_found(code: str) -> None:
    assert asked_kinds(code) == [1]


@pytest.mark.parametrize("code", ['leaf.dtype.kind == "float"', "Problem(each.kind, text)", 'Note("copies", "text")'])
def test_making_a_note_and_kinds_of_other_things_are_no_question(code: str) -> None:
    assert asked_kinds(code) == []


def test_notes_and_problems_have_a_kind_and_nothing_else_called_so() -> None:
    assert "kind" in Note.__dataclass_fields__ and "kind" in Problem.__dataclass_fields__
