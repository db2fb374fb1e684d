"""Files and units that do not belong together are refused, even where every count fits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.e2e.flattened.cases import Variant, load
from tests.makers import Change, copied, lose, move, swap
from tests.oracle.session import Oracle
from tests.refusals import Refused

Make = Callable[[Oracle, Path], Path]
"""Makes a file that an option names, in a directory."""


@dataclass(frozen=True)
class Row:
    """``form`` of ``source``, saved by ``world`` ranks, after ``changes``, converted with ``options`` and ``files``."""

    what: str
    source: Variant
    form: str
    world: int = 3
    changes: tuple[Change, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Make] = field(default_factory=dict)
    code: int = 3
    says: str = ""

    @property
    def id(self) -> str:
        return f"{self.what}, {self.source.name} {self.form}"


def without_json(directory: Path) -> None:
    """Units that lie beside the files say nothing."""
    for path in directory.glob("*.json"):
        path.unlink()


def units(variant: Variant, world: int = 3, exchanged: tuple[str, str] = ("", "")) -> dict[str, Make]:
    """The units of ``variant``, in which two parameters have each other's names."""

    def make(oracle: Oracle, directory: Path) -> Path:
        text = (variant.directory(oracle, world) / "units.json").read_text()
        one, other = (json.dumps(name) for name in exchanged)
        if exchanged[0]:
            assert one in text and other in text
            text = text.replace(one, '"?"').replace(other, one).replace('"?"', other)
        (directory / "units.json").write_text(text)
        return directory / "units.json"

    return {"units": make}


def reference(variant: Variant, rename: Callable[[str], str], first: str) -> dict[str, Make]:
    """The model of ``variant`` under new names; those that begin with ``first`` come first."""

    def make(oracle: Oracle, directory: Path) -> Path:
        weights = load(variant.directory(oracle, 3) / "truth.pt")["model"]
        names = sorted(weights, key=lambda name: not name.startswith(first))
        torch.save({rename(name): weights[name] for name in names}, directory / "reference.pt")
        return directory / "reference.pt"

    return {"reference": make}


def orig(name: str) -> Variant:
    return Variant(name, True)


def flat(name: str) -> Variant:
    return Variant(name, False)


WRONG_UNITS = (
    (orig("nested"), orig("rewrapped")),
    (flat("nested"), flat("rewrapped")),
    (orig("nested"), flat("nested")),
    (flat("nested"), orig("nested")),
    (orig("nested"), orig("mixed")),
    (orig("mixed"), orig("nested")),
    (orig("nested"), orig("no_shard")),
    (flat("nested"), flat("no_shard")),
    (flat("no_shard"), flat("nested")),
    (orig("nested"), orig("transformer")),
    (flat("nested"), flat("tiny")),
    (orig("same_sized"), orig("nested")),
    (orig("frozen_unit"), orig("rewrapped")),
    (flat("outside"), flat("nested")),
    (flat("nested"), flat("outside")),
)
OPTIM = {"only": "optim"}
ONE_SIZE = ("b.0.weight", "b.2.weight")
A_AND_B = ("a.0", "a.1", "a.2", "b")


def file(section: str, world: int, rank: int) -> str:
    return f"{section}_world_size_{world}_rank_{rank}.pt"


def sections(form: str) -> tuple[str, ...]:
    return ("optim",) if form == "raw" else ("model", "optim")


def wrong_files(nested: Variant, sized: Variant, form: str) -> Iterator[Row]:
    missing = (lose(file("optim", 3, 1)),)
    yield Row("the file of a rank is missing", nested, form, changes=missing, files=units(nested))
    world = 3 if form == "mix" else 4  # where it was saved
    some = [move(file(section, world, rank), file(section, 2, rank)) for section in sections(form) for rank in (0, 1)]
    for other in (world, 2):
        changes = (*some, lose(f"*_world_size_{world}_rank_*"))
        what = f"some of the ranks named as all, units of {other}"
        yield Row(what, nested, form, world, changes, files=units(nested, other))
    for section in sections(form):
        changes = (swap(file(section, 3, 1), file(section, 3, 2)),)
        what = f"the {section} files of two ranks swapped"
        yield Row(what, sized, form, changes=changes, files=units(sized), says="rank")


