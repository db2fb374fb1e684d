"""DeepSpeed's universal checkpoints: those that ``ds_to_universal.py`` made, and files that contradict each other."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceIncompleteError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Object
from fsdpckpt.readers.deepspeed import DeepSpeedReader
from fsdpckpt.storage.sources import Sources
from fsdpckpt.testing.reader_contract import WEIGHTS, MemorySources, ReaderContract
from tests.cli.conftest import Run, run  # noqa: F401
from tests.golden.deepspeed.make import Net
from tests.readers.contents import opened
from tests.readers.junk import refusals, save
from tests.readers.test_deepspeed import GOLDEN, truth

NAMES = ["zero1-bf16", "zero3-bf16"]
each = pytest.mark.parametrize("name", NAMES)
STEP = "global_step3_universal"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory of each name, as ds_to_universal.py left it."""
    top = tmp_path_factory.mktemp("universal")
    for name in NAMES:
        with tarfile.open(GOLDEN / f"{name}-universal.tar.xz") as archive:
            archive.extractall(top / name, filter="data")
    return top


def step(runs: Path, name: str, tmp_path: Path) -> Path:
    """One step's directory, to be changed."""
    return shutil.copytree(runs / name / STEP, tmp_path / STEP)


@each
def test_every_value_is_what_deepspeed_gathers(name: str, runs: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(str(runs / name), str(tmp_path / "full.pt"))
    state = torch.load(tmp_path / "full.pt")
    for key, expected in truth(name)["params"].items():
        assert torch.equal(state["model"][key].flatten(), expected.pop("weight")), key
        for moment, value in expected.items():
            assert torch.equal(state["optimizer"]["state"][key][moment].flatten(), value), (key, moment)
            assert state["optimizer"]["state"][key][moment].shape == state["model"][key].shape
        assert state["optimizer"]["state"][key]["step"] == 3
    assert {key: value.shape for key, value in state["model"].items()} == {
        key: value.shape for key, value in Net().state_dict().items()
    }
    assert list(state["model"]) == list(Net().state_dict())


@each
def test_it_is_the_same_as_the_step_that_it_was_made_of(name: str, runs: Path) -> None:
    """Frozen parameters, buffers, param groups and extras included."""
    compared = fsdpckpt.diff(str(runs / name), str(GOLDEN / name / "global_step3"), strict=True)
    assert compared.same, compared


@each
def test_the_way_through_dcp_finds_the_same_values(name: str, runs: Path, tmp_path: Path) -> None:
    assert not fsdpckpt.verify(str(runs / name)).problems
    fsdpckpt.convert(str(runs / name), str(tmp_path / "dcp"), to="sharded", container="dcp", world_size=3)
    assert fsdpckpt.diff(str(runs / name), str(tmp_path / "dcp")).same


def test_inspect_says_what_it_is(runs: Path, run: Run) -> None:  # noqa: F811
    document = json.loads(run("inspect", runs / "zero1-bf16", "--json").out)
    assert (document["layout"], document["container"], document["flavor"]) == ("full", "torch", "deepspeed-universal")
    assert [group["weight_decay"] for group in document["param_groups"]] == [0.1, 0.01]
    notes = [note["message"] for note in document["notes"] if note["kind"] == "master-weights"]
    assert len(notes) == 1 and "not the bfloat16 copies" in notes[0]


def test_dcp_loads_it_where_it_lies(runs: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weight = torch.zeros(13, 7)
    dcp.load({"model": {"embed.weight": weight}}, storage_reader=fsdpckpt.StorageReader(str(runs / "zero1-bf16")))
    assert torch.equal(weight.flatten(), truth("zero1-bf16")["params"]["embed.weight"]["weight"])


def test_it_is_read_from_any_source_of_bytes(runs: Path) -> None:
    from fsdpckpt.readers.detect import open_checkpoint

    with MemorySources(runs / "zero1-bf16") as memory:
        checkpoint = open_checkpoint(f"{memory.top}/zero1-bf16", sources=memory)
    assert {file.path.partition("/zero1-bf16/")[2] for file in checkpoint.files} == {
        file.path.partition("/zero1-bf16/")[2] for file in opened(runs / "zero1-bf16").files
    }
    assert set(checkpoint.checksums.file.tolist()) == set(range(len(checkpoint.files)))


def test_latest_is_read_before_latest_universal(runs: Path, tmp_path: Path) -> None:
    """Both are there where ds_to_universal.py ran beside the step; the universal one is named as left alone."""
    top = shutil.copytree(GOLDEN / "zero1-bf16", tmp_path / "run")
    (top / "truth.pt").unlink()
    shutil.copytree(runs / "zero1-bf16", top, dirs_exist_ok=True)
    checkpoint = opened(top)
    assert (checkpoint.flavor, checkpoint.world_size) == ("deepspeed", 3)
    assert any(STEP in note.message for note in checkpoint.notes)
    assert opened(top / STEP).flavor == "deepspeed-universal"
    shutil.rmtree(top / "global_step3")
    assert opened(top).world_size == 1


def test_a_missing_weight_is_named(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    shutil.rmtree(directory / "zero" / "embed.weight")
    with pytest.raises(SourceIncompleteError, match=r"zero/embed\.weight/fp32\.pt"):
        opened(directory)


def test_a_missing_state_is_named(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    (directory / "zero" / "embed.weight" / "exp_avg.pt").unlink()
    with pytest.raises(SourceIncompleteError, match=r"zero/embed\.weight/exp_avg\.pt"):
        opened(directory)


def test_weights_alone_need_no_file_of_the_optimizer_and_states_do(tmp_path: Path) -> None:
    files = _files()
    del files["zero/optimizer_state.pt"]
    save(files, tmp_path)
    for state in ("step", "exp_avg"):
        with pytest.raises(SourceIncompleteError, match=r"1 file of .* is missing\n  - .*zero/optimizer_state\.pt"):
            opened(tmp_path)
        (tmp_path / "zero" / "w" / f"{state}.pt").unlink()
    found = opened(tmp_path)
    assert found.optim is None and found.model is not None and list(found.model.params) == ["w", "mask"]


def test_states_whose_files_were_swapped_are_refused(runs: Path, tmp_path: Path) -> None:
    """Both have the same shape."""
    place = step(runs, "zero1-bf16", tmp_path) / "zero" / "embed.weight"
    (place / "exp_avg.pt").rename(place / "other")
    (place / "exp_avg_sq.pt").rename(place / "exp_avg.pt")
    (place / "other").rename(place / "exp_avg_sq.pt")
    with pytest.raises(SourceCorruptError, match=r"embed\.weight/exp_avg\.pt.* it was saved as exp_avg_sq\.pt"):
        opened(tmp_path / STEP)


def test_the_directory_of_the_weights_asks_for_the_one_above(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    with pytest.raises(SourceIncompleteError, match="only the weights and states") as error:
        opened(directory / "zero")
    assert error.value.next_step == f"give {directory}"


def test_a_parameter_that_never_had_a_gradient_has_its_weight_alone(runs: Path, tmp_path: Path) -> None:
    """ZeRO makes no states for it, and ds_to_universal.py writes its weight (0.19)."""
    directory = step(runs, "zero1-bf16", tmp_path)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (directory / "zero" / "embed.weight" / f"{state}.pt").unlink()
    checkpoint = opened(directory)
    assert checkpoint.optim is not None and "embed.weight" not in checkpoint.optim.state
    assert [problem.key for problem in checkpoint.problems] == ["embed.weight"]


def test_a_missing_rank_of_zero_3_is_named(runs: Path, tmp_path: Path) -> None:
    """It has parts of the frozen parameters."""
    directory = step(runs, "zero3-bf16", tmp_path)
    (directory / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceIncompleteError, match="zero_pp_rank_1_mp_rank_00_model_states"):
        opened(directory)


def test_weights_of_another_shape_are_refused(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    torch.save({"param": torch.zeros(13, 8), "cat_dim": 0}, directory / "zero" / "embed.weight" / "fp32.pt")
    with pytest.raises(SourceCorruptError, match="embed"):
        opened(directory)


def test_the_padding_of_a_vocabulary_that_was_taken_off_is_no_contradiction(runs: Path, tmp_path: Path) -> None:
    directory = step(runs, "zero1-bf16", tmp_path)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        content = {"param": torch.zeros(11, 7), "cat_dim": 0, "vocab_tensor": True}
        torch.save(content, directory / "zero" / "embed.weight" / f"{state}.pt")
    model = opened(directory).model
    assert model is not None
    leaf = model.params["embed.weight"]
    assert isinstance(leaf, Tensor) and leaf.shape == (11, 7)


def test_parameters_of_tensor_parallel_ranks_are_whole(tmp_path: Path) -> None:
    """Each rank's module states know its slices; ``zero/`` has whole tensors, and those of every pipeline stage."""
    files = _files()
    second = {"module": {}, "param_shapes": [{"w": [3, 5], "later": [4]}], "mp_world_size": 2}
    files |= {"mp_rank_01_model_states.pt": second, "zero/later/fp32.pt": {"param": torch.ones(4)}}
    files |= {f"zero/w/{state}.pt": {"param": torch.ones(6, 5), "cat_dim": 0} for state in ("fp32", "exp_avg")}
    save(files, tmp_path)
    model = opened(tmp_path).model
    assert model is not None
    assert {name: leaf.shape for name, leaf in model.params.items() if isinstance(leaf, Tensor)} == {
        "mask": (8,), "w": (6, 5), "later": (4,)
    }  # fmt: skip


def test_files_of_two_tensors_are_each_read_where_they_lie(tmp_path: Path) -> None:
    """Their pickles are equal, and the second tensor is not at the same distance from the first in each."""
    files = _files()
    names = [f"w{count}" for count in range(1, 17)]
    files["mp_rank_00_model_states.pt"] |= {"module": {}, "param_shapes": [{name: [3] for name in names}]}
    files["zero/optimizer_state.pt"]["param_groups"] = [{"lr": 0.1, "params": [0]}]
    weights, moments = ({name: torch.randn(3) for name in names} for _ in range(2))
    for count, name in enumerate(names, 1):
        for state, values in (("fp32", weights), ("exp_avg_sq", moments)):
            files[f"zero/{name}/{state}.pt"] = {"before": torch.ones(count), "param": values[name]}
    save({name: content for name, content in files.items() if "/w/" not in name}, tmp_path / "step")
    fsdpckpt.convert(tmp_path / "step", tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt")
    for name in names:
        assert torch.equal(full["model"][name], weights[name])
        assert torch.equal(full["optimizer"]["state"][name]["exp_avg_sq"], moments[name])


def test_what_a_user_keeps_under_names_of_sections_is_kept_and_named(tmp_path: Path) -> None:
    files = _files()
    files["mp_rank_00_model_states.pt"] |= {"optimizer": "mine", "optimizer_": "taken", "model": 5}
    save(files, tmp_path)
    checkpoint = opened(tmp_path)
    kept = {key: checkpoint.extra[key] for key in ("optimizer__", "optimizer_", "model_")}
    assert kept == {"optimizer__": "mine", "optimizer_": "taken", "model_": 5}
    assert len([note for note in checkpoint.notes if note.kind == "renamed"]) == 2


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    save(_files() | {"zero/w/step.pt": np.float32(3.0)}, tmp_path)
    optim = opened(tmp_path).optim
    assert optim is not None
    found = optim.state["w"]["step"]
    assert isinstance(found, Object) and found.number == 3


def test_the_numbers_that_zero_3_keeps_for_all_parameters_are_states_of_each(tmp_path: Path) -> None:
    files = _files(flat=True)
    of_groups = {0: {"step": 7, "beta": 0.5, "name": "x"}, 1: {"step": 8}, -1: {"step": 9}}  # there is one group
    files["zero/optimizer_state.pt"]["optimizer_state_dict"]["state"] = of_groups
    save(files, tmp_path)
    optim = opened(tmp_path).optim
    assert optim is not None
    assert {key: value for key, value in optim.state["w"].items() if key != "exp_avg"} == {"step": 7, "beta": 0.5}


@pytest.mark.parametrize("flat", [False, True])
def test_whatever_the_files_hold_is_read_or_refused(flat: bool, tmp_path: Path) -> None:
    assert refusals(_files(flat=flat), tmp_path, seed=flat) > 80


def _files(*, flat: bool = False) -> dict[str, Any]:
    """The files of a checkpoint with one weight, as plain values; ``flat``: as from ZeRO 3."""
    weight = torch.arange(15.0)
    group = {"lr": 0.1, "params": [0]}
    states: dict[str, Any] = {"ds_version": "0.19.8", "clip_grad": 1.0, "param_groups": [group]}
    if flat:
        states["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [group]}
    whole: Any = weight if flat else {"param": weight.reshape(3, 5), "cat_dim": 0}
    module = {"module": {"w": weight[:0], "mask": weight[:8] + 1}, "param_shapes": [{"w": [3, 5]}], "epoch": 3}
    files = {
        f"{'zero_pp_rank_0_' if flat else ''}mp_rank_00_model_states.pt": module,
        "zero/optimizer_state.pt": states,
        "zero/w/fp32.pt": whole,
        "zero/w/exp_avg.pt": whole,
    }
    return files if flat else {**files, "zero/w/step.pt": torch.tensor(3.0)}


class TestUniversal(ReaderContract):
    """What every reader promises."""

    reader = DeepSpeedReader()

    def save(self, directory: Path) -> Path:
        model = {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
        shapes = {name: tuple(weight.shape) for name, weight in model.items()}
        files: dict[str, Any] = {
            "mp_rank_00_model_states.pt": {"module": {}, "param_shapes": [shapes]},
            "zero/optimizer_state.pt": {"param_groups": [{"params": [0]}]},
        }
        for state in ("fp32", "exp_avg"):
            files |= {f"zero/{name}/{state}.pt": {"param": weight, "cat_dim": 0} for name, weight in model.items()}
        files |= {f"zero/{name}/step.pt": torch.tensor(3.0) for name in model}
        save(files, directory)
        return directory


def test_the_pointer_to_a_directory_outside_is_not_followed(runs: Path, tmp_path: Path) -> None:
    step(runs, "zero1-bf16", tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_universal").write_text(f"../other/{STEP}")
    with Sources() as sources, pytest.raises(FsdpckptError):
        from fsdpckpt.readers.detect import open_checkpoint

        open_checkpoint(str(tmp_path / "run"), sources=sources)
