"""What lengths alone cannot prove: padding, replicas, and states that a flat parameter has once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.flat.flatten.states import require_equal_states
from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.proofs import compare_replicas, require_padding
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ModelState
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import FLOAT, Played, unit, units_of
from tests.ir.optimizers import with_setting

SHAPES = {"e.weight": (17, 9), "h.bias": (17,), "scale": (1,)}  # 171 elements: 4 ranks hold 43, the last one pads 1


def adagrad(units: Units, played: Played, initial: float = 0.0) -> Optimizer:
    moments = played.moment({name: played.values(param) for name, param in units.params().items()})
    for one in units.units if not units.use_orig_params else ():
        pad = -sum(param.numel for param in one.params) % played.world_size
        if pad:
            tensor = moments[one.key]
            end = int(tensor.chunks.offset[-1]) + int(tensor.chunks.size[-1, 0]) * 4
            played.data[-1][end - 4 * pad : end] = np.full(pad, initial, np.float32).tobytes()
    return played.optimizer({"sum": dict(moments)}, list(units.optimizer_keys()))


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


def test_a_parameter_less_of_the_same_shard_length_is_found_out_by_its_padding(tmp_path: Path) -> None:
    units = units_of(unit("", SHAPES), use_orig_params=False)
    played = Played(units, 4)
    checkpoint = written(played, tmp_path, optim=adagrad(units, played))
    shorter = units_of(unit("", {name: SHAPES[name] for name in ("e.weight", "h.bias")}), use_orig_params=False)
    with Sources() as sources:
        assert require_padding(checkpoint, proved(checkpoint, units), sources) == 1
        with pytest.raises(SourceCorruptError) as caught:
            require_padding(checkpoint, proved(checkpoint, shorter), sources)
    assert "rank 3" in caught.value.details[0]


@pytest.mark.parametrize(("initial", "fits"), [(0.25, True), (0.5, False)])
def test_an_optimizer_may_begin_with_the_constant_that_its_group_names(
    tmp_path: Path, initial: float, fits: bool
) -> None:
    units = units_of(unit("", SHAPES), use_orig_params=False)
    played = Played(units, 4)
    optim = adagrad(units, played, initial=initial)
    assert optim.param_groups is not None
    optim = with_setting(optim, 0, initial_accumulator_value=0.25)
    checkpoint = written(played, tmp_path, optim=optim)
    with Sources() as sources:
        if fits:
            require_padding(checkpoint, proved(checkpoint, units), sources)
        else:
            with pytest.raises(SourceCorruptError):
                require_padding(checkpoint, proved(checkpoint, units), sources)


@pytest.mark.parametrize("changed", [None, 0, 1])
def test_each_param_group_may_begin_with_a_constant_of_its_own(tmp_path: Path, changed: int | None) -> None:
    """Rprop's step sizes begin with the ``lr`` of their group; two elements of padding in each unit."""
    units = units_of(unit("", {"w": (10,)}), unit("l", {"v": (18,)}), use_orig_params=False)
    played = Played(units, 4)
    optim = adagrad(units, played)
    for key, value in ((0, 0.25), (1, 0.5)):
        tensor = optim.state[key]["sum"]
        assert isinstance(tensor, Tensor)
        end = int(tensor.chunks.offset[-1]) + int(tensor.chunks.size[-1, 0]) * 4
        values = np.array([value, value + (key == changed)], np.float32)
        played.data[-1][end - 8 : end] = values.tobytes()
    optim = optim.with_groups([{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}])
    checkpoint = written(played, tmp_path, optim=optim)
    units = units.with_groups((("_flat_param",), ("l._flat_param",)))
    with Sources() as sources:
        if changed is None:
            assert require_padding(checkpoint, proved(checkpoint, units), sources) == 4
            return
        with pytest.raises(SourceCorruptError) as caught:
            require_padding(checkpoint, proved(checkpoint, units), sources)
    assert [line.split(",")[0] for line in caught.value.details] == [f"optim {changed}"]


