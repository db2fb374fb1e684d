"""``--parameters`` in the optimizer's order, for a flattened target: real FSDP1 loads each parameter its own states.

The model's order, which flat parameters follow, is known from elsewhere. The groups have parameters of equal shapes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from tests.flat.jobs import RANKS, Net, named, wrapped
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

GROUPS = (("blocks.2", "blocks.0"), ("head", "blocks.3", "blocks.1"))
STATES = ("exp_avg", "exp_avg_sq")
Values = dict[str, Any]


def net(*, frozen: bool) -> Net:
    """``frozen``: with a parameter of the root that no optimizer has."""
    model = Net([(5, 7)] * 4)
    if frozen:
        model.scale = nn.Parameter(torch.rand(2, 11), requires_grad=False)
    return model


@dataclass(frozen=True)
class Job:
    """What a job without FSDP holds: weights and states by name, the optimizer by id, the names of its groups."""

    weights: Values
    states: dict[str, Values]
    optimizer: Values
    groups: list[list[str]]
    frozen: bool = False

    def by_name(self, groups: Sequence[Sequence[str]]) -> Values:
        """The optimizer by name, whose groups list these names."""
        listed = zip(self.optimizer["param_groups"], groups, strict=True)
        return {"state": self.states, "param_groups": [{**group, "params": list(names)} for group, names in listed]}

    def wrapped(self, weights: Values, *, orig: bool) -> nn.Module:
        model = net(frozen=self.frozen)
        model.load_state_dict(weights)
        return wrapped(model, use_orig_params=orig)

    def require_loads(self, path: Path, *, orig: bool) -> None:
        """Load the optimizer's files into the same job under FSDP1, and compare its states with their slices."""
        for rank in range(RANKS):
            with as_rank(rank, RANKS):
                model = self.wrapped(self.weights, orig=orig)
                optimizer = optimizer_of(model)
                file = path / f"optim_world_size_{RANKS}_rank_{rank}.pt"
                optimizer.load_state_dict(torch.load(file, weights_only=True))
                assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
                for state in STATES:
                    whole = {name: states[state] for name, states in self.states.items()}
                    held = named(self.wrapped({**self.weights, **whole}, orig=orig))
                    for name, param in named(model).items():
                        if param.numel() and param.requires_grad:
                            assert identical(optimizer.state[param][state], held[name].detach()), (rank, name, state)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Groups of blocks of equal shapes. With flat parameters that of the root is the head's."""
    params = {name: param for name, param in named(model).items() if param.requires_grad}
    groups: list[Values] = []
    for number, prefixes in enumerate(GROUPS):
        held: list[nn.Parameter] = []
        for prefix in prefixes:
            of_module = [param for name, param in params.items() if name.startswith(prefix)]
            held += of_module or [params["_flat_param"]]
        groups.append({"params": held, "weight_decay": 0.1 * number})
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def trained(*, frozen: bool = False) -> Job:
    torch.manual_seed(3)
    model = net(frozen=frozen)
    optimizer = optimizer_of(model)
    for param in model.parameters():
        param.grad = torch.randn_like(param) if param.requires_grad else None
    optimizer.step()
    name_of = {param: name for name, param in model.named_parameters()}
    return Job(
        weights=model.state_dict(),
        states={name_of[param]: states for param, states in optimizer.state.items()},
        optimizer=optimizer.state_dict(),
        groups=[[name_of[param] for param in group["params"]] for group in optimizer.param_groups],
        frozen=frozen,
    )


@pytest.fixture(scope="module")
def job() -> Job:
    return trained()


def listed(path: Path, groups: Sequence[Sequence[str]], between: str = "") -> Path:
    path.write_text(between.join("".join(f"{name}\n" for name in names) for names in groups))
    return path


def flattened(source: Values, tmp_path: Path, *, orig: bool, **options: Any) -> Path:
    """``source`` as files of FSDP1, whose units are in ``options``, else every block."""
    torch.save(source, tmp_path / "source.pt")
    wrapping = {} if "units" in options else {"unit": "blocks.*", "use_orig_params": orig}
    target = tmp_path / "flat"
    fsdpckpt.convert(
        tmp_path / "source.pt", target, to="flattened", world_size=RANKS, key_type="id", **wrapping, **options
    )
    return target


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("between", ["", "\n"])
def test_the_source_has_the_order_of_the_model(job: Job, between: str, orig: bool, tmp_path: Path) -> None:
    order = listed(tmp_path / "order", job.groups, between)
    source = {"model": job.weights, "optimizer": job.optimizer}
    path = flattened(source, tmp_path, orig=orig, parameters=order)
    job.require_loads(path, orig=orig)
    recorded = json.loads((path / "fsdpckpt.json").read_text())["units"]
    assert recorded["parameters"] == list(job.weights)


@pytest.mark.parametrize("orig", [True, False])
def test_a_reference_has_the_order_of_the_model(job: Job, orig: bool, tmp_path: Path) -> None:
    order = listed(tmp_path / "order", job.groups)
    torch.save(job.weights, tmp_path / "reference.pt")
    source = {"model": dict(sorted(job.weights.items())), "optimizer": job.optimizer}
    path = flattened(source, tmp_path, orig=orig, parameters=order, reference=tmp_path / "reference.pt")
    job.require_loads(path, orig=orig)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("with_groups", [True, False])
