"""What lengths alone cannot prove: padding, and replicas of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.proofs import compare_replicas, require_padding
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ModelState
from fsdpckpt.ir.dtypes import DTYPES, numpy_dtype
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import Played, unit, units_of
from tests.ir.optimizers import with_entry, with_setting

SHAPES = {"e.weight": (17, 9), "h.bias": (17,), "scale": (1,)}  # 171 elements: 4 ranks hold 43, the last one pads 1
NINE = {"w": (7,), "b": (2,)}  # 9 elements: 8 ranks hold 2 each, rank 4 holds one and the last three none


def padded(
    units: Units,
    played: Played,
    states: Sequence[str] = ("sum",),
    *,
    constant: float = 0.0,
    changed: Mapping[tuple[str, int], float] | None = None,
) -> Optimizer:
    """Moments on the ranks. ``constant`` is their padding, ``changed`` the last element of a state on a rank."""
    found: dict[str, dict[str, object]] = {}
    for name in states:
        moments = played.moment({key: played.values(param) for key, param in units.params().items()})
        for one in units.units if not units.use_orig_params else ():
            total, chunks = sum(param.numel for param in one.params), moments[one.key].chunks
            for rank, offset, size in zip(
                range(played.world_size), chunks.offset.tolist(), chunks.size[:, 0].tolist(), strict=True
            ):
                held = max(0, min(size, total - rank % played.ranks_of(one) * size))
                values = np.full(size - held, constant, np.float32)
                if (name, rank) in (changed or {}) and len(values):
                    values[-1] = (changed or {})[name, rank]
                played.data[rank][offset + 4 * held : offset + 4 * size] = values.tobytes()
        found[name] = dict(moments)
    found["step"] = {key: played.replicas(np.float32(3).reshape(())) for key in units.optimizer_keys()}
    found["mode"] = dict.fromkeys(units.optimizer_keys(), "fast")
    return played.optimizer(found, list(units.optimizer_keys()))


def written(played: Played, tmp_path: Path, **sections: object) -> Checkpoint:
    checkpoint = played.checkpoint(**sections)  # type: ignore[arg-type]
    files = []
    for rank, data in enumerate(played.files()):
        path = tmp_path / f"rank{rank}"
        path.write_bytes(data)
        files.append(Stored(str(path), len(data)))
    return replace(checkpoint, files=tuple(files))


def proved(checkpoint: Checkpoint, units: Units) -> FlatMatch:
    found = match(checkpoint, units)
    assert isinstance(found, FlatMatch), found
    return found


def padding(source: Checkpoint, units: Units) -> int | tuple[str, ...]:
    """How many elements of padding were proved, or what is wrong."""
    with Sources() as sources:
        try:
            return require_padding(source, proved(source, units), sources)
        except SourceCorruptError as error:
            assert error.details
            return error.details


@dataclass(frozen=True)
class Row:
    """A flat parameter of ``shapes``, padded with ``constant`` and, at the end of a state on a rank, ``changed``; held
    against units of the parameters ``of``.
    """

    found: int | tuple[tuple[int, int, str], ...]
    shapes: Mapping[str, tuple[int, ...]]
    world_size: int = 8
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    constant: float = 0.0
    changed: Mapping[tuple[str, int], float] | None = None
    settings: Mapping[str, float] | None = None
    of: Sequence[str] = ()


ONE = {"w": (15,)}
BOTH = ((0, 7, "exp_avg"), (0, 7, "exp_avg_sq"))
BEGINS = {"initial_accumulator_value": 0.25}
ROWS = {
    "all padding of all states": Row(2 * (8 * 2 - 9), NINE),
    "one rank holds something else in one state": Row(((0, 6, "exp_avg_sq"),), NINE, changed={("exp_avg_sq", 6): 0.5}),
    "two ranks do": Row(
        ((0, 4, "exp_avg"), (0, 7, "exp_avg")), NINE, changed={("exp_avg", 4): 0.5, ("exp_avg", 7): -1.0}
    ),
    "one constant everywhere is what an optimizer began with": Row(14, NINE, constant=0.75),
    # lr is 0.1, which is no float32: what float32 makes of it counts
    "a single element is a constant where a group names it": Row(2, ONE, constant=0.1),
    "and else it is not": Row(BOTH, ONE, constant=0.75),
    "the constant of another setting": Row(1, SHAPES, 4, ("sum",), constant=0.25, settings=BEGINS),
    "a constant that no setting names": Row(((0, 3, "sum"),), SHAPES, 4, ("sum",), constant=0.5, settings=BEGINS),
    "lengths without padding": Row(0, {"w": (2, 8)}),
    "a parameter less, of the same shard length": Row(((0, 3, "sum"),), SHAPES, 4, ("sum",), of=("e.weight", "h.bias")),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_padding_of_states_is_zero_or_the_constant_that_they_began_with(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    units = units_of(unit("", row.shapes), use_orig_params=False)
    played = Played(units, row.world_size)
    optim = padded(units, played, row.states, constant=row.constant, changed=row.changed)
    source = written(played, tmp_path, optim=with_setting(optim, 0, **row.settings or {}))
    held_against = units_of(unit("", {one: row.shapes[one] for one in row.of or row.shapes}), use_orig_params=False)
    expected: int | tuple[str, ...]
    if isinstance(row.found, int):
        expected = row.found
    else:
        expected = tuple(
            f"optim {key}, rank {rank}, {state}: what is padding in the units holds values of a parameter"
            for key, rank, state in row.found
        )
    assert padding(source, held_against) == expected


@pytest.mark.parametrize("changed", [None, 0, 1])
def test_each_param_group_may_begin_with_a_constant_of_its_own(tmp_path: Path, changed: int | None) -> None:
    """Rprop's step sizes begin with the ``lr`` of their group; two elements of padding in each unit."""
    units = units_of(unit("", {"w": (10,)}), unit("l", {"v": (18,)}), use_orig_params=False)
    played = Played(units, 4)
    optim = padded(units, played)
    for key, value in ((0, 0.25), (1, 0.5)):
        tensor = optim.state[key]["sum"]
        assert isinstance(tensor, Tensor)
        end = int(tensor.chunks.offset[-1]) + int(tensor.chunks.size[-1, 0]) * 4
        values = np.array([value, value + (key == changed)], np.float32)
        played.data[-1][end - 8 : end] = values.tobytes()
    optim = optim.with_groups([{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}])
    found = padding(written(played, tmp_path, optim=optim), units.with_groups((("_flat_param",), ("l._flat_param",))))
    if changed is None:
        assert found == 4
    else:
        assert isinstance(found, tuple) and [line.split(",")[0] for line in found] == [f"optim {changed}"]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3])