def test_the_gaps_of_an_aligned_flat_parameter_hold_the_filler(tmp_path: Path) -> None:
    """Both orders have a gap of 3 somewhere and one total; only where the gap is tells them apart."""
    units = units_of(unit("", {"a": (5,), "b": (9,), "c": (3,)}), use_orig_params=True)
    played = Played(units, 3)
    whole = {name: played.values(param) for name, param in units.params().items()}
    checkpoint = written(played, tmp_path, model=ModelState(dict(played.flat_parameters(whole))))
    other = units_of(unit("", {"b": (9,), "a": (5,), "c": (3,)}), use_orig_params=True)
    with Sources() as sources:
        assert require_padding(checkpoint, proved(checkpoint, units), sources) == 7
        with pytest.raises(SourceCorruptError):
            require_padding(checkpoint, proved(checkpoint, other), sources)


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


@pytest.mark.parametrize("change", [None, 3])
def test_replicas_of_hybrid_shards_are_compared_by_their_checksums(tmp_path: Path, change: int | None) -> None:
    hybrid = replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD)
    units = units_of(hybrid, use_orig_params=False, shard_size=2)
    played = Played(units, 4)
    checkpoint = written(played, tmp_path, optim=adagrad(units, played))
    assert checkpoint.optim is not None
    tensor = checkpoint.optim.state[0]["sum"]
    assert isinstance(tensor, Tensor)
    checkpoint = with_checksums(checkpoint, tensor, change)
    problems, notes = compare_replicas(checkpoint, proved(checkpoint, units))
    assert [problem.rank for problem in problems] == ([] if change is None else [change])
    assert "2 replicas" in notes[0].message


@pytest.mark.parametrize("change", [None, 2, 3])
def test_a_record_that_is_longer_than_its_slice_is_compared_with_that_of_its_replica(
    tmp_path: Path, change: int | None
) -> None:
    hybrid = replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD)
    units = units_of(hybrid, use_orig_params=True, shard_size=2)
    played = Played(units, 4)
    checkpoint = written(played, tmp_path, optim=adagrad(units, played))
    assert checkpoint.optim is not None
    slices = checkpoint.optim.state[0]["sum"]
    assert isinstance(slices, Tensor)
    checkpoint = with_checksums(checkpoint, slices, change)
    exact = checkpoint.checksums  # torch.save writes views of one storage as one record, which begins with the first
    checkpoint = replace(checkpoint, checksums=replace(exact, nbytes=exact.nbytes + 72))
    problems, notes = compare_replicas(checkpoint, proved(checkpoint, units))
    assert [problem.rank for problem in problems] == ([] if change is None else [change])
    assert notes[0].message.startswith("2 replicas of slices compared")


def scalar(played: Played, value: float) -> Tensor:
    offset = played.put(0, np.asarray(value, np.float32))
    return Tensor(FLOAT, (), Chunks.whole(file=0, offset=offset, shape=()))


def test_steps_that_differ_within_a_unit_are_refused_by_name(tmp_path: Path) -> None:
    units = units_of(unit("", {"e": (3,)}), unit("l.0", {"a": (2,), "b": (2,)}), use_orig_params=False)
    played = Played(units, 1)
    steps = {"e": scalar(played, 9), "l.0.a": scalar(played, 4), "l.0.b": scalar(played, 4)}
    checkpoint = written(played, tmp_path, optim=Optimizer.of({key: {"step": step} for key, step in steps.items()}))
    with Sources() as sources:
        require_equal_states(checkpoint, units, sources)
    steps["l.0.b"] = scalar(played, 5)
    checkpoint = written(played, tmp_path, optim=Optimizer.of({key: {"step": step} for key, step in steps.items()}))
    with Sources() as sources, pytest.raises(SourceUnsupportedError) as caught:
        require_equal_states(checkpoint, units, sources)
    assert "l.0" in caught.value.details[0] and "l.0.b" in caught.value.details[0]


def test_non_tensor_states_that_differ_within_a_unit_are_refused(tmp_path: Path) -> None:
    units = units_of(unit("", {"a": (2,), "b": (2,)}), use_orig_params=False)
    played = Played(units, 1)
    optim = Optimizer.of({"a": {"mode": "fast", "calls": 1}, "b": {"mode": "slow", "calls": 1}}, None)
    with Sources() as sources, pytest.raises(SourceUnsupportedError) as caught:
        require_equal_states(written(played, tmp_path, optim=optim), units, sources)
    assert len(caught.value.details) == 1
