"""The pickle reader: inert values for the closed set, every other name refused, nothing executed."""

from __future__ import annotations

import argparse
import builtins
import collections
import copyreg
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import subprocess
import types
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.allowlist import ALLOWED, Kind, canonical, kind_of
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.ir.values import Global, Object, walk
from tests.hostile.opcodes import P2, name, text

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
METADATA = "torch.distributed.checkpoint.metadata"
SHARDED = "torch.distributed._shard.sharded_tensor.api"


def read(value: Any, protocol: int = 2) -> Any:
    return load(pickle.dumps(value, protocol=protocol), file="it.pkl")


class Calls:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_python_values_are_themselves(protocol: int) -> None:
    value = {
        "betas": (0.9, 0.999),
        3: [None, True, -1, 2**70, 1.5, "ü", b"\x00\xff", bytearray(b"abc")],
        "set": {1, "two"},
        "complex": 3 - 4j,
        "empty": ({}, [], (), b"", set()),
        -1.5: float("inf"),
    }
    found = read(value, protocol)
    assert found == value
    assert [type(leaf) for _, leaf in walk(found)] == [type(leaf) for _, leaf in walk(value)]
    ordered = collections.OrderedDict([("z", 1), ("a", 2)])
    ordered._metadata = collections.OrderedDict(version=1)  # type: ignore[attr-defined]
    found = read(ordered, protocol)
    assert type(found) is collections.OrderedDict
    assert list(found.items()) == [("z", 1), ("a", 2)]
    assert vars(found) == {"_metadata": {"version": 1}}


ENCODE = name("_codecs", "encode") + b"q\x00" + text("x" * 4096) + b"q\x01" + text("latin1") + b"q\x02\x86R"
SET = name("__builtin__", "set") + b"q\x00](" + b"K\x01" * 1000 + b"tq\x01a\x85R"
GETATTR = P2 + name("__builtin__", "getattr")
NAMESPACE = Global("argparse", "Namespace")

# fmt: off
RECORDS: dict[str, tuple[Any, Any]] = {  # bytes are a pickle
    "a name": (torch.bfloat16, Global("torch", "bfloat16")),
    "a call": (torch.Size([3, 4]), Object(Global("torch", "Size"), ((3, 4),))),
    "a call with numbers": (torch.device("cuda:1"), Object(Global("torch", "device"), ("cuda", 1))),
    # Python writes one as REDUCE and the other as NEWOBJ: what is written again says which it was
    "a class that is called": (P2 + name("argparse", "Namespace") + b")R.", Object(NAMESPACE, new=False)),
    "a class that is made new": (P2 + name("argparse", "Namespace") + b")\x81.", Object(NAMESPACE, new=True)),
    "a tensor where none is stored": (
        P2 + name("torch._utils", "_rebuild_tensor_v2") + b"K\x01K\x02\x86R.",
        Object(Global("torch._utils", "_rebuild_tensor_v2"), (1, 2))),
    "what a training script saves is not built": (
        argparse.Namespace(lr=0.1, layers=[1, 2]),
        Object(NAMESPACE, new=True, state={"lr": 0.1, "layers": [1, 2]}, has_state=True)),
    "a dict of defaults": (
        collections.defaultdict(list, a=[1]),
        Object(Global("collections", "defaultdict"), (Global("builtins", "list"),), entries=[("a", [1])])),
    "getattr gives the nested class of ShardedTensor": (
        GETATTR + name(SHARDED, "ShardedTensor") + text("ProcessGroupState") + b"\x86R)\x81.",
        Object(Global(SHARDED, "ShardedTensor.ProcessGroupState"), new=True)),
    # Python 3.11.0 to 3.11.3 pickled enum members as getattr(class, name)
    "an enum member that is written by name": (
        GETATTR + name(METADATA, "_MEM_FORMAT_ENCODING") + text("TORCH_X") + b"\x86R.",
        Object(Global("builtins", "getattr"), (Global(METADATA, "_MEM_FORMAT_ENCODING"), "TORCH_X"))),
    "names are keys": (
        {torch.float32: "a", torch.bfloat16: "b"}, {Global("torch", "float32"): "a", Global("torch", "bfloat16"): "b"}),
    "names in a set": ({torch.int8, torch.int16}, {Global("torch", "int8"), Global("torch", "int16")}),
    "a name that a set has twice": (
        P2 + name("__builtin__", "set") + b"](" + name("torch", "int8") * 2 + b"e\x85R.", {Global("torch", "int8")}),
    # Reading never gives a type that could be called
    "classes are inert wherever they stand": (
        [torch.Tensor, torch.FloatStorage, collections.OrderedDict, torch.nn.Parameter, int],
        [Global("torch", "Tensor"), Global("torch", "FloatStorage"), Global("collections", "OrderedDict"),
         Global("torch.nn.parameter", "Parameter"), Global("builtins", "int")]),
    "equal bytes may share the text that they are made of": (
        P2 + b"](" + ENCODE + b"h\x00h\x01h\x02\x86R" * 9 + b"e.", [b"x" * 4096] * 10),
}
# fmt: on


