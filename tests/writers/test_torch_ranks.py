from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import load_with_process_group
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.options import TensorForm
from fsdpckpt.writers import DtypeRule, WriteSpec
from fsdpckpt.writers.torch_ranks import RankFiles, lay_out
from tests.materialise import materialise
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank, rows
from tests.writers.source import Raw, Trained, checkpoint
from tests.writers.writer_contract import WriterContract


def written(tmp_path, ckpt, raw, world_size, form, dtypes=None):
    target = lay_out(
        ckpt, WriteSpec(world_size=world_size, tensor=form, mesh_device="cpu", dtypes=dtypes or DtypeRule())
    )
    assert all(file.path for file in target.files)
    materialise(target, raw.files, str(tmp_path))
    for file in target.files:
        assert zipfile.ZipFile(tmp_path / file.path).testzip() is None
    return target


def load(tmp_path, section, rank, world_size, *, weights_only):
    return torch.load(tmp_path / f"{section}_world_size_{world_size}_rank_{rank}.pt", weights_only=weights_only)


def leaves(source, model, optim):
    """(what was trained, what the file holds) of every tensor."""
    for name, weight in source.weights.items():
        yield name, weight, model[name]
    for key, states in source.states.items():
        for name, state in states.items():
            yield f"{key}.{name}", state, optim["state"][key][name]


@pytest.mark.parametrize(
    ("world_size", "ranks"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (7, (0, 4, 6)), (64, (0, 5, 63))]
)
@pytest.mark.parametrize(
    ("form", "source_ranks"), [(TensorForm.DTENSOR, None), (TensorForm.DTENSOR, 3), (TensorForm.SHARDED_TENSOR, 4)]
)
def test_every_rank_holds_what_torch_would_give_it(tmp_path, world_size, ranks, form, source_ranks):
    source = Trained(seed=world_size, key_type="id", ranks=source_ranks)
    written(tmp_path, source.checkpoint, source.raw, world_size, form)
    for rank in ranks:
        with as_rank(rank, world_size):
            mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
            model, optim, extra = (
                load(tmp_path, section, rank, world_size, weights_only=form is TensorForm.DTENSOR)
                for section in ("model", "optim", "extra_state")
            )
            assert (extra, optim["param_groups"]) == ({"epoch": 7}, source.groups)
            for name, whole, held in leaves(source, model, optim):
                if name == "steps_seen" or name.endswith("step"):
                    assert type(held) is torch.Tensor and identical(held, whole)
                elif form is TensorForm.DTENSOR:
                    expected = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                    assert type(held) is DTensor
                    assert held._spec == expected._spec and hash(held._spec) == hash(expected._spec)
                    assert vars(held.device_mesh).keys() == vars(expected.device_mesh).keys()
                    assert held.device_mesh.get_local_rank() == rank
                    assert identical(held.to_local(), rows(whole, rank, world_size)), name
                    assert held.stride() == expected.stride() and not held.requires_grad
                else:
                    group = dist.group.WORLD
                    expected = _create_chunk_sharded_tensor(whole, rank, world_size, 8, group, torch.device("cpu"))
                    shards, *described = held.__getstate__()
                    true_shards, *true = expected.__getstate__()
                    assert described == true
                    for shard, true_shard in zip(shards, true_shards, strict=True):
                        assert identical(shard.tensor, true_shard.tensor) and shard.metadata == true_shard.metadata


def test_tied_shards_share_one_record(tmp_path):
    raw = Raw()
    a, b = raw.views(weight := torch.randn(6, 4), weight)
    model = {name: type(t)(t.dtype, t.shape, t.chunks, sharded=True) for name, t in (("emb", a), ("head", b))}
    target = written(tmp_path, checkpoint(model), raw, 4, TensorForm.DTENSOR)
    assert [len(file.write_items) for file in target.files] == [1, 1, 1, 0]
    with as_rank(1, 4):
        loaded = load(tmp_path, "model", 1, 4, weights_only=True)
        emb, head = loaded["emb"].to_local(), loaded["head"].to_local()
        assert identical(emb, weight[2:4]) and emb.data_ptr() == head.data_ptr()


def test_each_rank_gets_the_extras_of_its_source_rank(tmp_path):
    raw = Raw()
    states = [torch.randint(1, 255, (5,), dtype=torch.uint8) for _ in range(2)]
    rank_extra = tuple({"rng": {"cpu": raw.whole(state)}} for state in states)
    ckpt = checkpoint(extra={"epoch": 4}, rank_extra=rank_extra, world_size=2)
    target = written(tmp_path, ckpt, raw, 3, TensorForm.DTENSOR)
    for rank in range(3):
        extra = load(tmp_path, "extra_state", rank, 3, weights_only=True)
        assert extra["epoch"] == 4 and identical(extra["rng"]["cpu"], states[rank % 2])
    assert [note.kind for note in target.notes] == ["inferred", "inferred"]
    assert [
        note.kind for note in lay_out(ckpt, WriteSpec(world_size=1, tensor=TensorForm.DTENSOR, mesh_device="cpu")).notes
    ] == ["inferred", "dropped"]


