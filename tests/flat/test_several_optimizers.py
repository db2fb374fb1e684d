"""Several optimizers of one model in flat parameters: units are those of the model, each optimizer holds some of them.

What each holds is found by the lengths of its slices, or said by ``save_units`` of all optimizers by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError, UsageError
from fsdpckpt.flat.division import Divided, UndividedError, divide
from fsdpckpt.flat.live.save import units_of, with_orders
from fsdpckpt.ir.units_json import decode, encode
from tests.flat.jobs import ALIKE, ODD, RANKS, Named, Optimizers, by_module, matrices_and_rest, save
from tests.ir.relisted import relisted
from tests.oracle.compare import require_identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

OPEN = "which parameters each optimizer"
States = dict[str, dict[str, Any]]


def without_decay(params: Named) -> Optimizers:
    """Adam's groups list parameters of equal lengths in an order of their own."""
    optimizers = matrices_and_rest(params)
    rest = {name: param for name, param in params.items() if "lin.weight" not in name}
    decayed = [param for name, param in rest.items() if "norm.weight" in name]
    others = [param for name, param in rest.items() if "norm.weight" not in name]
    groups = [{"params": others[::-1], "weight_decay": 0.0}, {"params": decayed}]
    return {**optimizers, "adam": torch.optim.AdamW(groups, lr=0.003)}


def twins(params: Named) -> Optimizers:
    return {
        "first": torch.optim.Adam([params["blocks.0._flat_param"]]),
        "second": torch.optim.Adam([params[key] for key in ("blocks.1._flat_param", "_flat_param")]),
    }


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


def each_one(params: Named) -> Optimizers:
    """As many parameters, of the same lengths."""
    return {f"of_{at}": torch.optim.Adam([params[f"blocks.{at}._flat_param"]]) for at in (1, 0)}


def require_states(path: Path, expected: States) -> None:
    found = torch.load(path)["optimizers"]
    for key, states in expected.items():
        require_identical(found[key]["state"], states)


def ways_of_giving(units: Path, source: Path) -> Iterator[dict[str, Any]]:
    """``--units``, and then a file beside ``source`` in place of the one there."""
    yield {"units": units}
    (source / "units.json").write_bytes(units.read_bytes())
    yield {}


def with_names(units: Path, new: dict[str, str]) -> Path:
    """A units file whose optimizers have other names."""
    document = json.loads(units.read_text())
    for optimizer in document["optimizers"]:
        optimizer["name"] = new[optimizer["name"]]
    (units.parent / "renamed.json").write_text(json.dumps(document))
    return units.parent / "renamed.json"


TOLD_APART: dict[str, dict[str, Any]] = {
    "matrices and rest": {"optimizers_of": matrices_and_rest, "use_orig_params": True},
    "frozen": {
        "optimizers_of": matrices_and_rest,
        "use_orig_params": True,
        "frozen": ("blocks.0.norm.weight", "head.bias"),
    },
    "by module": {"optimizers_of": by_module, "use_orig_params": False},
}


@pytest.mark.parametrize("job", TOLD_APART)
def test_the_lengths_of_slices_say_what_each_optimizer_holds(job: str, tmp_path: Path) -> None:
    source, full = tmp_path / "ranks", tmp_path / "full.pt"
    expected = save(source, ODD, **TOLD_APART[job])
    report = fsdpckpt.convert(source, full, key_type="name")
    require_states(full, expected)
    assert any("found by the lengths of its slices" in note.message for note in report.notes)
    assert fsdpckpt.verify(source).whole
    assert fsdpckpt.diff(source, full).same
    # One alone is named by the same division, and other ranks get the same.
    last = list(expected)[-1]
    fsdpckpt.convert(source, tmp_path / "one.pt", only=f"optim:{last}", key_type="name")
    require_identical(torch.load(tmp_path / "one.pt")["state"], expected[last])
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(tmp_path / "dcp", full).same
    # Groups that are those of another optimizer are none of it.
    swapped = with_names(tmp_path / "all.json", dict(zip(expected, list(expected)[::-1], strict=True)))
    for given in ways_of_giving(swapped, source):
        with pytest.raises(SourceCorruptError, match="are not those of"):
            fsdpckpt.convert(source, tmp_path / "x.pt", **given)


