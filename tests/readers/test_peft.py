"""Adapters trained with FSDP: the model is saved without the name of the adapter, the optimizer with it, and PEFT's own
export lies beside them.

The keys follow ``peft.utils.save_and_load.get_peft_model_state_dict``, which accelerate's ``save_fsdp_model`` calls
for the model, and ``torch.distributed.checkpoint.state_dict``, which names the optimizer's states as the live model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.adapters import without_adapter
from tests.oracle.compare import identical
from tests.readers.contents import held, opened

BASE = "base_model.model.model"
LIVE = {  # of the live model: shapes by name
    f"{BASE}.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 16),
    f"{BASE}.layers.0.self_attn.q_proj.lora_B.default.weight": (16, 4),
    f"{BASE}.layers.10.mlp.up_proj.lora_A.default.weight": (4, 16),
    f"{BASE}.layers.10.mlp.up_proj.lora_B.default.weight": (20, 4),
    f"{BASE}.embed_tokens.lora_embedding_A.default": (4, 31),
    f"{BASE}.score.modules_to_save.default.weight": (3, 16),
}


def saved(name: str, adapter: str = "default") -> str:
    """What PEFT saves the parameter ``name`` of the live model as."""
    return name.replace("modules_to_save.", "").replace(f".{adapter}", "")


MODEL = {saved(name): torch.randn(shape) for name, shape in LIVE.items()}
OPTIM: dict[str, Any] = {
    "state": {name: {"step": torch.tensor(2.0), "exp_avg": torch.randn(shape)} for name, shape in LIVE.items()},
    "param_groups": [{"lr": 0.1, "params": list(LIVE)}],
}


def trainer(path: Path, form: str) -> Path:
    """A checkpoint of the Trainer with FSDP2 and ``fsdp_config={"state_dict_type": form}``."""
    path.mkdir()
    if form == "SHARDED_STATE_DICT":
        dcp.save({"model": MODEL}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": OPTIM}, checkpoint_id=path / "optimizer_0", no_dist=True)
    else:
        torch.save(MODEL, path / "pytorch_model_fsdp.bin")
        torch.save(OPTIM, path / "optimizer.bin")
        save_file({name: tensor.half() for name, tensor in MODEL.items()}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
    torch.save({"last_epoch": 2}, path / "scheduler.pt")
    (path / "trainer_state.json").write_text("{}")
    return path


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_adapters_of_the_trainer_are_converted_and_keep_both_names(form: str, tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-2", form)
    found = opened(source)
    assert found.flavor == "trainer" and found.problems == ()
    assert not [note for note in found.notes if note.kind == "unmatched"]
    assert fsdpckpt.verify(source).whole
    for options in ({"world_size": 3}, {"to": "sharded", "container": "dcp", "world_size": 2, "clean_names": True}):
        target = tmp_path / f"on-{options['world_size']}"
        fsdpckpt.convert(source, target, verify="full", **options)  # type: ignore[arg-type]
        again = opened(target)
        assert again.model is not None and again.optim is not None
        assert held(again.model.params, again.files) == held(MODEL, ()), "as get_peft_model_state_dict names them"
        assert held(again.optim.state, again.files) == held(OPTIM["state"], ()), "as the live model names them"
        assert again.optim.param_groups == OPTIM["param_groups"]
    fsdpckpt.convert(source, tmp_path / "adapter.safetensors", only="model")
    assert fsdpckpt.verify(tmp_path / "adapter.safetensors").whole


def test_states_are_those_of_the_parameters_without_the_adapters_name(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-2", "SHARDED_STATE_DICT")
    fsdpckpt.convert(source, tmp_path / "ids.pt", key_type="id", flavor="plain", to="full", container="torch")
    by_id = torch.load(tmp_path / "ids.pt")["optimizer"]
    for number, name in enumerate(LIVE):
        assert identical(by_id["state"][number]["exp_avg"], OPTIM["state"][name]["exp_avg"])
    only = tmp_path / "only.pt"
    fsdpckpt.convert(source, only, include=["*.score.*"], flavor="plain", to="full", container="torch")
    chosen = torch.load(only)
    assert list(chosen["model"]) == [f"{BASE}.score.weight"] and len(chosen["optimizer"]["state"]) == 1
    wrong = {**OPTIM, "state": {name: {"exp_avg": torch.randn(5, 7)} for name in LIVE}}
    torch.save({"model": MODEL, "optimizer": wrong}, tmp_path / "wrong.pt")
    shapes = [problem for problem in fsdpckpt.verify(tmp_path / "wrong.pt").problems if problem.kind == "shape"]
    assert len(shapes) == len(LIVE)


def test_an_export_is_one_only_beside_a_state(tmp_path: Path) -> None:
    """accelerate's save_state without FSDP keeps the model itself in ``model.safetensors``."""
    save_file(MODEL, tmp_path / "model.safetensors")
    torch.save(OPTIM, tmp_path / "optimizer.bin")
    torch.save({"step": 2}, tmp_path / "random_states_0.pkl")
    assert opened(tmp_path).model is not None
    torch.save(MODEL, tmp_path / "pytorch_model_fsdp.bin")
    account = opened(tmp_path).ledger.account
    assert "second copy" in account.of("model.safetensors").detail  # type: ignore[union-attr]


def test_the_name_of_the_adapter_is_found_or_nothing_is_changed() -> None:
    live, bare = list(LIVE), [saved(name) for name in LIVE]
    assert without_adapter(live, bare) == tuple(bare)
    assert without_adapter(live, live) == tuple(live)
    assert without_adapter(live, [*bare, "more.weight"]) == tuple(bare)
    assert without_adapter(bare, live) == tuple(bare)
    assert without_adapter([], bare) == () and without_adapter(live, []) == tuple(live)
    named = [name.replace("default", "my_adapter") for name in live]
    assert without_adapter(named, bare) == tuple(bare)
    two = ["a.lora_A.one.weight", "a.lora_A.two.weight"]
    assert without_adapter(two, ["a.lora_A.weight"]) == tuple(two), "nothing says which was saved"
    assert without_adapter(["a.x.weight", "b.x.weight"], ["a.weight"]) == ("a.x.weight", "b.x.weight")


@pytest.mark.parametrize("module", ["encoder", "lora", "A"])
def test_a_module_that_no_tuner_adds_has_no_adapters_name_behind_it(module: str) -> None:
    """A model that was renamed, or another one: its states are not those of the parameters with shorter names."""
    longer = [f"{module}.layer.{at}.weight" for at in range(2)]
    shorter = [f"{module}.{at}.weight" for at in range(2)]
    assert without_adapter(longer, shorter) == tuple(longer)


def test_the_tuners_of_peft_are_known() -> None:
    for added in (
        "lora_embedding_A",
        "ia3_l",
        "hada_w1_a",
        "lokr_w2_b",
        "boft_R",
        "vera_lambda_d",
        "trainable_tokens_delta",
    ):
        assert without_adapter([f"q.{added}.mine"], [f"q.{added}"]) == (f"q.{added}",), added
        assert without_adapter([f"q.{added}.mine.weight"], [f"q.{added}.weight"]) == (f"q.{added}.weight",)


def test_another_model_is_no_adapter(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(3)}, tmp_path / "model.pt")
    state = {"b.default.weight": {"exp_avg": torch.randn(3)}}
    torch.save({"state": state, "param_groups": [{"params": list(state)}]}, tmp_path / "optim.pt")
    with pytest.raises(NeedsInformationError, match="no parameter name in common"):
        opened(tmp_path)
