"""Extras that a producer has no place for are said, and what was written is whole by its own word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceMissingError, SourceUnrecognisedError, UsageError
from tests.oracle.compare import identical, optimizer_by_name

DCP = {"to": "sharded", "world_size": 2, "buffers": ["none"]}


@pytest.fixture
def full(tmp_path: Path) -> str:
    path = str(tmp_path / "full.pt")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state = optimizer_by_name(model, optimizer)
    extras = {"rng": torch.get_rng_state(), "best_loss": torch.rand(3), "mystuff": {"lr": 0.25}}
    torch.save({"model": model.state_dict(), "optimizer": state, **extras}, path)
    return path


def _not_carried(report: fsdpckpt.Report) -> str:
    return " ".join(note.message for note in report.notes if note.kind == "not-carried")


def test_directories_below_are_held_against_the_manifest(full: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fsdpckpt.convert(full, str(out), flavor="accelerate", **DCP)
    assert fsdpckpt.verify(str(out)).whole
    shards = sorted((out / "pytorch_model_fsdp_0").glob("*.distcp"))
    data = bytearray(shards[0].read_bytes())
    data[len(data) // 2] ^= 1
    shards[0].write_bytes(data)
    assert not fsdpckpt.verify(str(out)).whole


def test_extras_without_a_place_are_named(full: str, tmp_path: Path) -> None:
    report = fsdpckpt.convert(full, str(tmp_path / "out"), flavor="accelerate", **DCP)
    assert "mystuff" in _not_carried(report)
    inside = tmp_path / "inside"
    fsdpckpt.convert(full, str(inside / "pytorch_model_fsdp_0"), **DCP)
    again = fsdpckpt.convert(str(inside), str(tmp_path / "again"), flavor="accelerate", **DCP)
    assert "mystuff" in _not_carried(again)


@pytest.mark.parametrize("flavor", ["accelerate", "huggingface"])
def test_extras_that_only_another_rank_has_are_named(flavor: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).state_dict()
    (tmp_path / "ranks").mkdir()
    for rank, extra in enumerate([{"rng": 1}, {"rng": 2, "queue": [5]}]):
        torch.save({"model": model, **extra}, tmp_path / "ranks" / f"model_rank_{rank}.pt")
    report = fsdpckpt.convert(tmp_path / "ranks", tmp_path / "out", flavor=flavor)
    assert "rng, queue" in _not_carried(report)


NO_NUMBERS = (float("nan"), torch.tensor(float("inf")))
THREES = (np.int64(3), *(torch.tensor(3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)))


@pytest.mark.parametrize(("step", "steps"), [*((each, 0) for each in NO_NUMBERS), *((each, 3) for each in THREES)])
def test_the_steps_are_those_of_the_optimizer_and_zero_if_they_are_no_number(
    step: object, steps: int, tmp_path: Path
) -> None:
    torch.save({"model": {"w": torch.ones(2, 2)}, "optimizer": _adam(step)}, tmp_path / "full.pt")
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", flavor="deepspeed-universal")
    assert any(f"global_steps = {steps}" in note.message for note in report.notes)


def test_what_is_registered_for_checkpointing_is_neither_a_model_nor_a_ranks_file(full: str, tmp_path: Path) -> None:
    """``Accelerator.register_for_checkpointing``: a file for each object, whose state may look like that of a model."""
    source = tmp_path / "source"
    fsdpckpt.convert(full, source, flavor="accelerate", **DCP)
    objects: dict[str, dict[str, object]] = {
        "custom_checkpoint_0.pkl": {"ema": torch.rand(5), "decay": 0.5},
        "custom_checkpoint_1.pkl": {"a.weight": torch.rand(2, 3), "b": torch.rand(7)},
        "scheduler.bin": {"last_epoch": 3},
        "scheduler_1.bin": {"last_epoch": 4},
    }
    for name, state in objects.items():
        torch.save(state, source / name)
    (source / "fsdpckpt.json").unlink()
    report = fsdpckpt.convert(source, tmp_path / "out", world_size=3)
    assert report.flavor == "accelerate"
    assert not _not_carried(report)
    for name in objects:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert fsdpckpt.diff(source, tmp_path / "out").same
    fsdpckpt.convert(source, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt")
    for name, state in objects.items():
        held = found[name.partition(".")[0]]
        assert held.keys() == state.keys()
        assert all(identical(torch.as_tensor(held[key]), torch.as_tensor(value)) for key, value in state.items())


@pytest.mark.parametrize(("flavor", "left"), [("verl", "epoch, lr_scheduler"), ("torchtitan", "epoch, lr_scheduler")])
@pytest.mark.parametrize("extras", [{}, {"epoch": 3, "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}}])
def test_a_model_alone_has_no_extras_that_say_the_optimizer_was_saved(
    full: str, tmp_path: Path, flavor: str, left: str, extras: dict[str, object]
) -> None:
    """``verify`` would miss the optimizer; and where names stand at the top, an extra would be one of the model's."""
    model = tmp_path / "model.pt"
    torch.save({"model": torch.load(full)["model"], **extras}, model)
    report = fsdpckpt.convert(model, tmp_path / "out", flavor=flavor, **DCP)
    assert (left in _not_carried(report)) == bool(extras)
    assert not any("added what flavor" in note.message for note in report.notes)
    assert fsdpckpt.verify(tmp_path / "out").whole
    assert fsdpckpt.diff(model, tmp_path / "out").same
    report = fsdpckpt.convert(full, tmp_path / "only", flavor=flavor, only="model", **DCP)
    assert not any("added what flavor" in note.message for note in report.notes)


