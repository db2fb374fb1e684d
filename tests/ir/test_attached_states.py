"""The shape of a state and that of its parameter are compared; only states that show one count."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from fsdpckpt.ir.attached_states import misshapen_states
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState, NamedSection, Section
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.state_shapes import may_mirror
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from tests.ir.checkpoints import checkpoint, tensor, with_origin

SHAPES = {"up.weight": (12, 5), "up.bias": (12,), "conv.weight": (4, 3, 2, 2), "row.weight": (1, 7), "scale": ()}
OPTIMIZERS = [
    one
    for _, one in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(one, torch.optim.Optimizer) and one not in (torch.optim.Optimizer, torch.optim.SparseAdam)
]


def holding(
    params: Mapping[str, tuple[int, ...]], state: Mapping[Any, Mapping[str, Any]], groups: Any = None
) -> Checkpoint:
    states: dict[Any, dict[str, Tensor | Value]] = {
        key: {name: tensor(*value) if isinstance(value, tuple) else value for name, value in entry.items()}
        for key, entry in state.items()
    }
    model = {name: tensor(*shape) for name, shape in params.items()}
    return checkpoint(model, Optimizer.of(states, groups or [{"params": list(states)}]))


def found(
    params: Mapping[str, tuple[int, ...]], state: Mapping[Any, Mapping[str, Any]], groups: Any = None
) -> list[tuple[str | None, Section | None]]:
    return [(problem.key, problem.section) for problem in misshapen_states(holding(params, state, groups))]


def trained(make: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The state dict of a real optimizer after two steps."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes.values()]
    optimizer = make(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(param**2).sum() for param in params]).sum()
        loss.backward()
        return loss

    for _ in range(2):
        closure()
        optimizer.step(closure) if make is torch.optim.LBFGS else optimizer.step()
    state_dict: dict[str, Any] = optimizer.state_dict()
    return state_dict


def states_of(state_dict: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries with the shapes of their tensors; lists of tensors and numbers as they are."""
    for key, entry in state_dict["state"].items():
        yield key, {name: tuple(value.shape) if torch.is_tensor(value) else None for name, value in entry.items()}


@pytest.mark.parametrize("make", [*OPTIMIZERS, Adafactor], ids=lambda one: f"{one.__module__}.{one.__name__}")
def test_no_optimizer_contradicts_its_own_model_and_each_with_moments_contradicts_a_part_of_it(make: Any) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if make is not torch.optim.Muon or len(shape) == 2}
    names, entries = list(shapes), dict(states_of(trained(make, shapes)))
    assert found(shapes, entries, [{"params": list(range(len(names)))}]) == []
    assert found(shapes, {names[key]: entry for key, entry in entries.items()}) == []
    part = {**shapes, "up.weight": (6, 5)}
    mirrored = any(shape == (12, 5) for shape in entries.get(0, {}).values())
    expected = [("up.weight", Section.MODEL)] if mirrored else []
    assert found(part, {names[key]: entry for key, entry in entries.items()}) == expected
    without_moments = {torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SGD, Adafactor}
    assert mirrored is (make not in without_moments)


@pytest.mark.parametrize(
    ("param", "state", "section"),
    [
        ((6, 5), (12, 5), Section.MODEL),
        ((12, 5), (3, 5), Section.OPTIM),
        ((12, 5), (12, 2), Section.OPTIM),
        ((5, 12), (12, 5), None),
        ((3, 12), (12, 5), None),
        ((12,), (3,), Section.OPTIM),
        ((), (3,), None),
        ((12, 0), (12, 5), Section.MODEL),
    ],
)
def test_the_section_that_lacks_elements_is_named(
    param: tuple[int, ...], state: tuple[int, ...], section: Section | None
) -> None:
    key = "w.exp_avg" if section is Section.OPTIM else "w"
    assert found({"w": param}, {"w": {"step": (), "exp_avg": state}}) == [(key, section)]


@pytest.mark.parametrize(
    ("state", "parameter", "mirrors"),
    [
        ((12, 1), (12, 5), True),  # Nero, NorMuon: one value for each row
        ((1,), (12, 5), True),
        ((), (12, 5), True),
        ((0,), (12, 5), True),
        ((60,), (12, 5), True),
        ((4, 12), (4, 3, 2, 2), True),  # heavyball
        ((4, 3, 2, 2), (4, 12), True),
        ((5, 12), (12, 5), False),
        ((1, 5), (12, 5), False),
        ((4, 6), (4, 3, 2, 2), False),
    ],
)
def test_shapes_that_libraries_give_to_moments(
    state: tuple[int, ...], parameter: tuple[int, ...], mirrors: bool
) -> None:
    """As many elements in other dimensions are another shape."""
    assert may_mirror("exp_avg", state, parameter) is mirrors
    assert not mirrors or not found({"w": parameter}, {"w": {"exp_avg": state}})


