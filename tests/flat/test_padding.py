"""Padding: what of it is looked at, on whose account it is refused, and which constants are no accident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.proofs import require_padding
from fsdpckpt.ir.checkpoint import ModelState
from fsdpckpt.ir.dtypes import DTYPES, numpy_dtype
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import Played, unit, units_of
from tests.flat.test_proofs import proved, written
from tests.ir.optimizers import with_entry

NINE = {"w": (7,), "b": (2,)}  # 9 elements: 8 ranks hold 2 each, rank 4 holds one and the last three none


def optim(
    units: Units, world_size: int, changed: dict[tuple[str, int], float], constant: float = 0.0
) -> tuple[Played, Optimizer]:
    """Two moments on the ranks. ``constant`` is the padding, ``changed`` the last element of a state on a rank."""
    played = Played(units, world_size)
    states = {}
    for name in ("exp_avg", "exp_avg_sq"):
        moments = played.moment({key: played.values(param) for key, param in units.params().items()})
        for one in units.units:
            total = sum(param.numel for param in one.params)
            tensor = moments[one.key]
            for rank, offset, size in zip(
                range(world_size), tensor.chunks.offset.tolist(), tensor.chunks.size[:, 0].tolist(), strict=True
            ):
                held = max(0, min(size, total - rank * size))
                values = np.full(size - held, constant, np.float32)
                if (name, rank) in changed and len(values):
                    values[-1] = changed[name, rank]
                played.data[rank][offset + 4 * held : offset + 4 * size] = values.tobytes()
        states[name] = dict(moments)
    return played, played.optimizer(states, list(units.optimizer_keys()))


def checked(
    tmp_path: Path,
    changed: dict[tuple[str, int], float] | None = None,
    *,
    constant: float = 0.0,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> int | tuple[str, ...]:
    """Elements that were proved, or what is wrong."""
    units = units_of(unit("", shapes or NINE), use_orig_params=False)
    played, state = optim(units, 8, changed or {}, constant)
    source = written(played, tmp_path, optim=state)
    with Sources() as sources:
        try:
            return require_padding(source, proved(source, units), sources)
        except SourceCorruptError as error:
            return error.details


def test_all_right_padding_of_all_states_is_looked_at(tmp_path: Path) -> None:
    assert checked(tmp_path) == 2 * (8 * 2 - 9)


def test_only_the_ranks_and_the_state_that_hold_something_else_are_named(tmp_path: Path) -> None:
    assert checked(tmp_path, {("exp_avg_sq", 6): 0.5}) == (
        "optim 0, rank 6, exp_avg_sq: what is padding in the units holds values of a parameter",
    )
    assert checked(tmp_path, {("exp_avg", 4): 0.5, ("exp_avg", 7): -1.0}) == tuple(
        f"optim 0, rank {rank}, exp_avg: what is padding in the units holds values of a parameter" for rank in (4, 7)
    )


def test_one_constant_everywhere_is_what_an_optimizer_began_with(tmp_path: Path) -> None:
    assert checked(tmp_path, constant=0.75) == 14


@pytest.mark.parametrize("value", [0.75, 0.1])
def test_a_single_element_is_a_constant_only_where_a_group_names_it(tmp_path: Path, value: float) -> None:
    """lr is 0.1 there, which is no float32: what float32 makes of it counts."""
    found = checked(tmp_path, constant=value, shapes={"w": (15,)})
    assert found == 2 if value == 0.1 else isinstance(found, tuple) and len(found) == 2


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3])
def test_units_of_several_dtypes_have_the_constant_each_in_its_own(tmp_path: Path, value: float) -> None:
    units = units_of(unit("", {"w": (15,)}), unit("l", {"v": (15,)}), use_orig_params=False)
    played, found = optim(units, 8, {})
    for key, dtype in enumerate(("bfloat16", "float16")):
        tensor = found.state[key]["exp_avg"]
        assert isinstance(tensor, Tensor)
        found = with_entry(found, key, {"exp_avg": replace(tensor, dtype=DTYPES[dtype])})
        at = int(tensor.chunks.offset[7])
        played.data[7][at : at + 4] = np.array([0.7, value]).astype(numpy_dtype(DTYPES[dtype])).tobytes()
    source = written(played, tmp_path, optim=found)
    with Sources() as sources:
        if value != 0.3:  # lr is 0.1 there
            assert require_padding(source, proved(source, units), sources) == 2
            return
        with pytest.raises(SourceCorruptError) as caught:
            require_padding(source, proved(source, units), sources)
    assert [line.split(",")[0] for line in caught.value.details] == ["optim 0", "optim 1"]


def test_lengths_without_padding_prove_nothing_here(tmp_path: Path) -> None:
    assert checked(tmp_path, shapes={"w": (2, 8)}) == 0


def test_gaps_are_found_under_wrapped_keys_and_on_the_rank_that_has_them(tmp_path: Path) -> None:
    units = units_of(unit("", {"a": (5,), "b": (9,), "c": (3,)}), use_orig_params=True)
    played = Played(units, 3)
    flat = played.flat_parameters({name: played.values(param) for name, param in units.params().items()})
    tensor = flat["_flat_param"]
    assert isinstance(tensor, Tensor)
    model = ModelState({"_fsdp_wrapped_module._flat_param": tensor, "note": "text"})
    with Sources() as sources:
        source = written(played, tmp_path, model=model)
        assert require_padding(source, proved(source, units), sources) == 7
        # 24 elements, 8 a rank: a and its gap are on rank 0, b from 8 to 17, its gap to 20 on rank 2, c, then one more
        played.data[2][int(tensor.chunks.offset[2]) + 4 : int(tensor.chunks.offset[2]) + 8] = b"\0\0\0\0"
        source = written(played, tmp_path, model=model)
        with pytest.raises(SourceCorruptError) as caught:
            require_padding(source, proved(source, units), sources)
    assert caught.value.details == (
        "model _fsdp_wrapped_module._flat_param, rank 2: 3 elements of alignment do not hold 42",
    )