def test_weights_for_hugging_face_need_a_model(full: str, tmp_path: Path) -> None:
    alone = tmp_path / "optim.pt"
    torch.save(torch.load(full)["optimizer"], alone)
    with pytest.raises(SourceMissingError, match="has no model, and flavor huggingface keeps nothing else"):
        fsdpckpt.convert(alone, tmp_path / "out", flavor="huggingface")
    with pytest.raises(UsageError, match="only='optim' cannot be combined with flavor='huggingface'"):
        fsdpckpt.convert(full, tmp_path / "out", flavor="huggingface", only="optim")


@pytest.mark.parametrize("flavor", ["torchtitan", "torchtitan-old"])
def test_tensors_among_the_extras_do_not_become_parameters(full: str, tmp_path: Path, flavor: str) -> None:
    report = fsdpckpt.convert(full, str(tmp_path / "out"), flavor=flavor, **DCP)
    keys = fsdpckpt.inspect(str(tmp_path / "out")).to_json()["sections"]["model"]
    assert keys["tensors"] == 4
    if flavor == "torchtitan":
        assert "rng" in _not_carried(report)
        assert "best_loss" in _not_carried(report)


@pytest.mark.parametrize("flavor", ["lightning", "fabric"])
def test_a_meta_file_of_tensors_is_no_second_model(full: str, tmp_path: Path, flavor: str) -> None:
    fsdpckpt.convert(full, str(tmp_path / "out"), flavor=flavor, **DCP)
    with fsdpckpt.open(str(tmp_path / "out")) as found, fsdpckpt.open(full) as held:
        assert identical(found["0.weight"].torch(), held["0.weight"].torch())


def test_a_url_of_a_local_file_is_no_way_around_the_paths(full: str, tmp_path: Path) -> None:
    for target in (full, str(tmp_path / "other.pt")):
        with pytest.raises(SourceUnrecognisedError, match="given by its path"):
            fsdpckpt.convert(f"file://{full}", target, overwrite=True)
    assert set(torch.load(full)) == {"model", "optimizer", "rng", "best_loss", "mystuff"}


def _adam(step: object) -> dict[str, object]:
    state = {"w": {"step": step, "exp_avg": torch.ones(2, 2)}} if step is not None else {}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


@pytest.mark.parametrize("flavor", ["lightning", "lightning-model-parallel"])
@pytest.mark.parametrize(
    ("step", "extras", "steps"),
    [
        (torch.tensor(7.0), {}, 7),
        (7, {"epoch": 2, "global_step": 9}, 9),  # the source's own
        (None, {"train_state": {"step": torch.tensor(5, dtype=torch.int32)}}, 5),  # SGD in torchtitan
        (None, {"global_steps": 6}, 6),
    ],
)
def test_lightnings_step_is_the_one_that_the_source_records(
    flavor: str, step: object, extras: dict[str, object], steps: int, tmp_path: Path
) -> None:
    content = {"model": {"w": torch.ones(2, 2)}, "optimizer": _adam(step), **extras}
    torch.save(content, tmp_path / "full.pt")
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", flavor=flavor, to="sharded", buffers="none")
    assert torch.load(tmp_path / "out/meta.pt")["global_step"] == steps
    schedule, loops = (note.message for note in report.notes if note.warning)
    assert schedule.startswith(f"the target has no LR schedule that {flavor} reads: it starts over")
    assert loops.startswith(f"the target has no loops: {flavor} counts epochs and steps from 0: set max_epochs")


def test_a_step_that_nothing_records_is_zero_with_a_warning(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2, 2)}, "optimizer": _adam(None)}, tmp_path / "full.pt")
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", flavor="lightning", to="sharded", buffers="none")
    assert torch.load(tmp_path / "out/meta.pt")["global_step"] == 0
    (said,) = [note for note in report.notes if "global_step is set to 0" in note.message and note.kind == "resumption"]
    assert said.warning
    resumption = fsdpckpt.verify(tmp_path / "out", flavor="lightning").resumption
    assert resumption is not None and resumption.resumes and "counts epochs and steps from 0" in resumption.changes[0]
    meta = torch.load(tmp_path / "out/meta.pt")
    del meta["global_step"]
    torch.save(meta, tmp_path / "out/meta.pt")
    resumption = fsdpckpt.verify(tmp_path / "out", flavor="lightning").resumption
    assert resumption is not None and any("no global_step" in reason for reason in resumption.missing)


@pytest.mark.parametrize("flavor", ["verl", "deepspeed-universal", "lightning"])
def test_a_schedule_that_begins_anew_is_a_warning_and_one_that_is_kept_is_none(flavor: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2, 2)}, "optimizer": _adam(3)}
    options = {"flavor": flavor, "key_type": "name"} if flavor == "lightning" else {"flavor": flavor}
    options |= {} if flavor == "deepspeed-universal" else {"world_size": 2, "to": "sharded", "buffers": "none"}
    torch.save(state, tmp_path / "without.pt")
    report = fsdpckpt.convert(tmp_path / "without.pt", tmp_path / "without", **options)  # type: ignore[arg-type]
    assert [each for each in report.warnings if f"no LR schedule that {flavor} reads" in each]
    again = fsdpckpt.convert(tmp_path / "without", tmp_path / "again", flavor=flavor)
    assert not [each for each in again.warnings if "LR schedule that" in each], "the source had it so"