def test_a_units_file_has_the_order_of_the_model(job: Job, with_groups: bool, orig: bool, tmp_path: Path) -> None:
    """With groups of flat parameters it does not have the order of those that a flat parameter is made of."""
    order, units = listed(tmp_path / "order", job.groups), tmp_path / "units.json"
    with as_rank(0, RANKS):
        model = job.wrapped(job.weights, orig=orig)
        fsdpckpt.save_units(model, optimizer_of(model) if with_groups else None, units)
    source = {"model": job.weights, "optimizer": job.optimizer}
    path = flattened(source, tmp_path, orig=orig, parameters=order, units=units)
    job.require_loads(path, orig=orig)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("names", ["sorted", "of the model"])
def test_a_source_by_name_that_does_not_list_the_optimizers_order(
    job: Job, names: str, orig: bool, tmp_path: Path
) -> None:
    position = [*job.weights].index if names == "of the model" else None
    source = {"model": job.weights, "optimizer": job.by_name([sorted(group, key=position) for group in job.groups])}
    order = listed(tmp_path / "order", job.groups)
    path = flattened(source, tmp_path, orig=orig, parameters=order)
    job.require_loads(path, orig=orig)


def test_new_names_and_what_is_left_out_are_those_of_the_list(job: Job, tmp_path: Path) -> None:
    order = listed(tmp_path / "order", job.groups, "\n")
    source = {"model": {**job.weights, "extra": torch.rand(3)}, "optimizer": job.optimizer}
    options: Values = {"exclude": "extra", "add_prefix": "net.", "parameters": order}
    torch.save(source, tmp_path / "source.pt")
    wrapping: Values = {"unit": "net.blocks.*", "use_orig_params": True, "world_size": RANKS}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "flat", to="flattened", key_type="id", **wrapping, **options)
    job.require_loads(tmp_path / "flat", orig=True)


def test_a_frozen_parameter_is_in_no_optimizers_list(tmp_path: Path) -> None:
    job = trained(frozen=True)
    order = listed(tmp_path / "order", job.groups)
    source = {"model": job.weights, "optimizer": job.optimizer}
    with pytest.raises(NeedsInformationError, match="ambiguous") as caught:
        flattened(source, tmp_path, orig=True, parameters=order)
    assert caught.value.details == ("scale may be a parameter or a buffer",)
    path = flattened(source, tmp_path, orig=True, parameters=order, buffers="none")
    job.require_loads(path, orig=True)
    assert "scale" in json.loads((path / "fsdpckpt.json").read_text())["units"]["parameters"]


@pytest.mark.parametrize("between", ["", "\n"])
def test_an_order_of_the_model_that_nothing_else_says_is_refused(job: Job, between: str, tmp_path: Path) -> None:
    order = listed(tmp_path / "order", job.groups, between)
    source = {"model": dict(sorted(job.weights.items())), "optimizer": job.optimizer}
    with pytest.raises(NeedsInformationError, match=r"order of the parameters of .* is not known") as caught:
        flattened(source, tmp_path, orig=True, parameters=order)
    assert caught.value.exit_code == 4
    assert "--reference PATH" in str(caught.value.next_step) and "--units FILE" in str(caught.value.next_step)


def test_a_list_of_other_groups_is_refused(job: Job, tmp_path: Path) -> None:
    """It is neither the model's order nor that of an optimizer with these groups, in whatever way it is given."""
    source = {"model": job.weights, "optimizer": job.by_name(job.groups)}
    mixed = [*chain(*job.groups)][::-1]
    with pytest.raises(SourceCorruptError, match="do not describe the model"):
        flattened(source, tmp_path, orig=True, parameters=listed(tmp_path / "mixed", [mixed]))
    with pytest.raises(SourceCorruptError, match="do not describe the model") as caught:
        flattened(source, tmp_path, orig=True, parameters=listed(tmp_path / "parts", [mixed[:8], mixed[8:]], "\n"))
    assert any("param group 0 lists" in line for line in caught.value.details)


@pytest.mark.parametrize("where", ["param_names", "units"])
def test_a_list_in_another_order_than_the_recorded_one_is_refused(job: Job, where: str, tmp_path: Path) -> None:
    optimizer = job.by_name(job.groups)
    options: Values = {"parameters": listed(tmp_path / "order", [group[::-1] for group in job.groups])}
    if where == "units":
        with as_rank(0, RANKS):
            model = job.wrapped(job.weights, orig=True)
            fsdpckpt.save_units(model, optimizer_of(model), tmp_path / "units.json")
        options["units"] = tmp_path / "units.json"
    else:
        for group, names in zip(optimizer["param_groups"], job.groups, strict=True):
            group["param_names"] = names
    with pytest.raises(SourceCorruptError, match="parameters") as caught:
        flattened({"model": job.weights, "optimizer": optimizer}, tmp_path, orig=True, **options)
    assert caught.value.exit_code == 3
