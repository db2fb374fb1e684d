"""``encode`` and ``Decoder``: what comes back is what went in, type by type. Equal values, and values as text."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.errors import InternalError, SourceCorruptError
from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import UNREAD, Decoder, Global, Object, encode, equal, replaced, value_text, without


def through_text(value: Any) -> Any:
    return Decoder().decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(left: Any, right: Any) -> bool:
    """Equal in value and in every type, NaN bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        keys = len(left) == len(right) and all(map(same, left, right))
        return keys and all(map(same, left.values(), right.values()))
    return left == right


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.binary().map(bytearray)
    | st.builds(Global, st.text(), st.text())
    | st.sets(st.integers() | st.text()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert same(through_text(value), value)


@pytest.mark.parametrize("value", [{"$tuple": [1]}, {"$unknown": 1, "a": 2}, {"": {"$": None}}, {1: "a", "1": "b"}])
def test_a_dict_that_looks_like_a_tag_is_a_dict(value: Any) -> None:
    assert same(through_text(value), value)


def test_a_nan_keeps_its_payload() -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff8dead00000001"))[0]
    assert struct.pack(">d", through_text([odd])[0]).hex() == "7ff8dead00000001"
    assert math.copysign(1, through_text(-0.0)) == -1


def test_an_ordered_dict_keeps_its_attributes() -> None:
    value: OrderedDict[str, Any] = OrderedDict(w=1)
    value._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    back = through_text(value)
    assert type(back) is OrderedDict and same(vars(back), vars(value))


def test_a_call_record_keeps_arguments_state_items_and_entries() -> None:
    plain = Object(Global("torch", "Size"), ((3, 4),))
    full = Object(
        Global("m", "C"), (1,), new=True, state=None, has_state=True, items=[2.5], entries=[((1,), {"a": plain})]
    )
    back = through_text([plain, full])
    assert back == [plain, full]
    assert back[0].has_state is False and back[1].has_state is True


def test_a_tensor_is_a_reference_to_where_it_is_stored() -> None:
    tensor = Tensor(DTYPES["float32"], (), Chunks.whole(file=0, offset=8, shape=()))
    text = json.dumps(encode({"lr": tensor}, tensor_key=lambda found: "optimizer.lr" if found is tensor else "?"))
    assert Decoder({"optimizer.lr": tensor}).decode(json.loads(text))["lr"] is tensor
    with pytest.raises(KeyError):
        Decoder().decode(json.loads(text))
    with pytest.raises(InternalError):
        encode({"lr": tensor})


@pytest.mark.parametrize(
    "text",
    [
        '{"$tuple": 1}',
        '{"$dict": [[1]]}',
        '{"$dict": [[[1], 2]]}',
        '{"$dict": [[{"$tuple": [[1]]}, 2]]}',
        '{"$nonsense": 1}',
        '{"$float": "00"}',
        '{"$float": "zz"}',
        '{"$complex": [1]}',
        '{"$complex": ["a", "b"]}',
        '{"$bytes": "%%%"}',
        '{"$bytes": null}',
        '{"$float": 4000000000000000}',
        '{"$global": ["torch"]}',
        '{"$object": {"args": []}}',
        '{"$object": 3}',
        '{"$set": [[1]]}',
        '{"$ordered": [], "attributes": 3}',
        '{"$ordered": [], "attributes": {"items": 3}}',
        '{"$tensor": "gone"}',
    ],
)
def test_text_that_was_damaged_is_refused(text: str) -> None:
    with pytest.raises(SourceCorruptError) as refused:
        decode_allowed(json.loads(text), file="a.safetensors")
    assert refused.value.file == "a.safetensors"


SIZE, SAME_SIZE, OTHER_SIZE = (Object(Global("torch", "Size"), ((3, last),)) for last in (4, 4, 5))


@pytest.mark.parametrize("as_loaded", [False, True])
def test_values_are_equal_in_type_and_value(as_loaded: bool) -> None:
    def same_value(a: Any, b: Any) -> bool:
        return equal(a, b, as_loaded=as_loaded)

    assert same_value([float("nan"), (1, "x")], [float("nan"), (1, "x")])
    nan = float("nan")
    assert same_value([complex(1, nan), complex(nan, -2)], [complex(1, nan), complex(nan, -2)])
    assert not same_value(complex(1, nan), complex(2, nan))
    assert same_value({1, float("nan"), (2, float("nan"))}, {(2, float("nan")), float("nan"), 1})
    assert not same_value({1, float("nan")}, {2, float("nan")})
    assert not same_value(complex(nan, 1), complex(nan, nan))
    assert same_value(SIZE, SAME_SIZE)
    assert not same_value(SIZE, OTHER_SIZE)
    assert same_value(Object(UNREAD, (float("nan"),)), Object(UNREAD, (float("nan"),)))
    assert not same_value(Object(UNREAD, (1,)), Object(UNREAD, (1.0,)))
    assert not same_value(Object(UNREAD, items=[True]), Object(UNREAD, items=[1]))
    assert not same_value(1, 1.0)
    assert not same_value(True, 1)
    assert not same_value((1,), [1])
    assert not same_value({"a": 1}, {"a": 1, "b": None})
    assert same_value(OrderedDict(b=1, a=2), {"a": 2, "b": 1}) is as_loaded
    assert same_value({"b": 1, "a": 2}, {"a": 2, "b": 1}) is as_loaded


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, 1 + 0j), (b"a", bytearray(b"a")), ([1], [True]), ((), ())])
def test_equal_calls_have_equal_hashes(a: Any, b: Any) -> None:
    first, second = Object(UNREAD, (a,)), Object(UNREAD, (b,))
    assert first == second
    assert hash(first) == hash(second)


def test_only_what_is_there_is_replaced_or_removed() -> None:
    value: Any = {"a": [{"b": 1}, 2], "c": (3, {"d": 4})}
    assert replaced(value, ("a", 0, "b"), 5) == {"a": [{"b": 5}, 2], "c": (3, {"d": 4})}
    assert replaced(value, ("c", 1, "d"), 5) == {"a": [{"b": 1}, 2], "c": (3, {"d": 5})}
    assert replaced(value, (), 5) == 5
    assert without(value, ("a", 1)) == {"a": [{"b": 1}], "c": (3, {"d": 4})}
    assert without(value, ("a", 0, "b")) == {"a": [{}, 2], "c": (3, {"d": 4})}
    for path in [("x",), ("a", 2), ("a", 0, "x"), ("a", 1, "x"), ("c", "d")]:
        assert replaced(value, path, 5) is value
        assert without(value, path) is value


def test_tensors_are_equal_if_their_chunks_are_the_same() -> None:
    chunks = Chunks.whole(file=0, offset=0, shape=(2,))
    a, b = (Tensor(DTYPES["float32"], (2,), chunks) for _ in range(2))
    assert equal([a], [b])
    assert not equal(a, Tensor(DTYPES["float32"], (2,), Chunks.whole(file=0, offset=8, shape=(2,))))


def test_texts_of_values_are_short() -> None:
    assert value_text((0.9, 0.95)) == "(0.9, 0.95)"
    assert value_text(list(range(100))) == "a list of 100, beginning 0, 1"
    assert value_text(b"abc") == "3 bytes"
    assert value_text(SIZE) == "torch.Size(...)"
    assert value_text(UNREAD) == "(not read)"
    assert len(value_text("x" * 500)) == 60
