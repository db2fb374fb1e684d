"""One torch file: real FSDP1 full state dicts of old versions, and what a single file cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.errors import SourceIncompleteError, SourceUnsafeError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.torch_ranks.read import read_torch_file
from fsdpckpt.storage.sources import Sources
from tests.readers.contents import held

GOLDEN = Path(__file__).parent.parent / "golden"


def read(path: Path | str) -> tuple[PartContents, Any]:
    """The tree, and its root with every tensor as its bytes."""
    files = FileTable()
    with Sources() as sources:
        tree = read_torch_file(str(path), files, sources)
    return tree, held(tree.root, files.files())


@pytest.mark.parametrize("folder", ["torch-2.1/f1_flat_full", "torch-2.4/f1_orig_full"])
def test_full_state_dicts_of_fsdp1(folder: str) -> None:
    truth = torch.load(GOLDEN / folder / "truth" / "full.pt", weights_only=True)
    tree, found = read(GOLDEN / folder / "model.pt")
    assert (tree.layout, tree.container, tree.world_size) == (Layout.FULL, Container.TORCH, 1)
    model = found.get("model", found)
    assert model == held(dict(truth["model"]), ())
    assert read(GOLDEN / folder / "optim.pt")[1] == held(truth["optim"], ())
    root = tree.root.get("model", tree.root)  # type: ignore[union-attr]
    assert {name for name, tensor in root.items() if tensor.sharded is False} == {"buf"}  # type: ignore[union-attr]
    assert all(tensor.sharded for name, tensor in root.items() if name != "buf")  # type: ignore[union-attr]


def test_integer_ids_stay_integers() -> None:
    path = GOLDEN / "torch-2.1/f1_flat_full/full_old_rekeyed_ids.pt"
    truth = torch.load(path, weights_only=True)
    tree, found = read(path)
    assert found == held(truth, ())
    assert all(type(key) is int for key in tree.root["state"])  # type: ignore[index,call-overload]


def test_one_rank_of_several_is_incomplete_and_the_others_are_named(tmp_path: Path) -> None:
    for name in ("torch-2.1/f1_flat_sh_st/model_1.pt", "torch-2.4/f1_hyb_sh_dt/optim_1.pt"):
        with pytest.raises(SourceIncompleteError) as error:
            read(GOLDEN / name)
        missing = "1 of 2 ranks is missing: 0" if "2.1" in name else "3 of 4 ranks are missing: 0, 2, 3"
        assert error.value.what == f"{GOLDEN / name}: {missing}"
        assert error.value.exit_code == 3


def test_keys_of_flat_parameters_are_flattened(tmp_path: Path) -> None:
    path = tmp_path / "local.pt"
    torch.save({"l.0._flat_param": torch.rand(9), "buf": torch.rand(2)}, path)
    tree, _ = read(path)
    assert tree.layout is Layout.FLATTENED
    assert tree.problems == []
    assert any("l.0._flat_param" in str(line) for line in tree.evidence)


def test_a_flat_optimizer_of_one_dimensional_parameters_in_one_file_is_full(tmp_path: Path) -> None:
    path = tmp_path / "optim.pt"
    model = torch.nn.LayerNorm(5)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 5)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), path)
    tree, found = read(path)
    assert (tree.layout, tree.problems) == (Layout.FULL, [])
    assert found == held(optimizer.state_dict(), ())


def test_checksums_and_dropped_attributes_are_in_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tensor = torch.rand(3)
    tensor.colour = "red"  # type: ignore[attr-defined]
    torch.save({"w": tensor}, path)
    tree, _ = read(path)
    assert [note.kind for note in tree.notes] == ["dropped"]
    assert "colour" in tree.notes[0].message
    assert tree.checksums.nbytes.tolist().count(12) == 1


def test_refusals_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"a": torch.eye(2).to_sparse()}, path)
    with pytest.raises(SourceUnsupportedError) as unsupported:
        read(path)
    assert (unsupported.value.file, unsupported.value.key) == (str(path), "a")
    torch.save({"a": torch.Generator()}, path)
    with pytest.raises(SourceUnsafeError) as unsafe:
        read(path)
    assert unsafe.value.file == str(path)


def test_a_single_rank_of_a_world_of_one_is_whole(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.readers.played_ranks import as_rank

    whole = torch.rand(5, 3)
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}, tmp_path / "m.pt")
    tree, found = read(tmp_path / "m.pt")
    assert (tree.layout, tree.world_size) == (Layout.SHARDED, 1)
    assert found == held({"w": whole}, ())
    assert isinstance(tree.root["w"], Tensor)  # type: ignore[index,call-overload]


def test_keys_of_a_table_may_be_tuples(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5.0), "table": {("a", 1): torch.ones(3), ("b", (2, None)): 4}}, tmp_path / "m.pt")
    with Sources() as sources:
        root = read_torch_file(str(tmp_path / "m.pt"), FileTable(), sources).root
    assert isinstance(root, dict) and isinstance(root["table"], dict)
    assert list(root["table"]) == [("a", 1), ("b", (2, None))] and root["table"]["b", (2, None)] == 4


class Quantized(torch.Tensor):
    """A tensor of a library's own class around another one, as torchao keeps 8-bit states."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    __torch_dispatch__ = classmethod(lambda cls, function, *_: NotImplemented)


def test_a_tensor_of_a_class_that_is_not_pytorch_s_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save({"w": Quantized(torch.zeros(4, dtype=torch.uint8))}, tmp_path / "c.pt")
    with pytest.raises(SourceUnsafeError) as error:
        read(tmp_path / "c.pt")
    assert error.value.details == ("tests.readers.test_torch_file.Quantized",)