@pytest.mark.parametrize("case", RECORDS)
def test_names_and_calls_of_the_closed_set_are_records(case: str) -> None:
    value, expected = RECORDS[case]
    found = load(value, file="it.pkl") if isinstance(value, bytes) else read(value)
    assert found == expected and type(found) is type(expected)
    if isinstance(found, list):
        assert [type(one) for one in found] == [type(one) for one in expected]


def test_what_a_training_script_saves_beside_tensors_is_read() -> None:
    for value in (
        collections.Counter("aab"), collections.deque([1, 2], 5), datetime.datetime(2024, 2, 29, 1, 2),
        datetime.timedelta(3), datetime.UTC, uuid.uuid1(), decimal.Decimal("0.10"), fractions.Fraction(1, 3),
        pathlib.PurePosixPath("/a/b"), pathlib.Path("c"), types.SimpleNamespace(x=1), torch.__version__,
        io.BytesIO(b"abc"), frozenset([1]), range(3), slice(1, 2), np.float32(1.5), np.arange(5), np.dtype("<i4"),
        np.random.RandomState(3), np.random.default_rng(3), np.random.get_state(),
    ):  # fmt: skip
        found = read({"it": value})["it"]
        for _, leaf in walk(found):
            assert isinstance(leaf, (Object, str, int, float)), value


