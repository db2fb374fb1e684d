"""A model and an optimizer in files of their own are of one model, or not; one of them may be missing.

That is a problem where what lies beside it was saved only together with both.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from tests.makers import dcp_of, lose
from tests.readers.contents import opened

MODEL = {"w": torch.randn(5, 3)}
OPTIMIZER = {"state": {"w": {"exp_avg": torch.randn(5, 3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
FLATTENED = {"state.w.exp_avg": torch.randn(5, 3), "param_groups.w.lr": 0.1}
SCHEDULE = {"last_epoch": 4, "_last_lr": [0.1]}


def trainer(path: Path) -> None:
    dcp_of({"model": MODEL})(path / "pytorch_model_fsdp_0")
    dcp_of({"optimizer": OPTIMIZER})(path / "optimizer_0")
    torch.save(SCHEDULE, path / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text("{}")


def accelerate(path: Path) -> None:
    path.mkdir()
    torch.save(MODEL, path / "pytorch_model_fsdp.bin")
    torch.save(OPTIMIZER, path / "optimizer.bin")
    torch.save({"step": 4}, path / "random_states_0.pkl")


def verl(path: Path) -> None:
    path.mkdir()
    by_id = {"state": {0: OPTIMIZER["state"]["w"]}, "param_groups": [{"lr": 0.1, "params": [0]}]}  # type: ignore[call-overload, index]
    for rank in range(2):
        for section, content in (("model", MODEL), ("optim", by_id), ("extra_state", {"lr_scheduler": SCHEDULE})):
            torch.save(content, path / f"{section}_world_size_2_rank_{rank}.pt")
    (path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')


def lightning(path: Path, *, optim: bool = True, training: bool = True) -> None:
    dcp_of({"model": MODEL, **({"optimizer_0": OPTIMIZER} if optim else {})})(path)
    own = {"lr_schedulers": [SCHEDULE]} if training else {}
    torch.save({"loops": {}, "epoch": 1, "pytorch-lightning_version": "2.6.6", **own}, path / "meta.pt")


def torchtitan(path: Path, *, optim: bool = True, training: bool = True) -> None:
    own = {"lr_scheduler": SCHEDULE, "train_state": {"step": 4}} if training else {}
    dcp_of({**MODEL, **({"optimizer": FLATTENED} if optim else {}), **own})(path / "step-4")


# What each framework saves, and how its optimizer, its model, or all that only a complete save has is taken away.
FOLDERS: dict[str, tuple[Callable[[Path], None], str, str, tuple[str, ...]]] = {
    "trainer": (trainer, "optimizer_0", "pytorch_model_fsdp_0", ("scheduler.pt", "rng_state*")),
    "accelerate": (accelerate, "optimizer.bin", "pytorch_model_fsdp.bin", ("random_states_*",)),
    "verl": (verl, "optim_*", "model_*", ("extra_state_*",)),
}
INSIDE = {"lightning": lightning, "torchtitan": torchtitan}  # all sections in one DCP directory


def messages(path: Path) -> list[str]:
    return [problem.message for problem in fsdpckpt.verify(path).problems]


@pytest.mark.parametrize("name", FOLDERS)
def test_an_optimizer_that_is_not_there_is_a_problem_and_stops_a_conversion(name: str, tmp_path: Path) -> None:
    save, optimizer, _, training = FOLDERS[name]
    save(source := tmp_path / "checkpoint-4")
    assert messages(source) == []
    lose(optimizer)(source)
    (found,) = messages(source)
    file = {"trainer": "optimizer_0/", "verl": "optim_world_size_2_rank_0.pt"}.get(name, optimizer)
    assert f"has no optimizer ({file})" in found and training[0].partition("_")[0].rstrip("*") in found
    with pytest.raises(SourceIncompleteError, match="not whole") as caught:
        fsdpckpt.convert(source, tmp_path / "out", to="sharded", container="dcp", world_size=2, flavor="plain")
    assert "--only model" in str(caught.value.next_step)
    fsdpckpt.convert(source, tmp_path / "weights", only="model", world_size=1, to="sharded", buffers=["none"])
    assert fsdpckpt.verify(tmp_path / "weights").whole, "what belongs to the optimizer was left out, too"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_save_of_the_model_alone_is_whole(name: str, tmp_path: Path) -> None:
    save, optimizer, _, training = FOLDERS[name]
    save(source := tmp_path / "checkpoint-4")
    lose(optimizer, *training)(source)
    assert fsdpckpt.verify(source).whole
    fsdpckpt.convert(source, tmp_path / "out.pt")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_that_is_not_there_is_a_problem_too(name: str, tmp_path: Path) -> None:
    save, _, model, _ = FOLDERS[name]
    save(source := tmp_path / "checkpoint-4")
    lose(model)(source)
    assert any("has no model" in message for message in messages(source))
    with pytest.raises(SourceIncompleteError) as caught:
        fsdpckpt.convert(source, tmp_path / "out.pt")
    assert "--only optim" in str(caught.value.next_step)
    fsdpckpt.convert(source, tmp_path / "optim.pt", only="optim")


@pytest.mark.parametrize("name", INSIDE)
def test_sections_of_one_directory_are_told_by_the_extras_in_it(name: str, tmp_path: Path) -> None:
    save: Callable[..., None] = INSIDE[name]
    save(tmp_path / "whole")
    save(tmp_path / "lost", optim=False)
    save(tmp_path / "weights", optim=False, training=False)
    assert fsdpckpt.verify(tmp_path / "whole").whole and fsdpckpt.verify(tmp_path / "weights").whole
    assert any("has no optimizer" in message for message in messages(tmp_path / "lost"))
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(tmp_path / "lost", tmp_path / "out.pt")


def test_a_trainer_that_would_forget_the_optimizer_is_told_of(tmp_path: Path) -> None:
    """Without a scheduler it loads no optimizer, without its state it does not start: as its source has it."""
    trainer(source := tmp_path / "checkpoint-4")
    assert messages(source) == []
    (source / "scheduler.pt").unlink()
    (source / "trainer_state.json").unlink()
    assert fsdpckpt.inspect(source).to_json()["flavor"] == "trainer", "the random states have its names"
    scheduler, state = messages(source)
    assert "no scheduler.pt" in scheduler and "new optimizer" in scheduler
    assert "no trainer_state.json" in state and "FileNotFoundError" in state
    told = [note.message for note in fsdpckpt.convert(source, tmp_path / "on-2", world_size=2).notes]
    assert any("the target has no scheduler.pt" in message for message in told)
    assert any("the target has no trainer_state.json" in message for message in told)
    alone = fsdpckpt.convert(source, tmp_path / "model", world_size=2, only="model")
    assert not any("scheduler" in note.message for note in alone.notes)
    other = fsdpckpt.convert(source, tmp_path / "verl", flavor="verl", world_size=2, buffers=["none"])
    assert not any("has no scheduler.pt" in note.message for note in other.notes)


def test_what_another_framework_becomes_says_what_the_trainer_would_forget(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state")
    told = [note.message for note in fsdpckpt.convert(source, tmp_path / "on-2", flavor="trainer").notes]
    lacking = [message for message in told if "the target has no" in message]
    assert len(lacking) == 2 and "trainer silently starts" in lacking[0] and "trainer stops" in lacking[1]
    schedule = {**SCHEDULE, "last_epoch": 3, "_last_lr": [0.25]}  # now it is one that torch's schedulers load
    torch.save(schedule, source / "scheduler.bin")
    told = [note.message for note in fsdpckpt.convert(source, tmp_path / "again", flavor="trainer").notes]
    assert torch.load(tmp_path / "again" / "scheduler.pt") == schedule
    assert len([message for message in told if "the target has no" in message]) == 1
    assert any(message.startswith("scheduler.pt is the state of") and "not a LambdaLR" in message for message in told)


@pytest.mark.parametrize(("save", "part"), [(trainer, "optimizer_0"), (accelerate, "pytorch_model_fsdp.bin")])
def test_one_part_of_a_frameworks_folder_names_the_folder(
    save: Callable[[Path], None], part: str, tmp_path: Path
) -> None:
    save(source := tmp_path / "checkpoint-4")
    (note,) = [note for note in fsdpckpt.inspect(source / part).checkpoint.notes if note.kind == "part-of"]
    assert f"{source / part} is one part of a checkpoint of flavor {save.__name__}: give {source} for" in note.message
    assert not any(note.kind == "part-of" for note in fsdpckpt.inspect(source).checkpoint.notes)


def test_two_optimizers_are_no_missing_one(tmp_path: Path) -> None:
    lightning(tmp_path / "two", optim=False)
    shutil.rmtree(tmp_path / "two")
    dcp_of({"model": MODEL, "optimizer_0": OPTIMIZER, "optimizer_1": OPTIMIZER})(tmp_path / "two")
    content = {"loops": {}, "lr_schedulers": [SCHEDULE], "pytorch-lightning_version": "2.6.6"}
    torch.save(content, tmp_path / "two" / "meta.pt")
    assert not any("has no optimizer" in message for message in messages(tmp_path / "two"))


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
    ("model", "optim", "lacks"),
    [
        *(
            (TORCHTUNE, optim, ())
            for optim in (
                TORCHTUNE,
                tuple(f"module.{name}" for name in TORCHTUNE),
                tuple(f"_orig_mod.{name}" for name in TORCHTUNE),
                ("layers.0._fsdp_wrapped_module.attn.q_proj.weight",),
                (0, 1, 2),
                ("layers.0._flat_param",),
            )
        ),
        (tuple(f"model.{name}" for name in TORCHTUNE), TORCHTUNE, ()),  # a prefix on the model's names alone
        (TORCHTUNE, (*TORCHTUNE, "output.weight"), ("output.weight",)),
    ],
)
def test_names_that_are_alike_but_for_wrappers_and_ids_are_of_one_model_and_others_are_noted(
    tmp_path: Path, model: tuple[str, ...], optim: tuple[str | int, ...], lacks: tuple[str, ...]
) -> None:
    found = opened(saved(tmp_path, model, optim))
    assert found.model is not None and found.optim is not None
    noted = [(note.keys, note.message) for note in found.notes if note.kind == "unmatched"]
    assert noted == [((name,), f"1 optimizer key is none of the model's: {name}") for name in lacks]


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
