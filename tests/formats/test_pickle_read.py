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

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.allowlist import ALLOWED, Kind, canonical, kind_of
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.ir.values import Global, Object, walk

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


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


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_keeps_its_order_and_its_attributes(protocol: int) -> None:
    value = collections.OrderedDict([("z", 1), ("a", 2)])
    value._metadata = collections.OrderedDict(version=1)  # type: ignore[attr-defined]
    found = read(value, protocol)
    assert type(found) is collections.OrderedDict
    assert list(found.items()) == [("z", 1), ("a", 2)]
    assert vars(found) == {"_metadata": {"version": 1}}


def test_names_and_calls_of_the_closed_set_are_records() -> None:
    dtype, size, device = read([torch.bfloat16, torch.Size([3, 4]), torch.device("cuda:1")])
    assert dtype == Global("torch", "bfloat16")
    assert type(dtype) is Global
    assert size == Object(Global("torch", "Size"), ((3, 4),))
    assert type(size) is Object
    assert device == Object(Global("torch", "device"), ("cuda", 1))


def test_names_are_keys_and_members_of_sets_by_what_they_name() -> None:
    by_name, members = read([{torch.float32: "a", torch.bfloat16: "b"}, {torch.int8, torch.int16}])
    assert [by_name[Global("torch", name)] for name in ("float32", "bfloat16")] == ["a", "b"]
    assert members == {Global("torch", "int8"), Global("torch", "int16")}
    twice = load(b"\x80\x02c__builtin__\nset\n](ctorch\nint8\nctorch\nint8\ne\x85R.", file="it.pkl")
    assert isinstance(twice, set) and len(twice) == 1


def test_a_class_that_is_called_is_told_from_one_that_is_made_new() -> None:
    """Python writes one as REDUCE and the other as NEWOBJ: what is written again says which it was."""
    for end, new in ((b")R.", False), (b")\x81.", True)):
        assert load(b"\x80\x02cargparse\nNamespace\n" + end, file="it.pkl") == Object(
            Global("argparse", "Namespace"), new=new
        )


def test_a_tensor_where_none_is_stored_is_a_call() -> None:
    found = load(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nK\x01K\x02\x86R.", file="it.pkl")
    assert found == Object(Global("torch._utils", "_rebuild_tensor_v2"), (1, 2))


ENCODE = b"c_codecs\nencode\nq\x00X\x00\x10\x00\x00" + b"x" * 4096 + b"q\x01X\x06\x00\x00\x00latin1q\x02\x86R"
SET = b"c__builtin__\nset\nq\x00](" + b"K\x01" * 1000 + b"tq\x01a\x85R"


def test_equal_bytes_may_share_the_text_that_they_are_made_of() -> None:
    data = b"\x80\x02](" + ENCODE + b"h\x00h\x01h\x02\x86R" * 9 + b"e."
    assert load(data, file="it.pkl") == [b"x" * 4096] * 10


@pytest.mark.parametrize(
    ("first", "again"), [(ENCODE, b"h\x00h\x01h\x02\x86R"), (SET, b"h\x00]h\x01a\x85R")], ids=["bytes", "set"]
)
def test_a_small_pickle_of_much_data_is_refused(first: bytes, again: bytes) -> None:
    with pytest.raises(SourceCorruptError, match="the same data is copied again and again"):
        load(b"\x80\x02](" + first + again * 4000 + b"e.", file="it.pkl")


def test_many_different_keys_of_equal_hash_are_refused() -> None:
    def keyed(count: int) -> bytes:
        each = (b"h\x00)\x81}X\x01\x00\x00\x00aM%bsbN" % number.to_bytes(2, "little") for number in range(count))
        return b"\x80\x02cargparse\nNamespace\nq\x000}(" + b"".join(each) + b"u."

    assert len(load(keyed(100), file="it.pkl")) == 100
    with pytest.raises(SourceCorruptError, match="the same data is copied again and again"):
        load(keyed(2000), file="it.pkl")


def test_a_set_of_one_long_tuple_many_times_is_refused() -> None:
    long = b"(" + b"K\x01" * 1000 + b"tq\x00"
    with pytest.raises(SourceCorruptError, match="the same data is copied again and again"):
        load(b"\x80\x02c__builtin__\nset\n](" + long + b"h\x00" * 4000 + b"e\x85R.", file="it.pkl")


@pytest.mark.parametrize("arguments", [b"K\x01\x85", b"X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86"])
def test_nothing_but_text_is_encoded_and_that_as_bytes(arguments: bytes) -> None:
    with pytest.raises(SourceCorruptError, match="encode of something that is not text"):
        load(b"\x80\x02c_codecs\nencode\n" + arguments + b"R.", file="it.pkl")


def test_what_a_training_script_saves_beside_tensors_is_read_and_not_built() -> None:
    namespace = read(argparse.Namespace(lr=0.1, layers=[1, 2]))
    assert namespace == Object(
        Global("argparse", "Namespace"), new=True, state={"lr": 0.1, "layers": [1, 2]}, has_state=True
    )
    counts = read(collections.defaultdict(list, a=[1]))
    assert counts.args == (Global("builtins", "list"),)
    assert counts.entries == [("a", [1])]
    for value in (
        collections.Counter("aab"),
        collections.deque([1, 2], 5),
        datetime.datetime(2024, 2, 29, 1, 2),
        datetime.timedelta(3),
        datetime.UTC,
        uuid.uuid1(),
        decimal.Decimal("0.10"),
        fractions.Fraction(1, 3),
        pathlib.PurePosixPath("/a/b"),
        pathlib.Path("c"),
        types.SimpleNamespace(x=1),
        torch.__version__,
        io.BytesIO(b"abc"),
        frozenset([1]),
        range(3),
        slice(1, 2),
        np.float32(1.5),
        np.arange(5),
        np.dtype("<i4"),
        np.random.RandomState(3),
        np.random.default_rng(3),
        np.random.get_state(),
    ):
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
    metadata = Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.float16), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
            ),
            "b": BytesStorageMetadata(),
        },
        {"w": ("w",)},
        {MetadataIndex("w", torch.Size([0, 0])): 5},
    )
    found = read(metadata, protocol)
    module = "torch.distributed.checkpoint.metadata"
    assert found.function == Global(module, "Metadata")
    assert found.new and found.has_state
    entry = found.state["state_dict_metadata"]["b"]
    assert entry == Object(Global(module, "BytesStorageMetadata"), new=True)
    tensor = found.state["state_dict_metadata"]["w"]
    assert tensor.state["size"].args == ((5, 3),)
    assert tensor.state["properties"].state[0] == Global("torch", "float16")
    (index,) = found.state["storage_data"]
    assert (index.function, index.state["fqn"]) == (Global(module, "MetadataIndex"), "w")


