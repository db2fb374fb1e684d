"""A model and an optimizer in files of their own: of one model, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.readers.contents import opened

HUGGING_FACE = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
TORCHTUNE = ("tok_embeddings.weight", "layers.0.attn.q_proj.weight", "norm.scale")


def saved(path: Path, model: tuple[str, ...], optim: tuple[str | int, ...], *, stated: bool = True) -> Path:
    """torchtune's output: weights in ``epoch_0``, the optimizer in ``recipe_state``."""
    for directory in ("epoch_0", "recipe_state"):
        (path / directory).mkdir()
    save_file({name: torch.randn(5, 3) for name in model}, path / "epoch_0" / "model.safetensors")
    state: dict[Any, Any] = {name: {"exp_avg": torch.randn(5, 3)} for name in optim if stated}
    groups = [{"lr": 0.1, "params": list(optim)}]
    torch.save({"optimizer": {"state": state, "param_groups": groups}, "seed": 3}, path / "recipe_state" / "r.pt")
    return path


@pytest.mark.parametrize("stated", [True, False])
def test_torchtunes_optimizer_is_not_joined_to_weights_under_other_names(tmp_path: Path, stated: bool) -> None:
    with pytest.raises(NeedsInformationError, match="no parameter name in common") as refused:
        opened(saved(tmp_path, HUGGING_FACE, TORCHTUNE, stated=stated))
    one, other = refused.value.details
    assert HUGGING_FACE[0] in one and TORCHTUNE[0] in other
    assert opened(tmp_path / "epoch_0").optim is None
    assert opened(tmp_path / "recipe_state").model is None


@pytest.mark.parametrize(
    "optim",
    [
        TORCHTUNE,
        tuple(f"module.{name}" for name in TORCHTUNE),
        tuple(f"_orig_mod.{name}" for name in TORCHTUNE),
        ("layers.0._fsdp_wrapped_module.attn.q_proj.weight",),
        (0, 1, 2),
        ("layers.0._flat_param",),
    ],
)
def test_names_that_are_alike_but_for_wrappers_and_ids_are_of_one_model(
    tmp_path: Path, optim: tuple[str | int, ...]
) -> None:
    found = opened(saved(tmp_path, TORCHTUNE, optim))
    assert found.model is not None and found.optim is not None
    assert [note for note in found.notes if note.kind == "unmatched"] == []


def test_a_prefix_on_the_models_names_alone_is_none_of_the_optimizers_business(tmp_path: Path) -> None:
    found = opened(saved(tmp_path, tuple(f"model.{name}" for name in TORCHTUNE), TORCHTUNE))
    assert found.optim is not None and "unmatched" not in [note.kind for note in found.notes]


def test_some_names_that_the_model_lacks_are_noted(tmp_path: Path) -> None:
    found = opened(saved(tmp_path, TORCHTUNE, (*TORCHTUNE, "output.weight")))
    (note,) = [note for note in found.notes if note.kind == "unmatched"]
    assert note.keys == ("output.weight",)
    assert note.message == "1 optimizer key is none of the model's: output.weight"


def test_a_users_own_value_among_the_states_is_no_name_that_the_model_lacks(tmp_path: Path) -> None:
    saved(tmp_path, TORCHTUNE, TORCHTUNE)
    path = tmp_path / "recipe_state" / "r.pt"
    content = torch.load(path)
    content["optimizer"]["state"]["tables"] = 7.5
    torch.save(content, path)
    found = opened(tmp_path)
    assert found.optim is not None and "tables" in found.optim.stored_state()
    assert "unmatched" not in [note.kind for note in found.notes]


@pytest.mark.parametrize("name", ["state.a.exp_avg", "state.0.step", "param_groups.w"])
def test_a_model_in_a_file_called_so_is_no_second_optimizer(tmp_path: Path, name: str) -> None:
    """Its modules are named like the keys of a flattened optimizer."""
    weights = {name: torch.randn(5, 3), f"{name}_of_b": torch.randn(4, 2)}
    states = {key: {"exp_avg": torch.randn_like(weight)} for key, weight in weights.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "ranks", to="sharded", world_size=2, container="torch")
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "ranks").same
    parts = tmp_path / "parts"
    parts.mkdir()
    torch.save(weights, parts / "pytorch_model.bin")
    torch.save(optimizer, parts / "optimizer.pt")
    assert fsdpckpt.diff(tmp_path / "full.pt", parts).same