def test_names_and_wrapping_are_taken_from_a_reference_too(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ODD, matrices_and_rest, use_orig_params=True)
    fsdpckpt.convert(source, tmp_path / "full.pt", key_type="name")
    (source / "units.json").unlink()
    fsdpckpt.convert(source, tmp_path / "again.pt", reference=str(tmp_path / "full.pt"), key_type="name")
    require_states(tmp_path / "again.pt", expected)


LOOK_ALIKE: dict[str, dict[str, Any]] = {
    "original parameters": {"optimizers_of": crossed, "use_orig_params": True},
    "flat parameters": {"optimizers_of": twins, "use_orig_params": False},
}


@pytest.mark.parametrize("job", LOOK_ALIKE)
def test_between_parameters_that_look_alike_nothing_is_chosen_and_units_say_it(job: str, tmp_path: Path) -> None:
    source, full, units = tmp_path / "ranks", tmp_path / "full.pt", tmp_path / "all.json"
    expected = save(source, ALIKE, **LOOK_ALIKE[job])
    other_names = with_names(units, {key: f"other {key}" for key in expected})
    for options in ({}, {"only": f"optim:{list(expected)[-1]}"}, {"units": other_names}):
        with pytest.raises(NeedsInformationError, match=OPEN) as error:
            fsdpckpt.convert(source, full, **options)  # type: ignore[arg-type]
        assert "save_units(model, optimizer)" in str(error.value)
    for key in expected if job == "flat parameters" else ():  # the order of one says what is left for the other one
        fsdpckpt.convert(source, tmp_path / f"{key}.pt", units=tmp_path / f"{key}.json", key_type="name")
        require_states(tmp_path / f"{key}.pt", expected)
    for number, given in enumerate(ways_of_giving(units, source)):
        made = tmp_path / f"full-{number}.pt"
        fsdpckpt.convert(source, made, key_type="name", **given)
        require_states(made, expected)
        for key, states in expected.items():
            alone = tmp_path / f"{key}-{number}.pt"
            fsdpckpt.convert(source, alone, only=f"optim:{key}", key_type="name", **given)
            require_identical(torch.load(alone)["state"], states)
        assert fsdpckpt.verify(source, **given).whole
        assert fsdpckpt.diff(source, made, **given).same
    # Back to what the real job saved, with ids in the order of each optimizer.
    target = tmp_path / "flat"
    fsdpckpt.convert(made, target, to="flattened", world_size=RANKS, units=units, key_type="id", flavor="plain")
    for rank in range(RANKS):
        file = f"state_world_size_{RANKS}_rank_{rank}.pt"
        with as_rank(rank, RANKS):
            saved = torch.load(source / file, weights_only=False)["optimizers"]
        require_identical(torch.load(target / f"extra_{file}", weights_only=True)["optimizers"], saved)
    fsdpckpt.convert(target, tmp_path / "again.pt", key_type="name")
    require_states(tmp_path / "again.pt", expected)


def test_optimizers_that_are_alike_in_everything_are_told_apart_by_their_names_alone(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ALIKE, each_one, use_orig_params=False)
    for key in expected:
        with pytest.raises(NeedsInformationError, match="several divisions fit"):
            fsdpckpt.convert(source, tmp_path / "x.pt", units=tmp_path / "of_0.json", only=f"optim:{key}")
    options: dict[str, Any] = {"key_type": "name", "exclude": "head.*", "rename": {"blocks": "layers"}}
    for number, given in enumerate(ways_of_giving(tmp_path / "all.json", source)):
        fsdpckpt.convert(source, tmp_path / f"{number}.pt", **options, **given)
        new = {
            key: {name.replace("blocks", "layers"): of_name for name, of_name in states.items()}
            for key, states in expected.items()
        }
        require_states(tmp_path / f"{number}.pt", new)