def test_units_of_several_dtypes_have_the_constant_each_in_its_own(tmp_path: Path, value: float) -> None:
    units = units_of(unit("", {"w": (15,)}), unit("l", {"v": (15,)}), use_orig_params=False)
    played = Played(units, 8)
    optim = padded(units, played, ("exp_avg", "exp_avg_sq"))
    for key, dtype in enumerate(("bfloat16", "float16")):
        tensor = optim.state[key]["exp_avg"]
        assert isinstance(tensor, Tensor)
        optim = with_entry(optim, key, {"exp_avg": replace(tensor, dtype=DTYPES[dtype])})
        at = int(tensor.chunks.offset[7])
        played.data[7][at : at + 4] = np.array([0.7, value]).astype(numpy_dtype(DTYPES[dtype])).tobytes()
    found = padding(written(played, tmp_path, optim=optim), units)
    if value != 0.3:  # lr is 0.1 there
        assert found == 2
    else:
        assert isinstance(found, tuple) and [line.split(",")[0] for line in found] == ["optim 0", "optim 1"]


def test_the_gaps_of_an_aligned_flat_parameter_hold_the_filler_under_wrapped_keys_too(tmp_path: Path) -> None:
    """Both orders have a gap of 3 somewhere and one total; only where the gap is tells them apart."""
    units = units_of(unit("", {"a": (5,), "b": (9,), "c": (3,)}), use_orig_params=True)
    played = Played(units, 3)
    tensor = played.flat_parameters({name: played.values(param) for name, param in units.params().items()})[
        "_flat_param"
    ]
    model = ModelState({"_fsdp_wrapped_module._flat_param": tensor, "note": "text"})
    source = written(played, tmp_path, model=model)
    other = units_of(unit("", {"b": (9,), "a": (5,), "c": (3,)}), use_orig_params=True)
    assert padding(source, units) == 7 and isinstance(padding(source, other), tuple)
    # 24 elements, 8 a rank: a and its gap are on rank 0, b from 8 to 17, its gap to 20 on rank 2, c, then one more
    played.data[2][int(tensor.chunks.offset[2]) + 4 : int(tensor.chunks.offset[2]) + 8] = b"\0\0\0\0"
    assert padding(written(played, tmp_path, model=model), units) == (
        "model _fsdp_wrapped_module._flat_param, rank 2: 3 elements of alignment do not hold 42",
    )


def with_checksums(checkpoint: Checkpoint, tensor: Tensor, change: int | None) -> Checkpoint:
    """A CRC for each slice, those of equal shards equal, but for the rank in ``change``."""
    chunks = tensor.chunks
    rows = [
        (file, offset, 4 * size, 1000 + rank % 2 + (7 if rank == change else 0))
        for rank, file, offset, size in zip(
            chunks.rank.tolist(), chunks.file.tolist(), chunks.offset.tolist(), chunks.size[:, 0].tolist(), strict=True
        )
    ]
    return replace(checkpoint, checksums=Checksums.of(rows))


@pytest.mark.parametrize("change", [None, 2, 3])
@pytest.mark.parametrize(("orig", "longer"), [(False, 0), (True, 72)])
def test_replicas_of_hybrid_shards_are_compared_by_their_checksums(
    tmp_path: Path, orig: bool, longer: int, change: int | None
) -> None:
    """torch.save writes views of one storage as one record, which begins with the first: it is ``longer``."""
    hybrid = replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD)
    units = units_of(hybrid, use_orig_params=orig, shard_size=2)
    played = Played(units, 4)
    checkpoint = written(played, tmp_path, optim=padded(units, played))
    assert checkpoint.optim is not None
    slices = checkpoint.optim.state[0]["sum"]
    assert isinstance(slices, Tensor)
    _, (unknown,) = compare_replicas(checkpoint, proved(checkpoint, units))
    assert "replicas of slices carry no checksum and were not compared" in unknown.message
    checkpoint = with_checksums(checkpoint, slices, change)
    sums = checkpoint.checksums
    checkpoint = replace(checkpoint, checksums=replace(sums, nbytes=sums.nbytes + longer))
    problems, notes = compare_replicas(checkpoint, proved(checkpoint, units))
    assert [problem.rank for problem in problems] == ([] if change is None else [change])
    assert notes[0].message.startswith("2 replicas of slices compared")
