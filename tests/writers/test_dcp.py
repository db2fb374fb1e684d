from __future__ import annotations

import io
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.writers import DtypeRule, WriteSpec
from fsdpckpt.writers.dcp import lay_out
from tests.materialise import materialise
from tests.oracle.compare import identical, require_parts
from tests.oracle.fake_group import as_rank
from tests.writers.source import Raw, Trained, checkpoint
from tests.writers.writer_contract import WriterContract

pytestmark = pytest.mark.filterwarnings("ignore")


def written(tmp_path, ckpt, raw, world_size, dtypes=None):
    target = lay_out(ckpt, WriteSpec(world_size=world_size, dtypes=dtypes or DtypeRule()))
    assert target.files[-1].path == ".metadata"
    directory = str(tmp_path / "dcp")
    materialise(target, raw.files, directory)
    return directory, target


def metadata(directory):
    with open(os.path.join(directory, ".metadata"), "rb") as stream:
        return pickle.load(stream)


def as_torch(directory, tmp_path):
    dcp_to_torch_save(directory, str(tmp_path / "joined.pt"))
    return torch.load(tmp_path / "joined.pt", weights_only=False)


def nested(weights, states, groups):
    return {"model": dict(weights), "optimizer": {"state": states, "param_groups": groups}, "epoch": 7}


