"""``save_units`` with several optimizers by name: what each holds, where the lengths of slices cannot say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError, UsageError
from fsdpckpt.flat.live.save import units_of, with_orders
from fsdpckpt.ir.units_json import decode, encode
from tests.flat.test_several_optimizers import (
    ODD,
    RANKS,
    Named,
    Optimizers,
    matrices_and_rest,
    save,
    twins,
)
from tests.ir.relisted import relisted
from tests.oracle.compare import differences, require_identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

ALIKE = [(7, 5), (7, 5)]


def crossed(params: Named) -> Optimizers:
    """Each has the matrix of one block and the vectors of the other, in groups and in no order of the model."""
    matrices = [param for name, param in params.items() if name.endswith("lin.weight")]
    vectors = [
        [param for name, param in params.items() if f"blocks.{at}." in name and not name.endswith("lin.weight")][::-1]
        for at in range(2)
    ]
    others = [param for name, param in params.items() if "blocks" not in name]
    one = [{"params": vectors[1]}, {"params": [*others, matrices[0]], "weight_decay": 0.1}]
    return {
        "muon": torch.optim.Adam(one, lr=0.02),
        "adam": torch.optim.AdamW([{"params": vectors[0]}, {"params": [matrices[1]]}], lr=0.003),
    }


JOBS: dict[str, dict[str, Any]] = {
    "original parameters": {"optimizers_of": crossed, "use_orig_params": True},
    "flat parameters": {"optimizers_of": twins, "use_orig_params": False},
}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("job", JOBS)
def test_each_optimizer_gets_the_states_of_its_own_parameters(job: str, beside: bool, tmp_path: Path) -> None:
    source, full = tmp_path / "ranks", tmp_path / "full.pt"
    expected = save(source, ALIKE, **JOBS[job])
    with pytest.raises(NeedsInformationError, match="which parameters each optimizer"):
        fsdpckpt.convert(source, full)
    options: dict[str, Any] = {"key_type": "name"}
    if beside:
        (source / "units.json").write_bytes((tmp_path / "all.json").read_bytes())
    else:
        options["units"] = tmp_path / "all.json"
    fsdpckpt.convert(source, full, **options)
    found = torch.load(full)["optimizers"]
    for key, states in expected.items():
        require_identical(found[key]["state"], states)
        fsdpckpt.convert(source, tmp_path / f"{key}.pt", only=f"optim:{key}", **options)
        require_identical(torch.load(tmp_path / f"{key}.pt")["state"], states)
    given = {} if beside else {"units": tmp_path / "all.json"}
    assert fsdpckpt.verify(source, **given).whole
    assert fsdpckpt.diff(source, full, **given).same
    # Back to what the real job saved, with ids in the order of each optimizer.
    target = tmp_path / "flat"
    fsdpckpt.convert(
        full, target, to="flattened", world_size=RANKS, units=tmp_path / "all.json", key_type="id", flavor="plain"
    )
    for rank in range(RANKS):
        file = f"state_world_size_{RANKS}_rank_{rank}.pt"
        with as_rank(rank, RANKS):
            saved = torch.load(source / file, weights_only=False)["optimizers"]
        written = torch.load(target / f"extra_{file}", weights_only=True)["optimizers"]
        assert not differences(written, saved)
    again = tmp_path / "again.pt"
    fsdpckpt.convert(target, again, key_type="name")
    for key, states in expected.items():
        require_identical(torch.load(again)["optimizers"][key]["state"], states)


def each_one(params: Named) -> Optimizers:
    """As many parameters, of the same lengths."""
    return {f"of_{at}": torch.optim.Adam([params[f"blocks.{at}._flat_param"]]) for at in (1, 0)}


@pytest.mark.parametrize("beside", [True, False])
def test_optimizers_that_are_alike_in_everything_are_told_apart_by_their_names(beside: bool, tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ALIKE, each_one, use_orig_params=False)
    options: dict[str, Any] = {"key_type": "name", "exclude": "head.*", "rename": {"blocks": "layers"}}
    if beside:
        (source / "units.json").write_bytes((tmp_path / "all.json").read_bytes())
    else:
        options["units"] = tmp_path / "all.json"
    fsdpckpt.convert(source, tmp_path / "full.pt", **options)
    found = torch.load(tmp_path / "full.pt")["optimizers"]
    for key, states in expected.items():
        new = {name.replace("blocks", "layers"): of_name for name, of_name in states.items()}
        require_identical(found[key]["state"], new)


@pytest.mark.parametrize("beside", [True, False])
def test_groups_that_are_those_of_another_optimizer_are_refused(beside: bool, tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    save(source, ODD, matrices_and_rest, use_orig_params=True)
    document = json.loads((tmp_path / "all.json").read_text())
    one, other = document["optimizers"]
    one["name"], other["name"] = other["name"], one["name"]
    units = source / "units.json" if beside else tmp_path / "swapped.json"
    units.write_text(json.dumps(document))
    with pytest.raises(SourceCorruptError, match="are not those of") as caught:
        fsdpckpt.convert(source, tmp_path / "full.pt", **({} if beside else {"units": units}))
    assert caught.value.exit_code == 3


def test_names_that_the_checkpoint_does_not_have_say_nothing(tmp_path: Path) -> None:
    save(tmp_path / "ranks", ALIKE, **JOBS["original parameters"])
    text = (tmp_path / "all.json").read_text()
    (tmp_path / "other.json").write_text(text.replace('"muon"', '"first"').replace('"adam"', '"second"'))
    with pytest.raises(NeedsInformationError, match="which parameters each optimizer"):
        fsdpckpt.convert(tmp_path / "ranks", tmp_path / "full.pt", units=tmp_path / "other.json")


def plain_job() -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    one = [{"params": [model[2].weight, model[0].weight]}, {"params": [model[1].bias]}]
    other = [model[1].weight, model[2].bias, model[0].bias]
    return model, {"muon": torch.optim.Adam(one, lr=0.1), "adam": torch.optim.Adam(other, lr=0.2)}


def test_a_model_without_fsdp1_too(tmp_path: Path) -> None:
    model, optimizers = plain_job()
    for optimizer in optimizers.values():
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            param.grad = torch.randn_like(param)
        optimizer.step()
    content = {key: optimizer.state_dict() for key, optimizer in optimizers.items()}
    torch.save({"model": model.state_dict(), "optimizers": content}, tmp_path / "job.pt")
    fsdpckpt.save_units(model, optimizers, tmp_path / "units.json")
    fsdpckpt.convert(tmp_path / "job.pt", tmp_path / "named.pt", units=tmp_path / "units.json", key_type="name")
    found = torch.load(tmp_path / "named.pt")["optimizers"]
    names = {param: name for name, param in model.named_parameters()}
    for key, optimizer in optimizers.items():
        require_identical(found[key]["state"], {names[param]: states for param, states in optimizer.state.items()})
        listed = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        assert [group["params"] for group in found[key]["param_groups"]] == listed


def test_the_file_has_the_groups_of_each_and_one_alone_is_the_only_one(tmp_path: Path) -> None:
    model, optimizers = plain_job()
    units = units_of(model, optimizers)
    document = json.loads(json.dumps(encode(units)))
    assert document["version"] == 3
    assert decode(document, source="it") == units
    assert dict(units.optimizers)["muon"] == (("2.weight", "0.weight"), ("1.bias",))
    one = units_of(model, {"muon": optimizers["muon"]})
    assert one == units_of(model, optimizers["muon"]) and encode(one)["version"] == 1
    document["optimizers"][1]["groups"][0][0] = "9.weight"
    document["optimizers"][0]["name"] = "adam"
    with pytest.raises(SourceCorruptError) as caught:
        decode(document, source="it")
    assert sorted(caught.value.details) == [
        "optimizers.adam: 9.weight is not a parameter of these units",
        "optimizers: adam is listed 2 times",
    ]


def test_optimizers_of_another_model_and_none_at_all_are_refused(tmp_path: Path) -> None:
    (model, optimizers), (_, others) = plain_job(), plain_job()
    with pytest.raises(UsageError, match="adam: group 0 of the optimizer: 3 parameters are not in this model"):
        fsdpckpt.save_units(model, {"muon": optimizers["muon"], "adam": others["adam"]}, tmp_path / "units.json")
    with pytest.raises(UsageError, match="the mapping of optimizers is empty"):
        fsdpckpt.save_units(model, {}, tmp_path / "units.json")
    assert not (tmp_path / "units.json").exists()


def test_several_optimizers_that_differ_by_rank_are_refused() -> None:
    model, optimizers = plain_job()
    usual = replace(units_of(model, optimizers), world_size=2)
    moved = tuple((name, groups[::-1]) for name, groups in usual.optimizers)
    assert with_orders({None: usual}) == usual
    with pytest.raises(SourceUnsupportedError, match="list their parameters in different orders"):
        with_orders({None: usual, 1: relisted(usual, optimizers=moved)})
