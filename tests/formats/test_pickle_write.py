from __future__ import annotations

import io
import pickle
import pickletools
import random
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from fsdpckpt.errors import InternalError, SourceUnsupportedError
from fsdpckpt.formats.pickle.opcodes import StorageView, integer, integers
from fsdpckpt.formats.pickle.write import dumps
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Global, Object


def opcodes(data: bytes) -> list[tuple[str, object]]:
    """The stream without memo bookkeeping: stores left out, each fetch replaced by what was stored there."""
    out: list[tuple[str, object]] = []
    memo: dict[int, tuple[str, object]] = {}
    last: tuple[str, object] = ("", None)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = last
            continue
        last = (opcode.name, argument)
        if opcode.name in ("BINGET", "LONG_BINGET"):
            last = ("GET", memo[argument])
            if memo[argument][0] == "BINUNICODE" and str(memo[argument][1]).isdigit():
                last = memo[argument]  # a storage key: torch refers to it, here it is written again
        out.append(last)
    return out


def data_pkl(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return zipfile.ZipFile(stream).read("archive/data.pkl")


class Views:
    """Says what torch.save would: storages numbered by first use."""

    def __init__(self) -> None:
        self.known: dict[int, StorageView] = {}

    def add(self, tensor: torch.Tensor, key: str) -> Tensor:
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        shape = tuple(tensor.shape)
        placeholder = Tensor(dtype, shape, Chunks.whole(file=0, offset=0, shape=shape))
        nbytes = tensor.untyped_storage().nbytes()
        self.known[id(placeholder)] = StorageView(key, dtype, tensor.storage_offset(), shape, tensor.stride(), nbytes)
        return placeholder

    def __call__(self, tensor: Tensor) -> StorageView:
        return self.known[id(tensor)]


SCALARS = {
    "ints": [
        0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, -(2**63), 2**70, -(2**2100),
    ],
    "floats": [0.1, -0.0, float("inf"), 1e300],
    "others": [None, True, False, "", "é\u20ac", "x" * 300, b"", b"ab\xff\x00", bytearray(b"zz"), bytearray(), 1 + 2j],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (0.9, (0.95, "betas"))],
    "empty": {},
    "one": {"key": [1]},
    5: {7: "int keys", (1, "a"): "tuple keys", None: "none"},
}  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        SCALARS,
        {f"{count} items": list(range(count)) for count in (999, 1000, 1001, 2500)},  # in batches of 1000
        {"dict": {n: -n for n in range(999)}, "full": {n: n for n in range(1000)}, "more": {n: n for n in range(1001)}},
        {"ordered": OrderedDict((n, n) for n in range(1001)), "exact": OrderedDict((n, n) for n in range(1000))},
        [OrderedDict(), OrderedDict(a=1), [[]], [[1]], ({},)],
    ],
    ids=["scalars", "long lists", "long dicts", "long ordered dicts", "empties"],
)
def test_plain_values_get_the_opcodes_torch_save_gives_them(value):
    written = dumps(value)
    assert opcodes(written) == opcodes(data_pkl(value))
    assert repr(pickle.loads(written)) == repr(value)


def test_a_state_dict_gets_the_opcodes_torch_save_gives_it():
    base = torch.randn(7, 5)
    tensors = {
        "weight": base,
        "view": base[1:, 2:],
        "column": torch.randn(6, 4).t(),
        "step": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3).half(),
        "brain": torch.randn(300, 1).bfloat16(),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "wide": torch.arange(5).to(torch.uint32),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex128),
    }
    keys: dict[int, str] = {}
    views = Views()
    placeholders: OrderedDict = OrderedDict()
    real: OrderedDict = OrderedDict()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr() or -len(keys) - 1
        key = keys.setdefault(pointer, str(len(keys)))
        placeholders[name], real[name] = views.add(tensor, key), tensor
    for holder in (placeholders, real):
        holder._metadata = OrderedDict([("", {"version": 1}), ("l", {"version": 2})])
    optimizer = {
        "state": {0: {"betas": (0.9, 0.95)}},
        "param_groups": [{"params": [0, 1], "lr": 1e-3, "foreach": None}],
    }
    written = dumps({"model": placeholders, "optimizer": optimizer}, views)
    assert opcodes(written) == opcodes(data_pkl({"model": real, "optimizer": optimizer}))


def test_containers_held_twice_stay_one_object_and_equal_ones_are_not_made_one():
    betas, group = (0.9, 0.95), [1, 2]
    loaded = pickle.loads(dumps({"a": betas, "b": betas, "c": group, "d": {"e": group}, "f": [1, 2]}))
    assert loaded["a"] is loaded["b"]
    assert loaded["c"] is loaded["d"]["e"]
    assert loaded["c"] == [1, 2] == loaded["f"] and loaded["c"] is not loaded["f"]


def test_a_set_is_written_the_same_way_whatever_its_order():
    names = [f"name{n}" for n in range(40)]
    shuffled = random.Random(5).sample(names, 40)
    assert dumps({"s": set(names)}) == dumps({"s": set(shuffled)})
    assert pickle.loads(dumps({*names})) == set(names)


def test_objects_keep_their_calls_states_and_entries():
    size = Object(Global("torch", "Size"), ((3, 4),))
    counter = Object(Global("collections", "Counter"), ({"a": 2},))
    namespace = Object(Global("argparse", "Namespace"), (), new=True, state={"lr": 0.5}, has_state=True)
    fifo = Object(Global("collections", "deque"), ((), 3), items=[1, 2])
    default = Object(Global("collections", "defaultdict"), (Global("builtins", "list"),), entries=[("k", [1])])
    dtype = Global("torch", "bfloat16")
    nested = Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState")
    loaded = pickle.loads(dumps([size, counter, namespace, fifo, default, dtype, nested]))
    assert loaded[0] == torch.Size((3, 4)) and type(loaded[0]) is torch.Size
    assert loaded[1] == {"a": 2}
    assert loaded[2].lr == 0.5
    assert list(loaded[3]) == [1, 2] and loaded[3].maxlen == 3
    assert loaded[4]["k"] == [1] and loaded[4]["new"] == []
    assert loaded[5] is torch.bfloat16
    assert loaded[6] is ShardedTensor.ProcessGroupState


@pytest.mark.parametrize("name", [("os", "system"), ("builtins", "eval"), ("torch", "load")])
def test_a_name_outside_the_closed_set_is_not_written(name):
    with pytest.raises(InternalError, match=r"\.".join(name)):
        dumps({"x": [Object(Global(*name), ("true",))]})


def test_what_is_no_checkpoint_value_is_not_written():
    loop: list = [1]
    loop.append({"again": loop})
    for value, error, words in (
        ({"x": frozenset({1})}, InternalError, "frozenset"),
        (Views().add(torch.randn(2), "0"), InternalError, "no storages"),
        (loop, SourceUnsupportedError, "contains itself"),
    ):
        with pytest.raises(error, match=words):
            dumps(value)


def test_every_int_and_every_tuple_of_ints_is_written_as_pickle_writes_it():
    for value in (n + d for b in range(0, 80, 4) for n in (2**b, -(2**b)) for d in (-1, 0, 1)):
        assert b"\x80\x02" + integer(value) + b"." == pickle.dumps(value, 2)
    for length in range(6):
        values = tuple(range(250, 250 + length))
        assert pickle.loads(b"\x80\x02" + integers(values) + b".") == values