def test_the_bytes_of_a_numpy_array_are_bytes() -> None:
    array = np.random.default_rng(1).integers(0, 2**63, 7)
    found = read(array)
    assert found.function == Global(type(array).__reduce__(array)[0].__module__, "_reconstruct")
    assert found.args[0] == Global("numpy", "ndarray")
    assert found.state[4] == array.tobytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_dcp_metadata_is_read_as_records(protocol: int) -> None:
    size = torch.Size([5, 3])
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), size)]
    entries = {
        "w": TensorStorageMetadata(TensorProperties(torch.float16), size, chunks), "b": BytesStorageMetadata(),
    }  # fmt: skip
    found = read(Metadata(entries, {"w": ("w",)}, {MetadataIndex("w", torch.Size([0, 0])): 5}), protocol)
    assert found.function == Global(METADATA, "Metadata")
    assert found.new and found.has_state
    assert found.state["state_dict_metadata"]["b"] == Object(Global(METADATA, "BytesStorageMetadata"), new=True)
    tensor = found.state["state_dict_metadata"]["w"]
    assert tensor.state["size"].args == ((5, 3),)
    assert tensor.state["properties"].state[0] == Global("torch", "float16")
    (index,) = found.state["storage_data"]
    assert (index.function, index.state["fqn"]) == (Global(METADATA, "MetadataIndex"), "w")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_name_outside_the_set_is_refused_at_once_and_nothing_runs(protocol: int, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "ran"
    value = [
        Calls(os.system, f"touch {mark}"),
        {"deep": (Calls(eval, f"open({str(mark)!r}, 'w')"),)},
        Calls(subprocess.check_output, ["touch", str(mark)]),
        Calls(builtins.exec, "1"),
        collections.OrderedDict(a=Calls(open, str(mark), "w")),
        pickle.Unpickler,
        1j,
    ]
    with pytest.raises(SourceUnsafeError) as error:
        read(value, protocol)
    assert not mark.exists()
    names = set(error.value.details)
    assert {f"{os.system.__module__}.system", "builtins.eval", "builtins.exec"} <= names
    # protocols 0 to 2 write Python 2's names of some modules
    assert {each.rpartition(".")[2] for each in names} == {
        "system", "eval", "exec", "check_output", "open", "Unpickler",
    }  # fmt: skip
    assert (error.value.file, error.value.exit_code) == ("it.pkl", 3)


# The refused value is itself built upon: parsing goes on, and the other names are found
BUILT_UPON = (
    name("os", "kill") + b")R)RK\x01a" + name("os", "system") + text("a") + b"\x85R}" + text("k")
    + b"K\x01sb(K\x01K\x02e" + name("os", "popen") + b")\x81" + text("k") + b"K\x01s\x86."
)  # fmt: skip


@pytest.mark.parametrize(
    ("pickled", "names"),
    [
        (BUILT_UPON, {"os.kill", "os.system", "os.popen"}),
        (name("os", "system") + b"0" + text("a") + b"Q.", {"os.system"}),  # before bytes that cannot be loaded
        (name("__builtin__", "object") + b")R.", {"builtins.object"}),  # the name of a value, called
    ],
)
def test_names_are_named_whatever_comes_after_them(pickled: bytes, names: set[str]) -> None:
    with pytest.raises(SourceUnsafeError) as error:
        load(P2 + pickled, file="it.pkl")
    assert {detail.removesuffix(" (called)") for detail in error.value.details} == names


Refused = tuple[bytes, tuple[type[FsdpckptError], ...], str | None]
UNSAFE, DAMAGE = (SourceUnsafeError,), (SourceCorruptError,)
EITHER = (SourceCorruptError, SourceUnsafeError)
COPIED, NOT_TEXT = "the same data is copied again and again", "encode of something that is not text"


def keyed(count: int) -> bytes:
    """A dict of keys of equal hash that differ."""
    each = (b"h\x00)\x81}" + text("a") + b"M%bsbN" % number.to_bytes(2, "little") for number in range(count))
    return P2 + name("argparse", "Namespace") + b"q\x000}(" + b"".join(each) + b"u."


def from_getattr(asked: bytes) -> Refused:
    return GETATTR + asked, UNSAFE, "does not allow"


def dishonest(pickled: bytes) -> Refused:
    return pickled, EITHER, None


def attribute(key: str, on: bytes, how: bytes) -> bytes:
    return P2 + on + how + b"}" + text(key) + text("os") + (b"s\x86b." if how.endswith(b"N") else b"sb.")


FLOAT32, NAMESPACE_CLASS, ORDERED = (
    name("torch", "float32"), name("argparse", "Namespace"), name("collections", "OrderedDict"),
)  # fmt: skip
# fmt: off
REFUSED: dict[str, Refused] = {
    # A small pickle of much data
    "the same bytes": (P2 + b"](" + ENCODE + b"h\x00h\x01h\x02\x86R" * 4000 + b"e.", DAMAGE, COPIED),
    "the same set": (P2 + b"](" + SET + b"h\x00]h\x01a\x85R" * 4000 + b"e.", DAMAGE, COPIED),
    "many different keys of equal hash": (keyed(2000), DAMAGE, COPIED),
    "a set of one long tuple many times": (
        P2 + name("__builtin__", "set") + b"](" + b"(" + b"K\x01" * 1000 + b"tq\x00" + b"h\x00" * 4000 + b"e\x85R.",
        DAMAGE, COPIED),

    # Nothing but text is encoded, and that as bytes
    "an encoded number": (P2 + name("_codecs", "encode") + b"K\x01\x85R.", DAMAGE, NOT_TEXT),
    "another encoding": (P2 + name("_codecs", "encode") + text("a") + text("rot13") + b"\x86R.", DAMAGE, NOT_TEXT),

    # getattr gives nothing but the nested class of ShardedTensor
    "getattr of a name": from_getattr(name("torch", "Size") + text("__new__") + b"\x86R."),
    "getattr of a class": from_getattr(ORDERED + text("__subclasses") + b"\x86R."),
    "getattr of ShardedTensor": from_getattr(name(SHARDED, "ShardedTensor") + text("__init__") + b"\x86R."),
    "getattr of getattr": from_getattr(name("__builtin__", "getattr") + text("__self__") + b"\x86R."),
    "getattr of a list": from_getattr(b"]" + text("append") + b"\x86R."),
    "getattr of metadata": from_getattr(name(METADATA, "Metadata") + text("__init__") + b"\x86R."),
    "getattr of one argument": from_getattr(b"]\x85R."),

    "BUILD on a name": dishonest(attribute("module", FLOAT32, b"")),
    "BUILD on a name, with slots": dishonest(attribute("module", FLOAT32, b"N")),
    "BUILD on a class": dishonest(attribute("function", NAMESPACE_CLASS, b"")),
    "BUILD on a class, with slots": dishonest(attribute("function", NAMESPACE_CLASS, b"N")),
    "BUILD on a list": dishonest(attribute("a", b"", b"]")),
    "an attribute that hides a method": dishonest(attribute("items", ORDERED, b")R")),
    "a class in place of another": dishonest(attribute("__class__", ORDERED, b")RN")),
    "bytes of 2 GiB": dishonest(P2 + name("__builtin__", "bytes") + b"J\xff\xff\xff\x7f\x85R."),
    "a byte array of 2 GiB": dishonest(P2 + name("__builtin__", "bytearray") + b"J\xff\xff\xff\x7f\x85R."),
    "NEWOBJ of what is no class": dishonest(P2 + name("torch", "Size") + b")\x81."),
    "a persistent id where none can be": dishonest(P2 + text("a") + b"Q."),
    "a key whose state comes after it was used": dishonest(
        P2 + name("numpy", "dtype") + text("i8") + b"\x85Rq\x000}" + name("numpy.core.multiarray", "scalar") + b"h\x00"
        + name("_codecs", "encode") + text("\5\0\0\0\0\0\0\0") + text("latin1") + b"\x86R\x86RK\x01sh\x00(K\x03"
        + text("<") + b"tb0."),
    "nothing": dishonest(b""), "no end": dishonest(P2 + b"}"), "no value": dishonest(P2 + b"."),
    "an unknown protocol": dishonest(b"\x80\x63."), "a zip": dishonest(b"PK\x03\x04"),
    "a reference to nothing": dishonest(P2 + b"h\x07."),
    "a memo number of nothing": dishonest(P2 + b"r\xff\xff\xff\x7f."),
}
# fmt: on


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_honest_pickle_does_is_refused_and_the_next_one_is_read(case: str) -> None:
    pickled, errors, words = REFUSED[case]
    with pytest.raises(errors, match=words):
        load(pickled, file="it.pkl")
    assert read(torch.float32) == Global("torch", "float32")
    assert read(argparse.Namespace(a=1)).function == NAMESPACE


def test_some_keys_of_equal_hash_are_read() -> None:
    assert len(load(keyed(100), file="it.pkl")) == 100


def test_extension_codes_are_refused_whether_a_library_registered_them_or_not() -> None:
    data = P2 + b"\x82\xf0" + text("true") + b"\x85R."
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(SourceUnsafeError, match="extension"):
            load(data, file="it.pkl")
    finally:
        copyreg.remove_extension("os", "system", 240)
    with pytest.raises(SourceUnsafeError, match="extension"):
        load(data, file="it.pkl")


@pytest.mark.parametrize(
    "opcode",
    [
        b"r\xff\xff\xff\x7f",  # a memo of two thousand million entries
        b"r\x00\x00\x10\x00",
        b"p2000000000\n",
        b"\x96\x00\x00\x00\x00\xff\x00\x00\x00",  # BYTEARRAY8 of a terabyte
        b"X\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"\x07",
    ],
)
def test_numbers_that_a_pickle_of_this_size_cannot_have_are_refused_unread(opcode: bytes) -> None:
    for data in (P2 + b"]" + opcode + b".", P2 + b"]0" * 40000 + b"]" + opcode + b"."):
        with pytest.raises(SourceCorruptError):
            check_pickle(data, "it.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_opcode_that_pickle_writes_passes_the_scan(protocol: int) -> None:
    value = [{i: (f"text {i}", i * 2**40, float(i), bytes([i % 256]) * 300, [b"", None, True]) for i in range(400)}]
    value += [2**9000, "x" * 70000, {1, 2}, frozenset([3]), bytearray(b"y" * 300), collections.OrderedDict(a=1), 1j]
    check_pickle(pickle.dumps(value, protocol=protocol), "it.pkl")
    assert read(value, protocol)[0] == value[0]


def test_truncation_anywhere_is_an_error() -> None:
    data = pickle.dumps({"a": [1, (2.5, "x")], "b": collections.OrderedDict(c=torch.Size([1]))}, protocol=2)
    for length in range(len(data)):
        with pytest.raises(SourceCorruptError):
            load(data[:length], file="it.pkl")


def test_names_of_python_two_are_those_of_python_three_and_nothing_that_acts_is_in_the_closed_set() -> None:
    assert canonical("__builtin__", "xrange") == ("builtins", "range")
    assert canonical("__builtin__", "set") == ("builtins", "set")
    assert canonical("torch", "Size") == ("torch", "Size")
    for each in (
        "os.system", "builtins.eval", "builtins.exec", "builtins.__import__", "torch.load",
        "torch.storage._load_from_bytes", "torch._C.Generator", "numpy.load", "operator.attrgetter",
        "functools.partial",
    ):  # fmt: skip
        assert kind_of(*each.rsplit(".", 1)) is None
    assert {kind for (module, _), kind in ALLOWED.items() if module == "builtins" and kind is Kind.CLASS} == set()
