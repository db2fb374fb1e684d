"""A shared parameter is one parameter: it stays, with its states, as long as one of its names is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.converters.jobs import Job, converted, listed, notes, refused, save, states
from tests.oracle.compare import identical

FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "unit": ["body"]}
KEPT = ["body.weight", "body.bias", "head.weight"]
LEFT_OUT: dict[str, Any] = {"exclude": "embed.*"}


class Tied(nn.Module):
    """``head`` has the weight of ``embed``, and all matrices have one shape."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.body = nn.Linear(4, 4, bias=not last)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        if last:
            self.last = nn.Linear(4, 4, bias=False)


def saved(form: str) -> dict[str, torch.Tensor]:
    """Makes ``a.pt``; returns the moments by name, the shared parameter's under ``head.weight``."""
    job = Job(Tied(), words="" if form == "param_names" else None)
    save(job.saved("name" if form == "name" else "id"), "a.pt")
    return {name.replace("embed", "head"): moment for name, moment in job.moments.items()}


@pytest.mark.parametrize("form", ["id", "name", "param_names"])
@pytest.mark.parametrize("options", [{"exclude": ["embed.*"]}, {"include": ["head.*", "body.*"]}])
def test_a_model_without_the_first_name_loads_the_states(form: str, options: dict[str, Any]) -> None:
    moments = saved(form)
    written = converted("a.pt", "b.pt", **options)
    rest = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4, bias=False)})
    rest.load_state_dict(written["model"])
    (group,) = written["optimizer"]["param_groups"]
    assert group.get("param_names") == (KEPT if form == "param_names" else None)
    if form == "name":
        assert group["params"] == KEPT
        held = states(written)
    else:
        job = Job(rest, words="" if form == "param_names" else None)
        job.optimizer.load_state_dict(written["optimizer"])
        held = {name: {"exp_avg": moment} for name, moment in job.moments.items()}
    assert all(identical(held[name]["exp_avg"], moments[name]) for name in KEPT)


def test_the_later_name_is_left_out_without_the_states() -> None:
    moments = saved("id")
    written = converted("a.pt", "b.pt", exclude=["head.*"], key_type="name")
    names = ["embed.weight", "body.weight", "body.bias"]
    assert list(written["model"]) == names == written["optimizer"]["param_groups"][0]["params"]
    assert identical(states(written)["embed.weight"]["exp_avg"], moments["head.weight"])


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("only", [None, "optim"])
def test_flat_parameters_keep_it_under_its_next_name(*, orig: bool, only: Any) -> None:
    moments = saved("name")
    fsdpckpt.convert("a.pt", "f", **FLAT, use_orig_params=orig, buffers=["none"])
    options = {"exclude": ["embed.weight"], "rename": {"head": "out"}, "only": only}
    fsdpckpt.convert("f", "less", to="flattened", world_size=2, **options)
    names = {name: name.replace("head", "out") for name in KEPT}
    for source, given in (("less", {}), ("f", options)):
        written = converted(source, f"{source}.pt", to="full", key_type="name", **given)
        (group,) = written.get("optimizer", written)["param_groups"]
        assert sorted(states(written)) == sorted(names.values()) == sorted(group["params"])
        assert all(identical(states(written)[new]["exp_avg"], moments[old]) for old, new in names.items())


def test_an_optimizer_spells_it_like_its_other_parameters() -> None:
    job, lead = Job(Tied()), "_orig_mod."
    optimizer = job.named(lead)
    del optimizer["state"][f"{lead}body.bias"]
    save({"model": {f"module.{name}": leaf for name, leaf in job.model.items()}, "optimizer": optimizer})
    written = converted("source.pt", "b.pt", **LEFT_OUT, missing_state="zeros")
    assert list(written["model"]) == [f"module.{name}" for name in KEPT]
    assert written["optimizer"]["param_groups"][0]["params"] == [lead + name for name in KEPT]
    held = states(written)
    assert sorted(held) == sorted(lead + name for name in KEPT) and not held[f"{lead}body.bias"]["exp_avg"].any()
    assert identical(held[f"{lead}head.weight"]["exp_avg"], job.moment("embed.weight"))


@pytest.mark.parametrize(
    "options",
    [{"world_size": 1}, {"to": "full", "key_type": "id"}, {"to": "sharded", "world_size": 2, "key_type": "id"}],
    ids=lambda options: options.get("to", "flattened"),
)
def test_its_place_in_a_model_without_its_first_name_is_not_in_units_and_is_asked_for(options: dict[str, Any]) -> None:
    """The way out, as the error says: by name first, then with the model's order."""
    job = Job(Tied(last=True))
    moments = {name.replace("embed", "head"): moment for name, moment in job.moments.items()}
    fsdpckpt.convert(save(job.saved()), "flat", **FLAT, use_orig_params=True)
    error = refused(
        NeedsInformationError, r"the place of head\.weight in the order", "flat", "out", **options, **LEFT_OUT
    )
    assert "--key-type name" in str(error.next_step)
    named = states(converted("flat", "named.pt", to="full", key_type="name", **LEFT_OUT))
    order = ["body.weight", "head.weight", "last.weight"]
    assert set(named) == set(order) and all(identical(named[name]["exp_avg"], moments[name]) for name in order)
    by_id = states(converted("named.pt", "ids.pt", key_type="id", parameters=listed([order])))
    assert all(identical(by_id[number]["exp_avg"], moments[name]) for number, name in enumerate(order))
    both = {"exclude": ["embed.*", "head.*"]}  # without either name nothing is asked
    neither = states(converted("flat", "neither.pt", to="full", key_type="id", **both))
    assert identical(neither[0]["exp_avg"], moments["body.weight"])
    assert identical(neither[1]["exp_avg"], moments["last.weight"])


@pytest.mark.parametrize("choice", ["error", "zeros", "skip"])
def test_a_frozen_parameter_is_frozen_under_the_name_that_a_selection_leaves(choice: str) -> None:
    """Units have it under its first name."""
    model = Tied()
    model.embed.weight.requires_grad = False
    job = Job(model, [["embed.weight", "body.weight", "body.bias"]])
    fsdpckpt.save_units(model, job.optimizer, "order.json")
    options: dict[str, Any] = {"unit": "none", "use_orig_params": True, "units": "order.json"}
    fsdpckpt.convert(save(job.saved()), "flat", **{**FLAT, **options})
    report = fsdpckpt.convert("flat", "b.pt", to="full", key_type="name", missing_state=choice, **LEFT_OUT)
    assert not notes(report, "missing-state") and not notes(report, "filled")
    written = torch.load("b.pt")
    assert sorted(states(written)) == ["body.bias", "body.weight"]
    assert sorted(written["optimizer"]["param_groups"][0]["params"]) == ["body.bias", "body.weight", "head.weight"]