def wrong_words(nested: Variant, sized: Variant) -> Iterator[Row]:
    """Units and references of the same sizes."""
    hybrid = Variant("hybrid", nested.orig)
    yield Row("units of a hybrid run", nested, "raw", 4, options=OPTIM, files=units(hybrid, 4))
    yield Row("units of one over all ranks", hybrid, "raw", 4, options=OPTIM, files=units(nested, 4))
    yield Row("two of one size exchanged", sized, "mix", files=units(sized, exchanged=ONE_SIZE))
    another = reference(sized, lambda name: f"other.{name}", "")
    named = {"unit": tuple(f"other.{name}" for name in A_AND_B)}
    for form in ("flat", "mix"):
        what = "reference of another model"
        yield Row(what, sized, form, changes=(without_json,), files=another, code=4)
        yield Row(f"{what} with its modules", sized, form, 3, (without_json,), named, another, code=2)
    reordered = reference(sized, lambda name: name, "b.")  # an order that a module can have
    yield Row("reference in another order", sized, "mix", options={"unit": A_AND_B}, files=reordered)
    yield Row("nothing names the slices", nested, "raw", options=OPTIM, code=4, says="--units")


def other_units() -> Iterator[Row]:
    """Units of another model or wrapping."""
    for source, other in WRONG_UNITS:
        for form, options in (("raw", OPTIM), ("flat", {})):
            yield Row(f"units of {other.name}", source, form, 3, (without_json,), options, units(other))
    sized = orig("same_sized")
    yield Row("two of one size exchanged", sized, "flat", 3, (without_json,), {}, units(sized, exchanged=ONE_SIZE))
    onto = {"to": "flattened", "world_size": 2, "key_type": "id"}
    for name in ("groups", "frozen_some"):
        yield Row("groups that cut across units", orig(name), "flat", options=onto, files=units(flat("nested")))


def nothing_said() -> Iterator[Row]:
    """Modules are not named, or how they are wrapped."""
    yield Row("modules are not named", flat("nested"), "mix", code=4, says="--unit")
    onto, modules = {"to": "flattened", "world_size": 2}, ("outer", "outer.inner")
    for option, given in (("--unit", {"use_orig_params": True}), ("--use-orig-params", {"unit": modules})):
        yield Row(f"no {option}", orig("nested"), "sharded", options={**onto, **given}, code=4, says=option)


ROWS = [*other_units(), *nothing_said()]
for make in (orig, flat):
    ROWS += wrong_words(make("nested"), make("same_sized"))
    for form in ("raw", "flat", "mix"):
        ROWS += wrong_files(make("nested"), make("same_sized"), form)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_files_and_units_that_do_not_belong_together_are_refused(oracle: Oracle, tmp_path: Path, row: Row) -> None:
    copied(row.source.directory(oracle, row.world) / row.form, *row.changes)(tmp_path / "source")
    given = {option: make(oracle, tmp_path) for option, make in row.files.items()}
    options = {"to": "full", "key_type": "name", **row.options, **given}
    Refused(row.code, row.says).by(lambda: fsdpckpt.convert(tmp_path / "source", tmp_path / "target", **options))
    assert not (tmp_path / "target").exists()


def test_the_command_line_ends_with_the_code_of_the_refusal(oracle: Oracle, tmp_path: Path) -> None:
    source, target = orig("nested").directory(oracle, 3) / "raw", tmp_path / "full.pt"
    command = [sys.executable, "-m", "fsdpckpt", "convert", str(source), str(target), "--to", "full", "--only", "optim"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, target.exists()) == (4, False)
    assert "--units" in ended.stderr
    wrong = orig("rewrapped").directory(oracle, 3) / "units.json"
    ended = subprocess.run([*command, "--units", str(wrong)], capture_output=True, text=True, check=False)
    assert (ended.returncode, target.exists()) == (3, False)
