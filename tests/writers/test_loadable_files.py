"""One full file loads with ``torch.load(path)``, whatever its extras are, and all of them come back from it."""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import hashlib
import pathlib
import random
import uuid
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceError, SourceUnsafeError
from fsdpckpt.formats.torch.loadable import ARRAY, ENCODED, VALUES
from tests.oracle.compare import identical

MODEL = {"w": torch.randn(5, 3), "b": torch.randn(5)}
OPTIMIZER = {
    "state": {name: {"exp_avg": torch.randn_like(tensor)} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": np.float64(0.1), "betas": (0.9, np.float32(0.99)), "params": ["w", "b"]}],
}
SHARED = np.arange(7, dtype=np.int16)
EXTRAS: dict[str, Any] = {
    "numpy_state": np.random.RandomState(5).get_state(),
    "python_state": random.Random(5).getstate(),
    "arrays": [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">u4"),
        np.array([], np.float64),
        np.array(5),
        np.array([True, False]),
        np.array(["a", "bc"]),
        np.array([1 + 2j]),
    ],
    "numbers": {"loss": np.float64(0.1), "step": np.int64(7), "best": np.bool_(True), "half": np.float16(0.5)},
    "shared": [SHARED, {"again": SHARED}],
    "keys": {np.int64(3): "three", ("a", np.int64(4)): [torch.randn(2)]},
    "ordered": OrderedDict([(np.int64(9), 1), (np.int64(2), 2)]),
    "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "where": pathlib.PurePosixPath("runs/one"),
    "identity": {"run": uuid.UUID(int=(7 << 100) + 5), "named": uuid.uuid5(uuid.NAMESPACE_DNS, "run")},
    "exact": [decimal.Decimal("1.10"), decimal.Decimal("-Infinity"), fractions.Fraction(-7, 3)],
    "by day": OrderedDict([(datetime.date(2026, 1, 2), np.arange(2)), ("none", None)]),
    "sets": [{1, np.int64(2)}, frozenset({"a"})],
    "nested sets": {((1, 2), 3), ((1, 2), ((4,), 5))},
    "arguments": argparse.Namespace(function=["relu", "gelu"]),
    "empty": b"",
    "bytes": bytearray(b"abc"),
    "counts": Counter("abca"),
    "version": torch.__version__,
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.strided],
    "plain": {"epoch": 3, "name": "x", "nothing": None, "rate": 0.5, "big": 1 << 90, "tuple": (1, (2,))},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"model": MODEL, "optimizer": OPTIMIZER, **EXTRAS}, tmp_path / "source.pt")
    return tmp_path / "source.pt"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        alike = type(other) is type(one) and one.dtype == other.dtype and one.shape == other.shape
        return alike and one.flags.f_contiguous == other.flags.f_contiguous and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return identical(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and list(map(type, one)) == list(map(type, other))
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def plain(value: Any) -> Any:
    """``value`` with Python's numbers for NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in {dict, OrderedDict}:
        return type(value)((plain(key), plain(item)) for key, item in value.items())
    return type(value)(map(plain, value)) if type(value) in {list, tuple, set} else value


def test_torch_load_takes_the_file_by_default(source: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    found = torch.load(tmp_path / "full.pt")
    assert same(found["model"], MODEL) and found.keys() == {"model", "optimizer", *EXTRAS}
    assert same(found["optimizer"]["state"], OPTIMIZER["state"])
    assert same(found["optimizer"]["param_groups"], plain(OPTIMIZER["param_groups"])), (
        "optimizers take no tensors there"
    )
    (numbers,) = (note for note in report.notes if "NumPy numbers" in note.message)
    assert numbers.keys == (
        *(f"optimizer.param_groups.0.{key}" for key in ("lr", "betas.1")),
        *(f"numbers.{key}" for key in ("loss", "step", "best", "half")),
        *("keys", "ordered", "sets.0"),
    )
    for key in ("plain", "numbers", "keys", "ordered", "python_state", "empty", "bytes", "counts"):
        assert same(found[key], plain(EXTRAS[key])), key
    name, keys, *rest = found["numpy_state"]
    assert (name, *rest) == (EXTRAS["numpy_state"][0], *EXTRAS["numpy_state"][2:])
    assert keys.dtype == torch.uint32 and keys.tolist() == EXTRAS["numpy_state"][1].tolist()
    generator = np.random.RandomState(1)
    generator.set_state((name, keys, *rest))
    assert generator.rand() == np.random.RandomState(5).rand(), "and NumPy takes it as it is"
    assert identical(found["arrays"][0], torch.arange(6.0).reshape(2, 3))
    (note,) = (note for note in report.notes if note.kind == "encoded" and note is not numbers)
    assert set(note.keys) == {
        "numpy_state",
        "arrays",
        "shared",
        "when",
        "identity",
        "exact",
        "where",
        "by day",
        "sets",
        "arguments",
        "version",
        "torch",
    }


def test_what_was_said_otherwise_comes_back_as_it_was(source: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(source, tmp_path / "full.pt")
    assert fsdpckpt.diff(source, tmp_path / "full.pt").same and fsdpckpt.verify(tmp_path / "full.pt").whole
    ranks: dict[str, Any] = {"to": "sharded", "container": "torch", "world_size": 1, "buffers": ["none"]}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "ranks", **ranks)
    found = torch.load(tmp_path / "ranks" / "extra_state_world_size_1_rank_0.pt", weights_only=False)
    truth = torch.load(source, weights_only=False)
    for key in EXTRAS:
        assert same(plain(truth[key]), found[key]), key
    assert found["shared"][0] is found["shared"][1]["again"]
    groups = torch.load(tmp_path / "ranks" / "optim_world_size_1_rank_0.pt", weights_only=False)["param_groups"]
    assert same(groups, plain(OPTIMIZER["param_groups"]))
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "again.pt")
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "again.pt").same


def test_a_changed_tensor_is_a_changed_array(source: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(source, tmp_path / "full.pt")
    content = torch.load(tmp_path / "full.pt")
    content["arrays"][0][1, 2] = 77.0
    torch.save(content, tmp_path / "edited.pt")
    ranks: dict[str, Any] = {"to": "sharded", "container": "torch", "world_size": 1, "buffers": ["none"]}
    fsdpckpt.convert(tmp_path / "edited.pt", tmp_path / "ranks", **ranks)
    found = torch.load(tmp_path / "ranks" / "extra_state_world_size_1_rank_0.pt", weights_only=False)
    assert isinstance(found["arrays"][0], np.ndarray) and found["arrays"][0][1, 2] == 77.0


def test_what_users_name_as_the_stand_ins_stays_theirs(tmp_path: Path) -> None:
    own = (
        {ENCODED: "hello"},
        {ENCODED: 5, VALUES: [1]},
        {ENCODED: '{"$tuple": []}'},
        {ENCODED: [[1, 2]], "ordered": True},
    )
    marked = torch.arange(3)
    setattr(marked, ARRAY, "mine")
    torch.save({"model": MODEL, "own": own, "marked": marked}, tmp_path / "source.pt")
    report = fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "full.pt")
    found = torch.load(tmp_path / "full.pt")
    assert same(found["own"], own) and same(found["marked"], marked)
    assert any(ARRAY in note.message for note in report.notes if note.kind == "dropped")


def stamped(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16] + text


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({ENCODED: stamped('{"$object": {"function": ["os", "system"], "args": ["true"]}}')}, SourceUnsafeError),
        ({ENCODED: stamped('{"$global": ["posix", "system"]}')}, SourceUnsafeError),
        ({ENCODED: stamped("no JSON")}, SourceCorruptError),
        ({ENCODED: stamped('{"$unknown": 1}')}, SourceCorruptError),
        ({ENCODED: stamped("5"), VALUES: [1]}, SourceCorruptError),
        ({ENCODED: stamped('{"a": null}'), VALUES: [1, 2]}, SourceCorruptError),
        ({ENCODED: stamped('{"a": null}'), VALUES: {}}, SourceCorruptError),
        ({ENCODED: stamped('{"$dict": [[[], 1]]}'), VALUES: [1]}, SourceCorruptError),
    ],
)
def test_stand_ins_that_lie_are_refused(value: object, error: type[SourceError], tmp_path: Path) -> None:
    torch.save({"model": MODEL, "own": value}, tmp_path / "lies.pt")
    with pytest.raises(error):
        fsdpckpt.inspect(tmp_path / "lies.pt")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"$object": {"function": ["os", "system"], "args": ["true"]}}', SourceUnsafeError),
        ('{"$object": {"function": ["builtins", "range"], "args": [1, 2]}}', SourceCorruptError),
        ("5", SourceCorruptError),
        ("", SourceCorruptError),
    ],
)
def test_arrays_that_lie_are_refused(text: str, error: type[SourceError], tmp_path: Path) -> None:
    tensor = torch.arange(3)
    setattr(tensor, ARRAY, stamped(text))
    torch.save({"model": MODEL, "own": tensor}, tmp_path / "lies.pt")
    with pytest.raises(error):
        fsdpckpt.inspect(tmp_path / "lies.pt")


def test_files_of_frameworks_keep_the_classes_that_their_loaders_expect(tmp_path: Path) -> None:
    content = {"state_dict": MODEL, "optimizer_states": [], "pytorch-lightning_version": "2.6.6", "own": SHARED}
    torch.save(content, tmp_path / "last.ckpt")
    fsdpckpt.convert(tmp_path / "last.ckpt", tmp_path / "copy.ckpt")
    assert isinstance(torch.load(tmp_path / "copy.ckpt", weights_only=False)["own"], np.ndarray)