def test_ademamix_of_bitsandbytes_keeps_two_moments_in_one_state() -> None:
    assert not found({"w": (12, 5)}, {"w": {"state1": (2, 12, 5), "state2": (12, 5)}})
    assert found({"w": (12, 5)}, {"w": {"state1": (12, 5), "state2": (2, 12, 5)}})


def test_states_of_projections_and_of_masked_elements_show_nothing() -> None:
    """GaLore keeps the moments of a projection to ``rank`` rows, SPAM those of the elements in ``mask``."""
    low = {"w": {"step": (), "exp_avg": (2, 5)}}
    assert found({"w": (12, 5)}, low)
    assert not found({"w": (12, 5)}, low, [{"params": ["w"], "rank": 2, "update_proj_gap": 200}])
    assert not found({"w": (12, 5)}, {"w": {**low["w"], "projector": {"ortho": 1}}})
    assert not found({"w": (12, 5)}, {"w": {"exp_avg": (31,), "mask": (12, 5)}})
    assert not found({"w": (12, 5)}, {"w": {"row_var": (4, 1), "Q": (12, 12), "p0": (30,), "d": (999,)}})
    assert not found({"w": (12, 5)}, {"w": {"exp_avg": None, "GG": [1, 2]}}), "no tensors"


def test_names_are_compared_without_the_prefixes_of_wrappers() -> None:
    params = {"module._orig_mod.w": (6, 5)}
    assert found(params, {"w": {"exp_avg": (12, 5)}}) == [("module._orig_mod.w", Section.MODEL)]
    assert found(params, {0: {"exp_avg": (12, 5)}}, [{"params": [0], "param_names": ["w"]}])
    assert not found({**params, "module.w": (12, 5)}, {"w": {"exp_avg": (12, 5)}})  # w may be either
    assert not found(params, {"other": {"exp_avg": (12, 5)}})


def test_an_id_is_compared_with_every_parameter() -> None:
    params = {"a": (12, 5), "b": (12,), "c": (7, 12)}
    groups = [{"params": [0, 1, 2]}]
    good = {0: {"exp_avg": (7, 12)}, 1: {"exp_avg": (12, 5)}, 2: {"exp_avg": (12,)}}
    assert not found(params, good, groups)
    assert found(params, {**good, 2: {"exp_avg": (24,)}}, groups) == [("2.exp_avg", Section.MODEL)]
    assert found(params, {**good, 0: {"exp_avg": (2, 12)}}, groups) == [("0.exp_avg", Section.OPTIM)]


def test_vectors_that_may_be_slices_of_flat_parameters_are_not_compared() -> None:
    params, flat = {"a": (12, 5), "b": (12,)}, {0: {"exp_avg": (36,)}, 1: {"exp_avg": (36,)}}
    assert not found(params, flat)
    mixed = holding(params, {0: {"exp_avg": (12, 5)}, 1: {"exp_avg": (36,)}})
    assert list(misshapen_states(mixed))
    assert not list(misshapen_states(with_origin(mixed, layout=Layout.FLATTENED)))
    # What one rank saves of a flat parameter for b and c, beside a parameter that FSDP1 ignores.
    assert not found({**params, "c": (24,)}, {0: {"exp_avg": (12, 5)}, 1: {"exp_avg": (36,)}})


@pytest.mark.parametrize("weight", [tensor(36, cut=Slices()), tensor(36, cut=OneSlice()), tensor(30, 1, dtype="uint8")])
def test_slices_have_a_length_and_no_shape_and_integers_no_states(weight: Tensor) -> None:
    """Frozen weights of 4 bits are bytes, in pairs; an optimizer of another part of the model may use their name."""
    assert not list(
        misshapen_states(replace(holding({}, {"w": {"exp_avg": (12, 5)}}), model=ModelState({"w": weight})))
    )


def test_every_optimizer_is_compared_with_its_own_model() -> None:
    """A generator and its critic; an id of the main optimizer may belong to either."""
    critic = ModelState({"c.w": tensor(4, 9)})
    states: dict[Any, dict[str, Tensor | Value]] = {"c.w": {"exp_avg": tensor(8, 9)}}
    named = (
        NamedSection(Section.MODEL, "critic", ("critic",), critic),
        NamedSection(Section.OPTIM, "critic_optimizer", ("critic_optimizer",), Optimizer.of(states, None)),
    )
    both = replace(holding({"w": (12, 5)}, {0: {"exp_avg": (4, 9)}, 1: {"exp_avg": (12, 5)}}), named=named)
    (problem,) = misshapen_states(both)
    assert (problem.key, problem.section) == ("c.w", Section.MODEL)
    assert problem.message.startswith("optim:critic_optimizer: model c.w")