def test_classes_are_inert_wherever_they_stand() -> None:
    """An allowed class as a value is a name; reading never gives a type that could be called."""
    found = read([torch.Tensor, torch.FloatStorage, collections.OrderedDict, torch.nn.Parameter, int])
    assert [str(name) for name in found] == [
        "torch.Tensor",
        "torch.FloatStorage",
        "collections.OrderedDict",
        "torch.nn.parameter.Parameter",
        "builtins.int",
    ]
    assert all(type(name) is Global for name in found)


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
    assert {name.rpartition(".")[2] for name in names} == {
        "system",
        "eval",
        "exec",
        "check_output",
        "open",
        "Unpickler",
    }
    assert error.value.file == "it.pkl"
    assert error.value.exit_code == 3


def test_names_after_a_use_that_cannot_work_are_still_named() -> None:
    """The refused value is itself built upon: parsing goes on, the second name is found."""
    first = b"cos\nsystem\nX\x01\x00\x00\x00a\x85R}X\x01\x00\x00\x00kK\x01sb(K\x01K\x02e"
    called = b"cos\nkill\n)R)RK\x01a"
    data = b"\x80\x02" + called + first + b"cos\npopen\n)\x81X\x01\x00\x00\x00kK\x01s\x86."
    with pytest.raises(SourceUnsafeError) as error:
        load(data, file="it.pkl")
    assert set(error.value.details) == {"os.kill", "os.system", "os.popen"}


def test_a_name_before_bytes_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(SourceUnsafeError) as error:
        load(b"\x80\x02cos\nsystem\n0X\x01\x00\x00\x00aQ.", file="it.pkl")
    assert error.value.details == ("os.system",)


GETATTR = b"\x80\x02c__builtin__\ngetattr\n"


