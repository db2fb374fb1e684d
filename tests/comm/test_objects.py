"""Values are sent between workers in a closed encoding: equal and of the same type, or refused by name."""

from __future__ import annotations

import io
import json
import math
import struct
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.comm.trees import Slot, decode, encode
from fsdpckpt.errors import InternalError, UsageError
from fsdpckpt.ir.values import Global, Object

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(allow_nan=False)
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def alike(one: Any, other: Any) -> bool:
    """Equal with the same types all the way down; NaN is NaN, -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(alike(a, c) and alike(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@given(values)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert alike(decode(encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 0, 3]),
        torch.bfloat16,
        torch.device("cuda", 3),
        {1, 2},
        frozenset({"a"}),
        bytearray(b"\x00\xff"),
        np.float32(1.5),
        Global("torch", "float32"),
        Object(Global("a", "b"), (1, [2]), state={"x": None}, has_state=True, entries=[("k", 1)]),
        Slot(3),
        {"$": 1, "v": 2},
        2**100,
    ],
)
def test_each_rare_kind_comes_back_as_itself(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value)
    assert found == value


def test_arrays_and_open_byte_files_come_back_with_their_contents() -> None:
    array = np.random.default_rng(3).integers(-9, 9, (3, 0, 2)).astype(">i2"), np.random.default_rng(4).random((5, 3))
    for one in array:
        found = decode(encode(one))
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert found.tobytes() == one.tobytes()
    file = decode(encode(io.BytesIO(b"state")))
    assert isinstance(file, io.BytesIO)
    assert file.getvalue() == b"state"


def test_attributes_of_an_ordered_dict_travel_with_it() -> None:
    state: OrderedDict[str, int] = OrderedDict(a=1)
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    assert vars(decode(encode(state))) == {"_metadata": {"": {"version": 2}}}


class Units(np.ndarray[Any, Any]):
    """What a subclass adds would be lost."""


@pytest.mark.parametrize(
    "value",
    [
        np.ma.array([1, 2, 3], mask=[0, 1, 0]),
        np.arange(3).view(Units),
        np.rec.array([(1, 2.0)]),
        np.array([1, "a", None], dtype=object),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(3).astype(ml_dtypes.bfloat16),  # NumPy's own code of it is that of two raw bytes
        ml_dtypes.bfloat16(1.5),
        np.bytes_(b"a\0"),  # NumPy cuts zeros off
        np.bytes_(b""),
        np.zeros(3, "V0"),
        np.longlong(3),  # as large as int64, and another type
    ],
    ids=lambda value: f"{type(value).__qualname__}-{value.dtype}",
)
def test_arrays_that_would_arrive_as_something_else_are_refused_with_their_dtype(value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        encode({"rng": value})
    assert refused.value.key == "rng"
    assert f"{type(value).__qualname__} and dtype {value.dtype}" in str(refused.value)


@pytest.mark.parametrize("code", [">i2", ">f8", "<u2", "<u8", "|b1", "<f2", "<c16", "|S3", "|V5"])
def test_arrays_of_every_plain_dtype_arrive_as_they_were(code: str) -> None:
    length = 6 * np.dtype(code).itemsize
    for shape in ((2, 3), (6,), (6, 1)):
        array = np.frombuffer(bytes(number % 2 for number in range(length)), code).reshape(shape).T
        found = decode(encode([array, np.float64(2.5), np.bytes_(b"a")]))
        assert [type(value) for value in found] == [np.ndarray, np.float64, np.bytes_]  # type: ignore[attr-defined]
        assert (found[0].dtype.str, found[0].tobytes()) == (code, array.tobytes())  # type: ignore[index]
        assert found[0].flags.writeable  # type: ignore[index]


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize("value", [Level.HIGH, defaultdict(list), print, torch.nn.Linear(1, 1), np.dtype("i4")])
def test_what_could_be_more_than_its_value_is_refused_and_placed(value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        encode({"optimizer": [0, {"hook": value}]})
    assert refused.value.key == "optimizer[1].hook"
    assert type(value).__qualname__ in str(refused.value)


@pytest.mark.parametrize("tree", [{"$pickle": 0}, {"$dtype": "save"}, {"$array": [1]}, {"$": "dtype", "v": 0}])
def test_bytes_that_name_something_else_are_refused_not_looked_up(tree: Any) -> None:
    header = json.dumps({"tree": tree, "blobs": []}).encode()
    with pytest.raises(InternalError):
        decode(struct.pack("<q", len(header)) + header)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, struct.pack("<q", 2) + b"[]", struct.pack("<q", 9)])
def test_bytes_of_any_other_kind_are_refused(data: bytes) -> None:
    with pytest.raises(InternalError, match="cannot be read back"):
        decode(data)