def test_shards_are_cast_like_whole_tensors(tmp_path):
    source = Trained(seed=8)
    rule = DtypeRule(model=DTYPES["float16"])
    written(tmp_path, source.checkpoint, source.raw, 2, TensorForm.DTENSOR, dtypes=rule)
    with as_rank(1, 2):
        loaded = load(tmp_path, "model", 1, 2, weights_only=True)
        held = loaded["emb.weight"]
        assert held.dtype == held._spec.tensor_meta.dtype == torch.float16
        assert identical(held.to_local(), source.weights["emb.weight"][9:].half())


@pytest.mark.parametrize("form", [TensorForm.DTENSOR, TensorForm.SHARDED_TENSOR])
def test_a_rank_file_does_not_grow_with_the_world(form):
    def nbytes(world_size: int) -> int:
        raw = Raw()
        model = {f"w{number}": raw.whole(torch.ones(128, 2), sharded=True) for number in range(50)}
        target = lay_out(checkpoint(model), WriteSpec(world_size=world_size, tensor=form, mesh_device="cpu"))
        return len(target.files[0].blob)

    assert nbytes(64) < nbytes(2) * 1.25


@pytest.mark.parametrize("version", ["2.4", "2.8", "2.10", "2.13"])
def test_a_file_made_of_another_ranks_is_the_one_laid_out_from_scratch(monkeypatch, version):
    raw = Raw()
    shapes = {"even": (600, 2), "uneven": (513, 3), "few": (7,), "none": (0, 4)}
    model = {name: raw.whole(torch.randn(shape), sharded=True) for name, shape in shapes.items()}
    model |= {"whole": raw.whole(torch.randn(5)), "again": raw.whole(torch.randn(600, 2), sharded=True)}
    spec = WriteSpec(world_size=300, mesh_device="cpu", torch_version=version)

    def contents():
        files = lay_out(checkpoint(model), spec).files
        built = [file.built() for file in files]
        rows = [(f.path, f.nbytes, bytes(f.blob), f.literals, f.write_items, f.checksums) for f in built]
        return rows, sum(file.build is not None for file in files)

    rows, count = contents()
    assert count > 280
    monkeypatch.setattr(
        RankFiles,
        "of_value",
        lambda self, value, paths: self.of_values(dict.fromkeys(range(len(paths)), value), paths),
    )
    assert contents() == (rows, 0)


@pytest.mark.parametrize("form", [TensorForm.DTENSOR, TensorForm.SHARDED_TENSOR])
def test_more_ranks_than_the_memory_has_room_for_are_refused_after_the_first_file(monkeypatch, form):
    source = Trained(seed=3, key_type="id")
    most = sum(
        len(file.blob)
        for file in lay_out(source.checkpoint, WriteSpec(world_size=9, tensor=form, mesh_device="cpu")).files
    )
    monkeypatch.setattr("fsdpckpt.writers.torch_ranks.memory_bytes", lambda: most)
    lay_out(source.checkpoint, WriteSpec(world_size=9, tensor=form, mesh_device="cpu"))
    with pytest.raises(UsageError, match="world_size=5000 ") as error:
        lay_out(source.checkpoint, WriteSpec(world_size=5000, tensor=form, mesh_device="cpu"))
    assert "--container dcp" in error.value.next_step


class TestTorchRanksWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (
        WriteSpec(world_size=1, tensor=TensorForm.DTENSOR, mesh_device="cpu"),
        WriteSpec(world_size=3, tensor=TensorForm.DTENSOR, mesh_device="cpu"),
        WriteSpec(world_size=3, tensor=TensorForm.SHARDED_TENSOR),
    )

    def load(self, path, spec):
        plain = spec.tensor is TensorForm.DTENSOR
        for rank in range(spec.world_size):
            with as_rank(rank, spec.world_size), load_with_process_group(dist.group.WORLD):
                loaded = load(Path(path), "model", rank, spec.world_size, weights_only=plain)
                assert loaded.keys() == {*Trained.SHAPES, "steps_seen"}


@pytest.mark.parametrize("form", ["dtensor", "sharded-tensor"])
def test_the_ranks_of_a_model_of_many_tensors_are_read_back(tmp_path, form):
    """All its tensors refer to one mesh, or to one process group and one sharding specification."""
    torch.save(
        {"model": {f"layers.{number}.weight": torch.zeros(4, 2) for number in range(1500)}}, tmp_path / "full.pt"
    )
    ranks = {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ["none"], "tensor": form}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "ranks", **ranks)
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "ranks").same