@pytest.mark.parametrize(
    "asked",
    [
        b"ctorch\nSize\nX\x07\x00\x00\x00__new__\x86R.",
        b"ccollections\nOrderedDict\nX\x0c\x00\x00\x00__subclasses\x86R.",
        b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nX\x08\x00\x00\x00__init__\x86R.",
        b"c__builtin__\ngetattr\nX\x08\x00\x00\x00__self__\x86R.",
        b"]X\x06\x00\x00\x00append\x86R.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nX\x08\x00\x00\x00__init__\x86R.",
        b"]\x85R.",
    ],
)
def test_getattr_gives_nothing_but_the_nested_class_of_sharded_tensor(asked: bytes) -> None:
    with pytest.raises(SourceUnsafeError, match="does not allow"):
        load(GETATTR + asked, file="it.pkl")


def test_getattr_gives_the_nested_class_of_sharded_tensor() -> None:
    asked = (
        b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nX\x11\x00\x00\x00ProcessGroupState\x86R)\x81."
    )
    found = load(GETATTR + asked, file="it.pkl")
    assert isinstance(found, Object)
    assert found.function.name == "ShardedTensor.ProcessGroupState"


def test_an_enum_member_written_by_name_is_a_record() -> None:
    """Python 3.11.0 to 3.11.3 pickled enum members as getattr(class, name)."""
    asked = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nX\x07\x00\x00\x00TORCH_X\x86R."
    found = load(GETATTR + asked, file="it.pkl")
    assert isinstance(found, Object)
    assert found.args == (Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), "TORCH_X")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ctorch\nfloat32\n}X\x06\x00\x00\x00moduleX\x02\x00\x00\x00ossb.",  # BUILD on a name
        b"\x80\x02ctorch\nfloat32\nN}X\x06\x00\x00\x00moduleX\x02\x00\x00\x00oss\x86b.",
        b"\x80\x02cargparse\nNamespace\nN}X\x08\x00\x00\x00functionX\x02\x00\x00\x00oss\x86b.",  # on a class
        b"\x80\x02cargparse\nNamespace\n}X\x08\x00\x00\x00functionX\x02\x00\x00\x00ossb.",
        b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb.",  # on a list
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.",  # an attribute that hides a method
        b"\x80\x02ccollections\nOrderedDict\n)RN}X\x09\x00\x00\x00__class__K\x01s\x86b.",
        b"\x80\x02c_codecs\nencode\nK\x01\x85R.",
        b"\x80\x02c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",  # would allocate 2 GiB
        b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02ctorch\nSize\n)\x81.",  # NEWOBJ of what is no class
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent id where none can be
        # a key whose state comes after it was used
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00i8\x85Rq\x000}cnumpy.core.multiarray\nscalar\nh\x00c_codecs\nencode\n"
        b"X\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00X\x06\x00\x00\x00latin1\x86R\x86RK\x01s"
        b"h\x00(K\x03X\x01\x00\x00\x00<tb0.",
        b"",
        b"\x80\x02}",
        b"\x80\x02.",
        b"\x80\x63.",
        b"PK\x03\x04",
        b"\x80\x02h\x07.",
        b"\x80\x02r\xff\xff\xff\x7f.",
    ],
)
def test_bytes_that_are_no_honest_pickle_are_corrupt(data: bytes) -> None:
    with pytest.raises((SourceCorruptError, SourceUnsafeError)):
        load(data, file="it.pkl")
    assert read(torch.float32) == Global("torch", "float32")
    assert read(argparse.Namespace(a=1)).function == Global("argparse", "Namespace")


def test_a_value_name_that_is_called_is_refused() -> None:
    with pytest.raises(SourceUnsafeError, match=r"builtins.object"):
        load(b"\x80\x02c__builtin__\nobject\n)R.", file="it.pkl")


def test_extension_codes_are_refused_whether_a_library_registered_them_or_not() -> None:
    data = b"\x80\x02\x82\xf0X\x04\x00\x00\x00true\x85R."
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
    for data in (b"\x80\x02]" + opcode + b".", b"\x80\x02" + b"]0" * 40000 + b"]" + opcode + b"."):
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


def test_names_of_python_two_are_the_names_of_python_three() -> None:
    assert canonical("__builtin__", "xrange") == ("builtins", "range")
    assert canonical("__builtin__", "set") == ("builtins", "set")
    assert canonical("torch", "Size") == ("torch", "Size")


def test_nothing_that_acts_is_in_the_closed_set() -> None:
    for module, name in [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "__import__"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._C", "Generator"),
        ("numpy", "load"),
        ("operator", "attrgetter"),
        ("functools", "partial"),
    ]:
        assert kind_of(module, name) is None
    assert {kind for (module, _), kind in ALLOWED.items() if module == "builtins" and kind is Kind.CLASS} == set()
