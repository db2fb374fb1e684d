"""What is printed for a key selects it when it is typed, whatever characters the key has."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.globs import matches, printed
from fsdpckpt.text import fold
from tests.cli.conftest import Run, run
from tests.oracle.compare import identical

__all__ = ["run"]

ODD = ["a[0].weight", "a0.weight", "b*", "bc", "c?d", "ced", "e\nf", "g\x1b[1mh", "{i,j}", "i", "k{0..2}", "k1", "[]"]
ODD += ["ü ", "a\ufdd0--units\ufdd1units\ufdd2b"]  # and one with the marks of options in messages


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab01.[]{}*?!-,\n\\ü", max_size=12))
def test_every_key_is_selected_by_what_is_printed_for_it(key: str) -> None:
    assert matches(key, printed(key))
    assert matches(key, key) or not key


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab01.", max_size=8), st.text(alphabet="ab01.*?", max_size=8))
def test_globs_are_those_of_the_shell(key: str, glob: str) -> None:
    assert matches(key, glob) == fnmatchcase(key, glob) or not key


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 4)), min_size=1, max_size=12, unique=True))
def test_a_folded_key_selects_exactly_the_keys_that_it_stands_for(numbers: list[tuple[int, int]]) -> None:
    keys = [f"layers.{layer}.experts.{expert}.weight" for layer, expert in numbers]
    everything = [f"layers.{layer}.experts.{expert}.weight" for layer in range(15) for expert in range(6)]
    for folded in fold((key, "") for key in keys):
        assert {key for key in everything if matches(key, folded.key)} == {keys[at] for at in folded.members}


@pytest.mark.parametrize(
    ("glob", "selected"),
    [
        ("a[0].weight", ["a[0].weight", "a0.weight"]),  # a set of characters, and the key itself
        ("a[0].*", ["a[0].weight", "a0.weight"]),
        ("e\\nf", ["e\nf"]),
        ("e*", ["e\nf"]),
        ("{b*,i}", ["b*", "i"]),  # what is between braces is a list of words
        ("k{0..2}", ["k{0..2}", "k1"]),
        ("k{3,4}", []),
        ("{i,j}", ["{i,j}", "i"]),
    ],
)
def test_characters_of_globs_in_keys(glob: str, selected: list[str]) -> None:
    assert [key for key in ODD if matches(key, glob)] == selected


def test_each_key_can_be_typed_as_it_is_listed(run: Run, tmp_path: Path) -> None:
    torch.save({key: torch.full((2,), float(at)) for at, key in enumerate(ODD)}, tmp_path / "odd.pt")
    lines = run("inspect", tmp_path / "odd.pt", "--names-only").out.splitlines()
    assert len(lines) == len(ODD)
    assert lines[6:8] == ["e\\nf", "g\\x1b[1mh"] and lines[-1] == "a\\ufdd0--units\\ufdd1units\\ufdd2b"
    assert "\x1b" not in run("inspect", tmp_path / "odd.pt").out, "a name cannot write to the terminal"
    document = run("inspect", tmp_path / "odd.pt", "--json").out
    assert [tensor["key"] for tensor in json.loads(document)["tensors"]] == ODD and ODD[-1] in document
    for key, line in zip(ODD, lines, strict=True):
        shown = json.loads(run("inspect", tmp_path / "odd.pt", "--keys", line, "--json").out)["tensors"]
        assert key in {tensor["key"] for tensor in shown}
    command = ("convert", tmp_path / "odd.pt", tmp_path / "out.pt", "--include", lines[6], "--include", "[]")
    assert run(*command, "--only", "model").code == 0
    assert list(torch.load(tmp_path / "out.pt")) == ["e\nf", "[]"]


def test_a_section_can_be_typed_as_it_is_listed(run: Run, tmp_path: Path) -> None:
    sections = {"model": {"w": torch.ones(2)}, "ema\n[0]": {"model": {"w": torch.zeros(2)}}}
    torch.save(sections, tmp_path / "two.pt")
    out = run("inspect", tmp_path / "two.pt").out
    label = next(line.split(": ")[0] for line in out.splitlines() if line.startswith("model:ema"))
    assert "\\n" in label
    done = run("convert", tmp_path / "two.pt", tmp_path / "out.pt", "--only", label)
    assert done.code == 0, done.err
    assert identical(torch.load(tmp_path / "out.pt")["w"], torch.zeros(2))