@pytest.mark.parametrize("key_type", ["id", "name"])
@pytest.mark.parametrize(
    ("world_size", "source_ranks"), [(1, None), (2, None), (3, 2), (8, 3), (None, None), (None, 4)]
)
def test_torchs_own_converter_joins_every_bit(tmp_path, key_type, world_size, source_ranks):
    source = Trained(seed=5, key_type=key_type, ranks=source_ranks)
    directory, _ = written(tmp_path, source.checkpoint, source.raw, world_size)
    joined = as_torch(directory, tmp_path)
    assert joined.keys() == {"model", "optimizer", "epoch"} and joined["epoch"] == 7
    require_parts(joined["model"], source.weights)
    for key, states in source.states.items():  # torch's converter turns ids into text
        for name, state in states.items():
            assert identical(joined["optimizer"]["state"][str(key)][name], state)
    assert joined["optimizer"]["param_groups"] == source.groups


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_metadata_says_what_dcp_save_says(tmp_path, world_size):
    """Against dcp.save of the same state dict, whose DTensors torch places on each rank in turn."""
    source = Trained(seed=6, key_type="id")
    directory, _ = written(tmp_path, source.checkpoint, source.raw, world_size)
    ours = metadata(directory)
    plans = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))

            def shard(tensor, mesh=mesh):
                return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

            weights = {n: w if n == "steps_seen" else shard(w) for n, w in source.weights.items()}
            states = {
                key: {n: s if n == "step" else shard(s) for n, s in entry.items()}
                for key, entry in source.states.items()
            }
            planner = dcp.DefaultSavePlanner()
            planner.set_up_planner(nested(weights, states, source.groups), is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
            if rank == world_size - 1:
                _, theirs = planner.create_global_plan(plans)
    assert ours.planner_data == theirs.planner_data
    assert list(ours.planner_data) == list(theirs.planner_data)
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[key]
        if not hasattr(entry, "chunks"):
            assert type(mine) is type(entry)
            continue
        if hasattr(mine.properties, "strides"):  # torch 2.15 saves what it never reads
            entry.properties.strides = None
        assert (mine.properties, mine.size) == (entry.properties, entry.size)
        assert sorted(map(repr, mine.chunks)) == sorted(map(repr, entry.chunks)), key
    assert ours.version == "1.0.0"
    hints = {(index.fqn, index.offset): index.index for index in ours.storage_data}
    for key, entry in ours.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            assert [hints[key, chunk.offsets] for chunk in entry.chunks] == list(range(len(entry.chunks)))
        else:
            assert hints[key, None] is None


def test_the_pickle_names_nothing_that_an_older_torch_lacks(tmp_path):
    source = Trained(seed=1)
    directory, _ = written(tmp_path, source.checkpoint, source.raw, 2)
    names = set()

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    with open(os.path.join(directory, ".metadata"), "rb") as stream:
        Names(stream).load()
    base = "torch.distributed.checkpoint"
    classes = "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata"
    classes += " ChunkStorageMetadata _MEM_FORMAT_ENCODING"
    assert names == {
        *(f"{base}.metadata.{name}" for name in classes.split()),
        f"{base}.filesystem._StorageInfo",
        *("torch.Size", "torch.serialization._get_layout"),
        *("torch.float32", "torch.bfloat16", "torch.int64"),
    }


def test_every_item_is_an_archive_of_its_own_with_right_checksums_and_aligned_data(tmp_path):
    source = Trained(seed=2)
    directory, target = written(tmp_path, source.checkpoint, source.raw, 3)
    assert [file.path for file in target.files] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"]
    assert all(write_item.offset % 64 == 0 for file in target.files for write_item in file.write_items)
    for index, info in metadata(directory).storage_data.items():
        with open(os.path.join(directory, info.relative_path), "rb") as stream:
            stream.seek(info.offset)
            item = io.BytesIO(stream.read(info.length))
        assert zipfile.ZipFile(item).testzip() is None
        item.seek(0)
        value = torch.load(item, weights_only=True)
        if index.offset is not None and index.fqn.startswith("model."):
            whole = source.weights[index.fqn.removeprefix("model.")]
            box = tuple(slice(at, at + n) for at, n in zip(index.offset, value.shape, strict=True))
            assert identical(value, whole[box])


def test_each_rank_finds_its_rows_in_its_own_file_and_the_rest_is_where_dcp_save_puts_it(tmp_path):
    raw = Raw()
    model = {f"w{n}": raw.whole(torch.randn(10, 4), sharded=True) for n in range(3)}
    model |= {f"b{n}": raw.whole(torch.randn(5), sharded=False) for n in range(8)}
    directory, target = written(tmp_path, checkpoint(model), raw, 4)
    where: dict[str, list[str]] = {}
    for index, info in metadata(directory).storage_data.items():
        where.setdefault(index.fqn, []).append(info.relative_path)
    for n in range(3):  # rows 3, 3, 3, 1
        assert where[f"model.w{n}"] == [f"__{rank}_0.distcp" for rank in range(4)]
    nbytes = [sum(write_item.nbytes for write_item in file.write_items) for file in target.files[:-1]]
    assert sum(nbytes) == 3 * 160 + 8 * 20
    for n in range(8):  # rank 0 comes first, and is thought to have the whole of w0, w1 and w2 by then
        assert where[f"model.b{n}"] == [f"__{1 + n % 3}_0.distcp"]


def test_the_sources_chunks_are_kept_when_no_world_size_is_asked_for(tmp_path):
    raw = Raw()
    weight = torch.randn(11, 3)
    buffer = torch.randn(4)
    model = {"w": raw.sharded(weight, 3, replicas=2), "few": raw.sharded(weight[:2], 3), "b": raw.whole(buffer)}
    directory, target = written(tmp_path, checkpoint(model, world_size=6), raw, None)
    assert [file.path for file in target.files] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"]
    chunks = {
        key: [tuple(c.offsets) for c in entry.chunks] for key, entry in metadata(directory).state_dict_metadata.items()
    }
    assert chunks == {"model.w": [(0, 0), (4, 0), (8, 0)], "model.few": [(0, 0), (1, 0)], "model.b": [(0,)]}
    joined = as_torch(directory, tmp_path)["model"]
    assert identical(joined["w"], weight) and identical(joined["few"], weight[:2]) and identical(joined["b"], buffer)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "uint16", "bool", "complex128", "int8", "float64"])
