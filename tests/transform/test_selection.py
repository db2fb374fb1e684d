"""What is taken, how it is named, and what of it is cut: exact names, both sections in step, nothing by accident.

A row is one conversion of a model whose optimizer, keyed by name, lists all of its tensors but ``net.running``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.selection import copy_aliased_tensors
from tests.oracle.fake_group import as_rank
from tests.refusals import Refused

pytestmark = pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")

SHAPES = {"net.a.weight": (5, 3), "net.a.bias": (5,), "head.weight": (5, 3)}
LISTED = [*SHAPES]
Content = dict[str, Any]


def content(keys: Sequence[str | int] = LISTED) -> Content:
    """What a job saved. ``keys``: of its optimizer."""
    torch.manual_seed(1)
    model = OrderedDict({name: torch.randn(shape) for name, shape in SHAPES.items()}, **{"net.running": torch.randn(7)})
    model._metadata = {"": {"version": 1}, "net": {"version": 2}}  # type: ignore[attr-defined]
    states = zip(keys, SHAPES.values(), strict=True)
    groups = [{"params": list(keys[:2]), "lr": 0.1}, {"params": list(keys[2:]), "lr": 0.2}]
    for group, names in zip(groups, (LISTED[:2], LISTED[2:]), strict=True):
        group["param_names"] = names
    state = {key: {"exp_avg": torch.randn(shape), "step": torch.tensor(3.0)} for key, shape in states}
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3}


@dataclass(frozen=True)
class Taken:
    """``names``: of the tensors that are in the model afterwards, of which those in ``listed`` have states; ``said``:
    words of the notes.
    """

    options: Mapping[str, Any]
    names: Sequence[str]
    listed: Sequence[str]
    said: Sequence[str] = ()


def near(*names: str) -> tuple[str, ...]:
    return tuple(f"did you mean {name}?" for name in names)


# fmt: off
TAKEN: dict[str, Taken | tuple[Mapping[str, Any], Refused]] = {
    "everything": Taken({}, [*LISTED, "net.running"], LISTED),
    "without a parameter": Taken(
        {"exclude": ["*.bias"]}, ["net.a.weight", "head.weight", "net.running"], ["net.a.weight", "head.weight"]),
    "a prefix is renamed, and one is added": Taken(
        {"rename": {"net": "body"}, "add_prefix": "model."},
        ["model.body.a.weight", "model.body.a.bias", "model.head.weight", "model.body.running"],
        ["model.body.a.weight", "model.body.a.bias", "model.head.weight"]),
    "a prefix is stripped": Taken(
        {"strip_prefix": "net."}, ["a.weight", "a.bias", "head.weight", "running"],
        ["a.weight", "a.bias", "head.weight"], ["_metadata"]),
    "the optimizer alone": Taken(
        {"only": "optim"}, [], LISTED,
        [f"--only optim: the section {name} was left out" for name in ("model", "extra")]),
    "the model alone": Taken({"only": "model"}, [*LISTED, "net.running"], []),
    "a glob with a letter too many": (
        {"include": ["nett.*"]}, Refused(2, "matches no key", near("'net.*'", "'net.a.*'"))),
    "a module for a glob": ({"include": ["net.a"]}, Refused(2, "matches no key", near("'net.a.*'"))),
    "a part of a name": ({"include": ["a.w"]}, Refused(2, "matches no key", near("net.a.weight"))),
    "nothing like it": ({"include": ["zzz"]}, Refused(2, "matches no key", ())),
    "a part of a word": ({"rename": {"hea": "x"}}, Refused(2, "applies to no key")),
    "a section that is not there": ({"only": "optim"}, Refused(3, "no optim section")),
    "two keys with one new name": ({"rename": {"net.a.bias": "head.weight"}}, Refused(2, "would both be named")),
}
# fmt: on


@pytest.mark.parametrize("name", TAKEN)
def test_both_sections_are_taken_and_named_in_step(name: str, tmp_path: Path) -> None:
    row, saved = TAKEN[name], content()
    if "not there" in name:
        del saved["optimizer"]
    torch.save(saved, tmp_path / "a.pt")
    if isinstance(row, tuple):
        options, refused = row
        refused.by(lambda: fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options))
        return
    report = fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", **row.options)
    assert all(any(words in str(note.message) for note in report.notes) for words in row.said)
    found = torch.load(tmp_path / "b.pt")
    if "only" in row.options:
        found = {"model" if row.options["only"] == "model" else "optimizer": found}
    assert list(found.get("model", ())) == list(row.names)
    if "optimizer" in found:
        groups = found["optimizer"]["param_groups"]
        listed = [key for group in groups for key in group["params"]]
        assert listed == [*found["optimizer"]["state"]] == list(row.listed)
        assert [word for group in groups for word in group["param_names"]] == listed


def opened(path: Path) -> Checkpoint:
    with Sources() as sources:
        return open_checkpoint(str(path), sources=sources)


def test_no_tensor_of_the_model_or_of_a_state_is_that_of_another_section(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "a.pt")
    held = opened(tmp_path / "a.pt")
    own = copy_aliased_tensors(held)
    assert list(own.leaves())
    assert not set(own.leaves()) & set(held.leaves())
    assert [named.key for named in own.tensors()] == [named.key for named in held.tensors()]


# Of a full checkpoint, what FSDP2 cuts


@dataclass(frozen=True)
class Cut:
    """``found``: the tensors of the model that every rank has whole, or how the conversion to rank files is refused.

    ``change``: of what the job saved. ``whole``: the states that every rank has whole, by parameter.
    """

    found: Sequence[str] | Refused
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Content], object] = lambda saved: None
    whole: Mapping[str, Sequence[str]] = field(default_factory=dict)


def without(*sections: str) -> Callable[[Content], object]:
    return lambda saved: [saved.pop(section) for section in sections]


def tied(saved: Content) -> None:
    saved["model"]["net.running"] = saved["model"]["head.weight"]


def factored(saved: Content) -> None:
    saved["optimizer"]["state"]["net.a.weight"]["row"] = torch.randn(5)


def by_id(saved: Content) -> None:
    saved |= content(range(3))
    for group in saved["optimizer"]["param_groups"]:
        del group["param_names"]


def as_many_ids(saved: Content) -> None:
    by_id(saved)
    del saved["model"]["net.running"]


RUNNING = ["net.running"]
NO_HINT = Refused(4, ["parameters", "--buffers", "the optimizer does not list these keys"], RUNNING)

# fmt: off
CUTS: dict[str, Cut] = {
    "what the optimizer lists is cut, and the rest has to be settled": Cut(NO_HINT),
    "without an optimizer everything has": Cut(
        Refused(4, "it has no optimizer", [*LISTED, *RUNNING]), change=without("optimizer")),
    "a glob of buffers": Cut(RUNNING, {"buffers": ["net.run*"]}),
    "no buffers": Cut([], {"buffers": ["none"]}),
    "a glob of buffers that matches nothing": Cut(
        Refused(2, ["--buffers x", "matches no model key"]), {"buffers": ["x"]}),
    "a reference in which it is whole": Cut(RUNNING, {"reference": "net.run*"}),
    "a reference in which it is cut": Cut([], {"reference": "none"}),
    "a weight that shares its bytes with a listed one": Cut([], change=tied),
    "as many ids as tensors": Cut([], change=as_many_ids),
    "fewer ids than tensors": Cut(Refused(4, details=[*LISTED, *RUNNING]), change=by_id),
    "a state of another shape than its parameter": Cut(
        RUNNING, {"buffers": ["net.run*"]}, factored, {"net.a.weight": ["row"]}),
    "states of several shapes, and no model": Cut(
        Refused(4, "which states of 1 parameter are sharded", ["net.a.weight"]),
        change=lambda saved: [factored(saved), saved.pop("model")]),
}
# fmt: on


def to_ranks(source: Path, target: Path, **options: Any) -> Any:
    return fsdpckpt.convert(source, target, to="sharded", container="torch", world_size=2, **options)


@pytest.mark.parametrize("name", CUTS)
def test_what_is_cut_into_rank_files(name: str, tmp_path: Path) -> None:
    row, options = CUTS[name], dict(CUTS[name].options)
    saved = content()
    if "reference" in options:
        torch.save(saved, tmp_path / "other.pt")
        to_ranks(tmp_path / "other.pt", tmp_path / "ref", buffers=options["reference"])
        options["reference"] = tmp_path / "ref"
    row.change(saved)
    torch.save(saved, tmp_path / "full.pt")
    if isinstance(row.found, Refused):
        row.found.by(lambda: to_ranks(tmp_path / "full.pt", tmp_path / "ranks", **options))
        return
    report = to_ranks(tmp_path / "full.pt", tmp_path / "ranks", **options)
    assert any("the optimizer lists them" in note.message for note in report.notes) is (not options)
    to_ranks(tmp_path / "ranks", tmp_path / "again", key_type="name" if "ids" not in name else None)
    for folder in ("ranks", "again"):  # the files say it themselves
        with as_rank(0, 2):
            model, optim = (
                torch.load(tmp_path / folder / f"{section}_world_size_2_rank_0.pt", weights_only=False)
                for section in ("model", "optim")
            )
        assert [key for key, leaf in model.items() if not isinstance(leaf, DTensor)] == list(row.found)
        for key, states in optim["state"].items():
            whole = [each for each, leaf in states.items() if not isinstance(leaf, DTensor)]
            assert sorted(whole) == sorted(["step", *row.whole.get(str(key), ())])


@pytest.mark.parametrize(
    ("change", "options", "keys", "message"),
    [
        (without(), {}, RUNNING, "1 model key may be a parameter or a buffer, and is cut like parameters: net.running"),
        (without(), {"rename": {"net.running": "net.mean"}, "add_prefix": "m."}, ["m.net.mean"], "and is cut like"),
        (without("optimizer"), {}, [*LISTED, *RUNNING], "4 model keys may be parameters or buffers, and are cut"),
    ],
)
def test_a_dcp_target_cuts_what_is_undetermined_and_says_so(
    change: Callable[[Content], object], options: dict[str, Any], keys: list[str], message: str, tmp_path: Path
) -> None:
    saved = content()
    change(saved)
    torch.save(saved, tmp_path / "full.pt")
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", to="sharded", world_size=2, **options)
    (note,) = [note for note in report.notes if note.kind == "undetermined"]
    assert (list(note.keys), message in note.message) == (keys, True)
