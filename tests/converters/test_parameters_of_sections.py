"""``--parameters`` with several models: one list for all of them, whose names may begin with a section's keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from tests.converters.jobs import Job, converted, listed, notes, refused, save, states
from tests.oracle.compare import require_identical

SHAPES = {
    "actor": {"layers.0.weight": (4, 4), "layers.1.weight": (4, 4), "layers.2.weight": (4, 4), "head.weight": (4, 4)},
    "critic": {"h.p.weight": (5, 5), "h.q.weight": (5, 5), "h.r.weight": (5, 5)},
}
GROUPS: dict[str, Sequence[Sequence[str]]] = {
    "actor": (["layers.2.weight", "layers.1.weight"], ["head.weight", "layers.0.weight"]),
    "critic": (["h.r.weight"], ["h.q.weight", "h.p.weight"]),
}
"""The optimizers' own groups. Parameters of one shape are in both, and not in the order of the model."""
BARE = {"actor": "", "critic": ""}
BY_NAME = {"actor": "actor.", "critic": "critic."}
NAMED: dict[str, Any] = {"to": "full", "key_type": "name"}
FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "unit": "none", "use_orig_params": True, "buffers": "none"}

Truth = Mapping[str, Mapping[str, torch.Tensor]]


def saved(shapes: Any = SHAPES, groups: Any = GROUPS) -> Truth:
    """``ids.pt``: models and optimizers as ``torch.optim`` gives them, by id. Returns each parameter's ``exp_avg``."""
    jobs = {section: Job(shapes[section], groups[section]) for section in shapes}
    save({section: job.saved() for section, job in jobs.items()}, "ids.pt")
    return {section: job.moments for section, job in jobs.items()}


def order(prefixes: Mapping[str, str], groups: Any = GROUPS, **how: Any) -> str:
    return listed([[prefixes[key] + name for name in group] for key in prefixes for group in groups[key]], **how)


def require(content: Any, truth: Truth) -> None:
    for section, moments in truth.items():
        found = states(content[section])
        require_identical({name: found[name]["exp_avg"] for name in moments}, moments, section)


@pytest.mark.parametrize(
    "prefixes",
    [
        BARE,
        BY_NAME,
        {"critic": "critic.model.", "actor": "actor.model."},
        {"actor": "actor.optimizer.", "critic": ""},
    ],
    ids=["bare", "by name", "by the model's keys", "by the optimizer's keys"],
)
def test_one_list_names_the_ids_of_every_optimizer(prefixes: dict[str, str]) -> None:
    truth = saved()
    asked = refused(NeedsInformationError, "optim:actor", "ids.pt", "out.pt", **NAMED)
    assert "--only optim:actor" in str(asked.alternative)
    report = fsdpckpt.convert("ids.pt", "out.pt", **NAMED, parameters=order(prefixes))
    assert not notes(report, "unused"), "the models need no list"
    require(torch.load("out.pt"), truth)
    assert fsdpckpt.diff("ids.pt", "out.pt", parameters="order.txt").same
    for section, moments in truth.items():
        one = converted("ids.pt", f"{section}.pt", **NAMED, only=f"optim:{section}", parameters="order.txt")
        require_identical({name: states(one)[name]["exp_avg"] for name in moments}, moments)


@pytest.mark.parametrize("between", ["\n\n", "\n"])
@pytest.mark.parametrize("prefixes", [BARE, BY_NAME], ids=["bare", "by name"])
def test_one_list_for_flattened_targets_says_the_order_of_optimizers_and_not_of_models(
    prefixes: dict[str, str], between: str
) -> None:
    """Groups that blank lines divide are an optimizer's; without them it is no contradiction to the units either."""
    truth = saved()
    fsdpckpt.convert("ids.pt", "flat", **FLAT, parameters=order(prefixes, between=between))
    require(converted("flat", "out.pt", **NAMED), truth)
    assert fsdpckpt.diff("ids.pt", "flat", parameters="order.txt").same
    require(converted("flat", "again.pt", **NAMED, parameters="order.txt"), truth)
    other = order({"actor": "actor.", "critic": "critic.x"}, name="other.txt")
    refused(FsdpckptError, r"xh\.r\.weight in parameters", "flat", "not.pt", **NAMED, parameters=other)


def test_models_with_the_same_names_are_told_apart_by_their_keys() -> None:
    groups = {"actor": GROUPS["actor"], "critic": [group[::-1] for group in GROUPS["actor"]]}
    truth = saved(dict.fromkeys(SHAPES, SHAPES["actor"]), groups)
    require(converted("ids.pt", "out.pt", **NAMED, parameters=order(BY_NAME, groups)), truth)


def test_a_list_for_one_model_leaves_the_others_to_be_asked_about_and_a_typing_error_is_refused() -> None:
    saved()
    one = order({"actor": "actor."})
    refused(NeedsInformationError, "optim:critic", "ids.pt", "out.pt", **NAMED, parameters=one)
    path = Path(order(BARE))
    path.write_text(path.read_text().replace("head.weight", "haed.weight"))
    refused(FsdpckptError, "contradict", "ids.pt", "out.pt", **NAMED, parameters=path)


@pytest.mark.parametrize("glob", ["critic.*", "critic.h.*", "critic.model.h.*", "h.*"])
def test_globs_take_a_section_by_its_name_by_its_keys_or_by_its_own_names(glob: str) -> None:
    saved()
    for section, how in (("critic", "include"), ("actor", "exclude")):
        found = converted("ids.pt", f"{how}.pt", **NAMED, parameters=order(BARE), **{how: [glob]})
        assert found["model"].keys() == SHAPES[section].keys()  # the only one that is left
        assert states(found).keys() == SHAPES[section].keys()


def test_an_option_had_no_effect_where_no_section_uses_it() -> None:
    """One note, on the source: each model, and each optimizer, says itself all that is asked of it."""
    saved()
    for only in (None, "model:actor"):
        report = fsdpckpt.convert("ids.pt", f"{only}.pt", to="full", parameters=order(BY_NAME), only=only)
        (note,) = notes(report, "unused")
        assert note.message.startswith("--parameters had no effect: ids.pt records")


@pytest.mark.parametrize("taken", [{}, {"only": "optim:critic"}, {"include": ["critic.*"]}], ids=str)
def test_the_names_may_come_from_a_pipe(taken: dict[str, Any]) -> None:
    """``--parameters <(python names.py)``: what was read from a pipe is gone, so it is read once."""
    saved()
    fsdpckpt.convert("ids.pt", "wanted.pt", parameters=order(BY_NAME), **NAMED, **taken)
    reading, writing = os.pipe()
    os.write(writing, Path("order.txt").read_bytes())
    os.close(writing)
    try:
        fsdpckpt.convert("ids.pt", "out.pt", parameters=f"/dev/fd/{reading}", **NAMED, **taken)
    finally:
        os.close(reading)
    assert Path("out.pt").read_bytes() == Path("wanted.pt").read_bytes()
