"""What is written has the source's own names, and from DCP to DCP its keys: saved and loaded by PyTorch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fsdpckpt
from tests.oracle.compare import differences


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(nn.Linear(5, 5) for _ in range(2)))
        self.register_buffer("count", torch.tensor(seed + 7))


def trained(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    for optimizer in optimizers:
        optimizer.step()


def compiled_checkpoint(path: Path) -> Any:
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, [optimizer])
    state = {"model": torch.compile(model).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    return state


def test_a_compiled_model_loads_what_was_made_of_its_checkpoint(tmp_path: Path) -> None:
    saved = compiled_checkpoint(tmp_path / "c.pt")
    fsdpckpt.convert(tmp_path / "c.pt", tmp_path / "dcp", to="sharded", world_size=3)
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "back.pt", to="full")
    assert differences(dict(torch.load(tmp_path / "back.pt")["model"]), dict(saved["model"])) == []
    torch.compile(Model(2)).load_state_dict(torch.load(tmp_path / "back.pt")["model"])
    assert fsdpckpt.diff(tmp_path / "c.pt", tmp_path / "dcp").same


def test_an_optimizer_that_gets_names_gets_the_model_s(tmp_path: Path) -> None:
    saved = compiled_checkpoint(tmp_path / "c.pt")
    fsdpckpt.convert(tmp_path / "c.pt", tmp_path / "named.pt", to="full", key_type="name", buffers="*count")
    named = torch.load(tmp_path / "named.pt")
    names = [name for name in saved["model"] if name != "_orig_mod.count"]
    assert list(named["optimizer"]["state"]) == names == named["optimizer"]["param_groups"][0]["params"]


def test_clean_names_is_an_option(tmp_path: Path) -> None:
    compiled_checkpoint(tmp_path / "c.pt")
    report = fsdpckpt.convert(tmp_path / "c.pt", tmp_path / "clean.pt", to="full", clean_names=True)
    Model(2).load_state_dict(torch.load(tmp_path / "clean.pt")["model"])
    assert "_orig_mod.count -> count" in next(note.keys for note in report.notes if note.kind == "normalised")
    for glob in ("_orig_mod.blocks.1.*", "blocks.1.*"):
        path = tmp_path / f"{len(glob)}.pt"
        fsdpckpt.convert(tmp_path / "c.pt", path, to="full", include=glob, only="model", strip_prefix="_orig_mod.")
        assert list(torch.load(path)) == ["blocks.1.weight", "blocks.1.bias"]
    fsdpckpt.convert(tmp_path / "c.pt", tmp_path / "once.pt", to="full", add_prefix="_orig_mod.")
    torch.compile(Model(2)).load_state_dict(torch.load(tmp_path / "once.pt")["model"])


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=0.01)]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("top", [True, False])
def test_from_dcp_to_dcp_keys_and_levels_stay(tmp_path: Path, *, flat: bool, top: bool) -> None:
    """Muon and AdamW as PyTorch joins them; ``top``: the model's names at the top level."""

    def states(seed: int) -> tuple[dict[str, Any], list[torch.optim.Optimizer]]:
        model = Model(seed)
        optimizers = optimizers_of(model)
        trained(model, optimizers)
        of_model, optim = get_state_dict(model, optimizers, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        sections = {**of_model, "optim": optim} if top else {"app": {"net": of_model, "optim": optim}}
        return {**sections, "epoch": 3}, optimizers

    saved, _ = states(1)
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    fsdpckpt.convert(tmp_path / "saved", tmp_path / "for3", to="sharded", world_size=3)
    keys = [dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata for name in ("saved", "for3")]
    assert keys[0].keys() == keys[1].keys()
    filled, _ = states(2)
    filled["epoch"] = 0
    dcp.load(filled, checkpoint_id=tmp_path / "for3", no_dist=True)
    assert differences(filled, saved) == []


@pytest.mark.parametrize("named", ["compiled", "clean"])
def test_dcp_load_fills_a_compiled_model_and_a_plain_one(tmp_path: Path, named: str) -> None:
    model = Model(1)
    saved = torch.compile(model).state_dict() if named == "compiled" else model.state_dict()
    torch.save({"model": saved}, tmp_path / "c.pt")
    for target in (Model(2), torch.compile(Model(3))):
        state = target.state_dict()
        dcp.load({"model": state}, storage_reader=fsdpckpt.StorageReader(tmp_path / "c.pt"), no_dist=True)
        target.load_state_dict(state)
        assert differences(list(target.state_dict().values()), list(saved.values())) == []
    with pytest.raises(dcp.api.CheckpointException, match=r"model\._orig_mod\.more"):
        state = {"_orig_mod.more": torch.zeros(2)}
        dcp.load({"model": state}, storage_reader=fsdpckpt.StorageReader(tmp_path / "c.pt"), no_dist=True)


@pytest.mark.parametrize("options", [{"dst": "copy.pt"}, {"dst": "dcp", "to": "sharded", "world_size": 2}])
def test_ids_stay_ids_beside_an_entry_that_a_user_added_to_the_state(options: dict[str, Any], tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, [optimizer])
    state = optimizer.state_dict()
    state["state"]["custom"] = {"ema": torch.ones(2)}
    torch.save({"optimizer": state}, tmp_path / "a.pt")
    report = fsdpckpt.convert(tmp_path / "a.pt", tmp_path / options.pop("dst"), **options)
    assert [note.kind for note in report.notes if note.kind == "rekeyed"] == []
    assert fsdpckpt.inspect(tmp_path / "a.pt").key_type == "id"
    assert fsdpckpt.diff(tmp_path / "a.pt", report.target).same


def test_names_for_ids_leave_the_key_of_an_entry_that_a_user_added(tmp_path: Path) -> None:
    saved = compiled_checkpoint(tmp_path / "a.pt")
    saved["optimizer"]["state"]["custom"] = {"ema": torch.ones(2)}
    torch.save(saved, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "named.pt", to="full", key_type="name", buffers="*count")
    names = [name for name in saved["model"] if name != "_orig_mod.count"]
    assert list(torch.load(tmp_path / "named.pt")["optimizer"]["state"]) == [*names, "custom"]
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "named.pt").same


def test_a_renamed_optimizer_leaves_the_number_that_a_user_added_a_number(tmp_path: Path) -> None:
    states: dict[str | int, Any] = {"w": {"exp_avg": torch.ones(5)}, 7: {"ema": torch.ones(3)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(5)}, "optimizer": optimizer}, tmp_path / "s.pt")
    fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="full", rename={"w": "v"})
    assert list(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == ["v", 7]


def test_a_cast_of_states_in_a_list_leaves_their_copy_in_the_extras_as_it_is(tmp_path: Path) -> None:
    """SOAP keeps lists of matrices; one dict under two keys is read as the same tensors."""
    states = {"GG": [torch.ones(5, 5)], "exp_avg": torch.ones(5)}
    optimizer = {"state": {0: states}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    saved = {"model": {"w": torch.ones(5)}, "optimizer": optimizer, "best": [states]}
    torch.save(saved, tmp_path / "s.pt")
    fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="full", optim_dtype="bfloat16")
    fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "safe", container="safetensors", optim_dtype="bfloat16")
    fsdpckpt.convert(tmp_path / "safe", tmp_path / "again.pt", to="full")
    for name in ("out.pt", "again.pt"):
        written = torch.load(tmp_path / name)
        assert written["optimizer"]["state"][0]["GG"][0].dtype is torch.bfloat16
        assert differences(written["best"], saved["best"]) == []
