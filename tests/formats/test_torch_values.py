"""Tensors of real ``torch.save`` archives: where they lie, what they are, and what is refused by name."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata

from fsdpckpt.errors import (
    FsdpckptError,
    SourceCorruptError,
    SourceUnrecognisedError,
    SourceUnsafeError,
    SourceUnsupportedError,
)
from fsdpckpt.formats.pickle import StubInstance, arguments_of, instance_class
from fsdpckpt.formats.torch import load_torch
from fsdpckpt.formats.torch.distributed import Cut, DistributedParser
from fsdpckpt.formats.torch.mesh import MAX_RANKS, Mesh, MeshParser
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.placements import Shard
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Global, Object
from fsdpckpt.storage.local import MemoryFile
from tests.formats.torch_saves import any_values, loaded, rewritten, same, saved


def saveable(name: str) -> bool:
    """Whether this torch has the type and can save it (it cannot save types of less than a byte)."""
    try:
        saved(any_values((3,), getattr(torch, name)))
    except (AttributeError, KeyError, RuntimeError, NotImplementedError):
        return False
    return True


SAVEABLE = [name for name in DTYPES if saveable(name)]


def test_every_dtype() -> None:
    assert len(SAVEABLE) >= 25
    for name in SAVEABLE:
        dtype = getattr(torch, name)
        value = {"whole": any_values((3, 5), dtype), "one": any_values((), dtype), "none": any_values((0, 4), dtype)}
        assert same(value)["whole"].dtype is DTYPES[name]


def test_views_and_strides_are_read_through_their_storage() -> None:
    base = any_values((7, 11), torch.float32)
    found = same(
        {
            "base": base,
            "slice": base[2:5, 3:],
            "steps": base[::3, ::2],
            "transposed": base.t(),
            "row": base[4],
            "element": base[2, 3],
            "repeated": any_values((1, 5), torch.int16).expand(4, 5),
            "channels_last": any_values((2, 3, 5, 7), torch.bfloat16).to(memory_format=torch.channels_last),
            "windows": any_values((20,), torch.int8).as_strided((5, 4), (3, 1), 2),
        }
    )
    assert found["transposed"].chunks.stride.tolist() == [[1, 11]]
    assert found["slice"].chunks.offset[0] == found["base"].chunks.offset[0] + 4 * (2 * 11 + 3)


def test_tied_tensors_lie_in_one_place_and_one_that_is_smaller_than_its_storage_reads_only_itself() -> None:
    shared, padded = any_values((4, 3), torch.float16), any_values((81,), torch.float32)
    held = {"wte": shared, "lm_head": shared, "view": shared.view(3, 4), "other": shared.clone()}
    found = same({**held, "shard": padded[:72].view(8, 9)})
    places = {name: int(tensor.chunks.offset[0]) for name, tensor in found.items()}
    assert places["wte"] == places["lm_head"] == places["view"] != places["other"]
    assert found["shard"].nbytes == 72 * 4


def test_nesting_keys_and_other_values_survive() -> None:
    model = OrderedDict(a=any_values((3,), torch.float32))
    model._metadata = OrderedDict([("", {"version": 2})])  # type: ignore[attr-defined]
    value: dict[Any, Any] = {
        "model": model,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": any_values((2, 2), torch.float64), "factored": None}},
            "param_groups": [{"lr": torch.tensor(1e-3), "betas": (0.9, 0.95), "params": [0], "foreach": None}],
        },
        7: (any_values((2,), torch.int32), "text", [any_values((1,), torch.bool)]),
        "rng": np.random.get_state(),
        "size": torch.Size([3]),
    }
    data = saved(value)
    found = loaded(data)
    assert list(found) == ["model", "optimizer", 7, "rng", "size"]
    assert vars(found["model"]) == {"_metadata": {"": {"version": 2}}}
    assert list(found["optimizer"]["state"]) == [0]
    group = found["optimizer"]["param_groups"][0]
    assert (group["betas"], group["params"], group["foreach"]) == ((0.9, 0.95), [0], None)
    assert isinstance(group["lr"], Tensor)
    assert isinstance(found[7], tuple)
    assert isinstance(found[7][2][0], Tensor)
    assert isinstance(found["rng"][1], Object)
    assert found["size"] == Object(Global("torch", "Size"), ((3,),))
    same({key: part for key, part in value.items() if key in ("optimizer", 7)})
    same(any_values((3, 2), torch.float32))
    same([any_values((3, 2), torch.float32), {"a": any_values((1,), torch.uint8)}])


def test_a_part_of_a_sharded_tensor_that_stands_alone_is_an_object_as_it_was_made() -> None:
    found = loaded(saved({"part": ShardMetadata([0], [3], "rank:0/cpu")}))["part"]
    assert found.function == Global("torch.distributed._shard.metadata", "ShardMetadata")
    assert (found.new, found.has_state, found.state["shard_sizes"]) == (True, True, [3])


def test_parameters_and_the_clone_mark_of_fsdp1_tell_what_is_sharded_from_buffers() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.extra = "attribute"  # type: ignore[attr-defined]
    model = {name: any_values((2, 3), torch.float32, seed) for seed, name in enumerate("abc")}
    for name in "ab":
        model[name]._has_been_cloned = True  # type: ignore[attr-defined]
    buffer = nn.Buffer(any_values((2,), torch.float32))
    plain = {"w": layer.weight, "b": layer.bias, "plain": layer.bias.detach(), "step": torch.tensor(1.0), "buf": buffer}
    found = loaded(saved({"of module": plain, "model": model, "other": {"x": any_values((2,), torch.float32)}}))
    sharded = {key: {name: tensor.sharded for name, tensor in held.items()} for key, held in found.items()}
    assert sharded == {
        "of module": {"w": True, "b": True, "plain": None, "step": False, "buf": False},
        "model": {"a": True, "b": True, "c": False},
        "other": {"x": None},
    }
    assert found["of module"]["w"].shape == (2, 3)


REFUSED = {
    "conj": lambda: any_values((3,), torch.complex64).conj(),
    "neg": lambda: any_values((3,), torch.complex64).conj().imag,
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
    "storage": lambda: torch.rand(3).untyped_storage(),
}


def test_values_that_are_no_strided_tensors_are_all_refused_by_key() -> None:
    value = {"model": {name: make() for name, make in REFUSED.items()}, "fine": torch.rand(2)}
    with pytest.raises(SourceUnsupportedError) as error:
        loaded(saved(value))
    assert [line.partition(":")[0] for line in error.value.details] == [f"model.{name}" for name in REFUSED]
    text = str(error.value)
    for word in ("sparse", "quantized", "nested", "meta", "resolve_conj", "storage"):
        assert word in text


def test_a_tensor_inside_an_object_is_refused_and_in_a_defaultdict_read() -> None:
    held = defaultdict(dict, w=any_values((2,), torch.float32))
    found = loaded(saved({"d": held}))
    assert isinstance(found["d"]["w"], Tensor)
    with pytest.raises(SourceUnsupportedError, match=r"inside a argparse.Namespace"):
        loaded(saved({"n": argparse.Namespace(w=any_values((2,), torch.float32))}))


IN_SETS = {
    "set": lambda tensor: {tensor},
    "tuple": lambda tensor: {(1, (tensor,))},
    "frozenset": lambda tensor: frozenset([tensor]),
    "both": lambda tensor: {frozenset([tensor])},
}


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_tensor_inside_a_set_is_refused_by_key(protocol: int) -> None:
    value = {"model": {name: make(torch.rand(2)) for name, make in IN_SETS.items()}}
    with pytest.raises(SourceUnsupportedError, match="a tensor inside a set") as error:
        loaded(saved(value, pickle_protocol=protocol))
    assert [line.split(":")[0].split(".")[1] for line in error.value.details] == list(IN_SETS)


IN_KEYS = {
    "tensor": (lambda: torch.rand(2), "a tensor in a key"),
    "tuple": (lambda: (1, (torch.rand(2),)), "a tensor in a key"),
    "object": (lambda: frozenset([torch.rand(2)]), "inside a builtins.frozenset"),
}


def test_a_tensor_in_a_key_is_refused() -> None:
    value = {"model": {name: {make(): 1} for name, (make, _) in IN_KEYS.items()}}
    with pytest.raises(SourceUnsupportedError) as error:
        loaded(saved(value))
    for (name, (_, what)), line in zip(IN_KEYS.items(), error.value.details, strict=True):
        assert line.startswith(f"model.{name}") and what in line
    with pytest.raises(SourceUnsupportedError, match="it: a frozenset in a key"):
        loaded(saved({"it": {(1, frozenset([2])): 1}}, pickle_protocol=4))


@pytest.mark.parametrize("protocol", [2, 4])
def test_sets_are_read_with_what_is_in_them(protocol: int) -> None:
    shared = {1, "a", (2, torch.float32)}
    found = loaded(saved({"a": shared, "b": [shared], "c": {frozenset([3, 4])}}, pickle_protocol=protocol))
    assert found["a"] == {1, "a", (2, Global("torch", "float32"))} and found["b"][0] is found["a"]
    assert found["c"] == {Object(Global("builtins", "frozenset"), ([3, 4],))}


def test_checksum_rows_cover_every_record_and_there_are_none_without_checksums() -> None:
    data = saved({"a": any_values((300,), torch.float32), "b": torch.empty(0)})
    rows = load_torch(MemoryFile(data), 5)[1]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted((nbytes, crc) for _, _, nbytes, crc in rows) == sorted(
            (info.file_size, info.CRC) for info in archive.infolist()
        )
    assert {row[0] for row in rows} == {5}
    torch.serialization.set_crc32_options(False)
    try:
        data = saved({"a": any_values((30,), torch.float32)})
    finally:
        torch.serialization.set_crc32_options(True)
    value, rows, _ = load_torch(MemoryFile(data), 0)
    assert rows == []
    assert value["a"].shape == (30,)  # type: ignore[index,call-overload,union-attr]


def test_a_file_that_another_zip_writer_wrote_is_read() -> None:
    value = {"a": any_values((3, 9), torch.float32), "b": any_values((2,), torch.int64)}
    data = rewritten(saved(value), {".format_version": None, "byteorder": None})
    value2 = load_torch(MemoryFile(data), 0)[0]
    offset = int(value2["a"].chunks.offset[0])  # type: ignore[index,call-overload,union-attr]
    assert data[offset : offset + 108] == value["a"].numpy().tobytes()


def pickled_tensor(size: bytes, stride: bytes, offset: bytes = b"K\x00", numel: bytes = b"K\x04") -> bytes:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + numel + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89" + hooks + b"tR."


ONE, THIRTY = saved({"a": any_values((4,), torch.float32)}), saved({"a": any_values((30,), torch.float32)})
FITS = pickled_tensor(b"K\x04\x85", b"K\x01\x85")
UNFIT = {
    "more elements than the storage": pickled_tensor(b"K\x05\x85", b"K\x01\x85"),
    "strides that leave it": pickled_tensor(b"K\x04\x85", b"K\x02\x85"),
    "an offset that leaves it": pickled_tensor(b"K\x04\x85", b"K\x01\x85", offset=b"K\x01"),
    "a negative stride": pickled_tensor(b"K\x04\x85", b"J\xff\xff\xff\xff\x85"),
    "a negative size": pickled_tensor(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
    "a negative offset": pickled_tensor(b"K\x04\x85", b"K\x01\x85", offset=b"J\xff\xff\xff\xff"),
    "two strides": pickled_tensor(b"K\x04\x85", b"K\x01K\x01\x86"),
    "a size that is a text": pickled_tensor(b"X\x01\x00\x00\x004\x85", b"K\x01\x85"),
    "a storage of 2**31 elements": pickled_tensor(b"K\x04\x85", b"K\x01\x85", numel=b"J\xff\xff\xff\x7f"),
    "a storage of -1": pickled_tensor(b"K\x04\x85", b"K\x01\x85", numel=b"J\xff\xff\xff\xff"),
    "no size": pickled_tensor(b"N", b"K\x01\x85"),
    "BUILD on a tensor": FITS[:-1] + b"}X\x06\x00\x00\x00offsetK\x00sb.",
    "BUILD on a tensor, with slots": FITS[:-1] + b"N}X\x06\x00\x00\x00offsetK\x00s\x86b.",
}


def itself() -> bytes:
    loop: list[Any] = [any_values((1,), torch.float32)]
    loop.append((loop,))
    return saved(loop)


def too_deep() -> bytes:
    deep: Any = 1
    for _ in range(300):
        deep = (deep,)
    pickled = pickle.dumps([deep, [[]]], protocol=2).replace(b"K\x01", b"]", 1)
    return rewritten(ONE, {"data.pkl": pickled})


def of_numpy() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3))
    return stream.getvalue()


def torch_script() -> bytes:
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), stream)
    return stream.getvalue()


# fmt: off
NOT_READ: dict[str, tuple[Callable[[], bytes], type[FsdpckptError], str | None]] = {
    **{name: (partial(rewritten, ONE, {"data.pkl": pickled}), SourceCorruptError, None)
       for name, pickled in UNFIT.items()},
    "a value that contains itself": (itself, SourceCorruptError, "contains itself"),
    "values in values without end": (too_deep, SourceCorruptError, "deep"),
    "a record that is missing": (
        lambda: rewritten(THIRTY, {"data/0": None}), SourceCorruptError, "data/0 is missing"),
    "a record that is short": (
        lambda: rewritten(THIRTY, {"data/0": b"x" * 119}), SourceCorruptError, "(?s)too short.*120 bytes.*119 bytes"),
    "a big-endian file": (lambda: rewritten(ONE, {"byteorder": b"big"}), SourceUnsupportedError, "big-endian"),
    "unknown types, before anything else": (
        lambda: saved({"g": torch.Generator(), "c": any_values((3,), torch.complex64).conj()}), SourceUnsafeError,
        r"torch._C.Generator"),
    "an archive of numpy": (of_numpy, SourceUnrecognisedError, r"data.pkl"),
    "TorchScript": (torch_script, SourceUnrecognisedError, "TorchScript"),
}
# fmt: on


@pytest.mark.parametrize("name", NOT_READ)
def test_what_torch_did_not_save_so_is_refused(name: str) -> None:
    make, error, words = NOT_READ[name]
    with pytest.raises(error, match=words):
        loaded(make())
    assert loaded(rewritten(ONE, {"data.pkl": FITS})).shape == (4,)


def stub(**attributes: Any) -> StubInstance:
    made = StubInstance()
    vars(made).update(attributes)
    return made


RANKS = np.arange(6, dtype=np.int32)


def mesh_of(**attributes: Any) -> Mesh:
    return MeshParser(MemoryFile(RANKS.tobytes())).mesh(stub(**attributes), "w")


@pytest.mark.parametrize(
    "layout",
    [
        stub(axes=(stub(shape=(2,), stride=(3,)), stub(shape=(3,), stride=(1,)))),  # torch 2.13
        stub(shape=(2, 3), stride=(3, 1)),
        instance_class("torch.distributed._mesh_layout", "_MeshLayout")((2, 3), (3, 1)),
    ],
)
def test_layouts_of_every_version_say_the_same_mesh(layout: StubInstance) -> None:
    mesh = mesh_of(
        _layout=layout,
        _flatten_rank_map=tuple(range(6)),
        _coordinate_on_dim=[1, 0],
        _device_type="cuda",
        _mesh_dim_names=("dp", "tp"),
    )
    assert mesh == Mesh((2, 3), tuple(range(6)), (1, 0), 3, tuple(range(6)), "cuda", ("dp", "tp"), nesting=(0, 1))


def test_what_a_class_is_made_with_is_none_of_its_attributes() -> None:
    layout = instance_class("torch.distributed._mesh_layout", "_MeshLayout")((2, 3), (3, 1))
    assert (arguments_of(layout), vars(layout)) == (((2, 3), (3, 1)), {})
    assert arguments_of(stub(arguments=(1, 2))) == () == arguments_of((1, 2)), (
        "an attribute of that name is another thing"
    )


@pytest.mark.parametrize(
    ("layout", "rank_map", "ranks", "nesting"),
    [
        ({"shape": (2, 2), "stride": (1, 2)}, (0, 1, 2, 3), (0, 2, 1, 3), (1, 0)),
        ({"shape": (2, 1, 2), "stride": (1, 0, 2)}, (0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0)),
        ({"shape": (2, 2), "stride": (2, 1)}, (3, 1, 2, 0), (3, 1, 2, 0), None),
    ],
)
def test_a_mesh_whose_ranks_are_not_in_order_says_in_which_they_are(
    layout: dict[str, Any], rank_map: tuple[int, ...], ranks: tuple[int, ...], nesting: tuple[int, ...] | None
) -> None:
    coordinate = [1, *[0] * (len(layout["shape"]) - 1)]
    mesh = mesh_of(_layout=stub(**layout), _flatten_rank_map=rank_map, _coordinate_on_dim=coordinate)
    assert (mesh.ranks, mesh.names, mesh.device, mesh.nesting) == (ranks, None, "", nesting)


def test_the_ranks_of_a_job_are_a_tensor_too() -> None:
    stored = {"_rank_map": StoredTensor(DTYPES["int32"], (6,), (1,), 0), "_coordinate_on_dim": [1, 2]}
    of_job = {"_layout": stub(shape=(2, 3), stride=(3, 1)), **stored}
    for more in ({}, {"_flatten_rank_map": tuple(range(6))}):
        mesh = mesh_of(**of_job, **more)
        assert (mesh.ranks, mesh.world, mesh.rank) == (tuple(range(6)), tuple(range(6)), 5)
    with pytest.raises(SourceCorruptError, match="two rank maps"):
        mesh_of(**of_job, _flatten_rank_map=(0, 1, 2, 4, 3, 5))
    alone = mesh_of(mesh=StoredTensor(DTYPES["int32"], (1,), (1,), 0), _coordinate_on_dim=[0])  # up to torch 2.9
    assert (alone.shape, alone.ranks, alone.rank) == ((1,), (0,), 0)


@pytest.mark.parametrize(("stride", "what"), [((3,), "a coordinate outside its mesh"), (3, "an unknown mesh layout")])
def test_a_layout_with_more_sizes_than_strides_is_refused(stride: Any, what: str) -> None:
    layout = stub(shape=(2, 3), stride=stride)
    with pytest.raises(SourceCorruptError, match=f"w: {what}"):
        mesh_of(_layout=layout, _flatten_rank_map=tuple(range(6)), _coordinate_on_dim=[1, 0])


def test_a_layout_of_one_dimension_is_a_number() -> None:
    """A mesh cut from another, as torch 2.10 has it."""
    layout = stub(shape=3, stride=2)
    mesh = mesh_of(_layout=layout, _flatten_rank_map=tuple(range(6)), _coordinate_on_dim=[1], _rank=3)
    assert (mesh.shape, mesh.ranks, mesh.world) == ((3,), (1, 3, 5), tuple(range(6)))


@pytest.mark.parametrize("size", [0, MAX_RANKS + 1])
@pytest.mark.parametrize("form", ["tensor", "layout"])
def test_a_mesh_of_no_ranks_or_of_more_than_any_job_has_is_refused(size: int, form: str) -> None:
    attributes: dict[str, Any] = {"_layout": stub(shape=(size,), stride=(0,)), "_flatten_rank_map": (0,)}
    if form == "tensor":
        attributes = {"mesh": StoredTensor(DTYPES["int32"], (size,), (0,), 0)}
    with pytest.raises(SourceCorruptError, match="w: an impossible mesh"):
        mesh_of(**attributes)


def test_meshes_of_one_shape_in_another_order_have_no_sharding() -> None:
    parser = DistributedParser(MemoryFile(b"", "rank0.pt"))
    local = StoredTensor(DTYPES["float32"], (2,), (1,), 0)
    cuts = [
        Cut((4,), Mesh((2,), ranks, (0,), 0, (0, 1, 2), "cpu", None, nesting), placements, None, local)
        for placements in [(Shard(0),)]
        for ranks, nesting in [((0, 1), (0,)), ((2, 1), None)]
    ]
    assert [parser.boxes_of(cut, "w")[2] is None for cut in cuts] == [False, True]