def test_units_with_the_groups_of_one_optimizer_divide_the_rest(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ODD, without_decay, use_orig_params=True)
    with pytest.raises(NeedsInformationError, match="no division in the order of the model fits"):
        fsdpckpt.convert(source, tmp_path / "full.pt")
    fsdpckpt.convert(source, tmp_path / "full.pt", units=str(tmp_path / "adam.json"), key_type="name")
    require_states(tmp_path / "full.pt", expected)
    groups = torch.load(tmp_path / "full.pt")["optimizers"]["adam"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [6, 2]


def test_an_optimizer_of_another_model_takes_no_part(tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    expected = save(source, ODD, lambda params: {"generator": torch.optim.Adam(params.values())}, use_orig_params=True)
    for rank in range(RANKS):
        path = source / f"state_world_size_{RANKS}_rank_{rank}.pt"
        with as_rank(rank, RANKS):
            content = torch.load(path, weights_only=False)
            states = {0: {"exp_avg": torch.randn(7 + rank)}}
            content["optimizers"]["critic"] = {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}
            torch.save(content, path)
    fsdpckpt.convert(source, tmp_path / "one.pt", only="optim:generator", key_type="name")
    require_identical(torch.load(tmp_path / "one.pt")["state"], expected["generator"])
    with pytest.raises(NeedsInformationError, match="the optimizers list 11 parameters, the units have 10"):
        fsdpckpt.convert(source, tmp_path / "all.pt")


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


def test_the_file_has_the_groups_of_each_and_one_alone_is_the_only_one() -> None:
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


def test_optimizers_of_another_model_or_order_and_none_at_all_are_refused(tmp_path: Path) -> None:
    (model, optimizers), (_, others) = plain_job(), plain_job()
    with pytest.raises(UsageError, match="adam: group 0 of the optimizer: 3 parameters are not in this model"):
        fsdpckpt.save_units(model, {"muon": optimizers["muon"], "adam": others["adam"]}, tmp_path / "units.json")
    with pytest.raises(UsageError, match="the mapping of optimizers is empty"):
        fsdpckpt.save_units(model, {}, tmp_path / "units.json")
    assert not (tmp_path / "units.json").exists()
    usual = replace(units_of(model, optimizers), world_size=2)
    moved = tuple((name, groups[::-1]) for name, groups in usual.optimizers)
    assert with_orders({None: usual}) == usual
    with pytest.raises(SourceUnsupportedError, match="list their parameters in different orders"):
        with_orders({None: usual, 1: relisted(usual, optimizers=moved)})


def parameters(*lengths: int) -> dict[str, tuple[int, ...]]:
    return {f"p{at}": (length, 0) for at, length in enumerate(lengths)}


def listed(*lengths: int | None) -> list[tuple[int, ...] | None]:
    return [None if length is None else (length, 0) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "groups", "optional", "found"),
    [
        ((5, 3, 5, 3), [listed(5, 5), listed(3, 3)], (), (("p0", "p2"), ("p1", "p3"))),
        ((5, 3, 4), [listed(4, 5), listed(3)], (), (("p2", "p0"), ("p1",))),  # not in the order of the model
        ((5, 3, 5), [listed(5, None, 5)], (), (("p0", "p1", "p2"),)),
        ((5, 3, 5), [listed(5), listed(3)], ("p2",), (("p0",), ("p1",))),
        ((5, 3, 7), [listed(5), listed(7)], (), (("p0",), ("p2",))),  # p1 has no optimizer
        ((5, 3), [listed(), listed(5, 3)], (), ((), ("p0", "p1"))),
        ((5, 5), [listed(5), listed(5)], (), "several"),
        ((5, 3, 5), [listed(5), listed(3)], (), "several"),  # either of two may be without an optimizer
        ((5, 3), [listed(None), listed(None)], (), "several"),
        ((5, 3), [listed(5), listed(4)], (), "no division"),
        ((5, 5, 3), [listed(3, 5), listed(5)], (), "no division"),  # out of order, and two are alike
        ((5,), [listed(5), listed(5)], (), "list 2"),
    ],
)
def test_a_division_is_the_only_one_that_fits(
    lengths: tuple[int, ...], groups: list[Any], optional: tuple[str, ...], found: tuple[tuple[str, ...], ...] | str
) -> None:
    if isinstance(found, str):
        with pytest.raises(UndividedError, match=found):
            divide(parameters(*lengths), groups, frozenset(optional))
    else:
        expected = Divided(found, by_order=lengths != (5, 3, 4))
        assert divide(parameters(*lengths), groups, frozenset(optional)) == expected