def test_unusual_dtypes_scalars_and_empty_tensors_load(tmp_path, name):
    raw = Raw()
    dtype = getattr(torch, name)
    tensors = {
        "matrix": (torch.rand(5, 3) * 9).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    model = {key: raw.whole(tensor, sharded=True) for key, tensor in tensors.items()}
    directory, _ = written(tmp_path, checkpoint(model), raw, 2)
    joined = as_torch(directory, tmp_path)["model"]
    require_parts(joined, tensors)


def test_values_nest_as_dcp_nests_them_and_what_vanishes_is_noted(tmp_path):
    raw = Raw()
    tensor = torch.randn(3)
    extra = {
        "plain list": [1, "two", (3,)],
        "list with tensor": [1, raw.whole(tensor)],
        "nested lists": [[raw.whole(tensor)], [2]],
        "tuple": (raw.whole(tensor), 4),
        "dicts": [{"a": 1}, {"b": []}],
        "gone": {},
        5: "int key",
    }
    optim = Optimizer.of(
        {0: {"step": 3, "m": raw.whole(tensor), "hook": None}}, [{"params": [0], "lr": raw.whole(torch.tensor(0.5))}]
    )
    ckpt = checkpoint(optim=optim, extra=extra)
    directory, target = written(tmp_path, ckpt, raw, 2)

    real = {key: value for key, value in extra.items() if key not in ("gone", 5)}
    real |= {"list with tensor": [1, tensor], "nested lists": [[tensor], [2]], "tuple": (tensor, 4), "5": "int key"}
    real["optimizer"] = {
        "state": {0: {"step": 3, "m": tensor, "hook": None}},
        "param_groups": [{"params": [0], "lr": torch.tensor(0.5)}],
    }
    dcp.save(real, checkpoint_id=str(tmp_path / "real"), no_dist=True)
    ours, theirs = metadata(directory), metadata(str(tmp_path / "real"))
    assert ours.planner_data == theirs.planner_data
    assert {k: type(v).__name__ for k, v in ours.state_dict_metadata.items()} == {
        k: type(v).__name__ for k, v in theirs.state_dict_metadata.items()
    }
    joined, truth = as_torch(directory, tmp_path), as_torch(str(tmp_path / "real"), tmp_path)
    assert repr(dict(sorted(joined.items()))) == repr(dict(sorted(truth.items())))
    assert [(note.kind, note.key) for note in target.notes if not note.warning] == [
        ("dropped", "gone"),
        ("renamed", "5"),
    ]
    assert [note.keys for note in target.notes if note.warning] == [("5",)]
    assert target.lost == (LostDict((), (5,), ordered=False),)


def test_keys_that_become_equal_are_refused_by_name():
    ckpt = checkpoint(extra={"a": {"b": 1}, "a.b": 2, 3: "x", "3": "y"})
    with pytest.raises(SourceUnsupportedError) as caught:
        lay_out(ckpt, WriteSpec(world_size=1))
    assert caught.value.details == ("a.b", "3")


def test_casts_show_in_metadata_and_items(tmp_path):
    source = Trained(seed=3)
    rule = DtypeRule(model=DTYPES["float64"])
    directory, _ = written(tmp_path, source.checkpoint, source.raw, 2, rule)
    entry = metadata(directory).state_dict_metadata["model.emb.weight"]
    assert entry.properties.dtype == torch.float64
    joined = as_torch(directory, tmp_path)
    assert identical(joined["model"]["emb.weight"], source.weights["emb.weight"].double())
    assert joined["model"]["steps_seen"].dtype == torch.int64


def test_what_repeats_in_a_file_is_kept_in_memory_once():
    raw = Raw()

    def blob(count: int) -> int:
        model = {f"w{n}": raw.whole(torch.randn(6, 3), sharded=True) for n in range(count)}
        return len(lay_out(checkpoint(model), WriteSpec(world_size=2)).files[0].blob)

    assert blob(50) == blob(1)


class TestDcpWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (WriteSpec(world_size=1), WriteSpec(world_size=3), WriteSpec(), WriteSpec(flattened_keys=True))

    def load(self, path, spec):
        dcp_to_torch_save(path, f"{path}.pt")
        assert torch.load(f"{path}.pt", weights_only=False).keys() == {"model", "optimizer", "epoch"}
