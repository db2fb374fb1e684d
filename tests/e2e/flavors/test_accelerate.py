"""accelerate and the Trainer of transformers train on 3 ranks, we convert without ``--flavor``, they go on with 2.

The same losses as by PyTorch's resharding. Both in one start: the Trainer saves by accelerate.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdpckpt.api import inspect, verify
from tests.e2e.flavors.conftest import Job, Library, LibraryOf, Losses, resumption, written
from tests.fuzz.corpus import GOLDEN
from tests.oracle.compare import differences

DEFAULT = {"world_size": 2}  # what a user types who must resume on 2 GPUs
FORMS = {
    "full": {"to": "full"},
    "sharded": {"to": "sharded", "container": "dcp", "world_size": 2},
    "ranks": {
        "to": "sharded",
        "container": "torch",
        "world_size": 2,
        "buffers": ("scale",),
        "mesh_device": "cpu",
    },
}
# LOCAL_STATE_DICT is no target here: accelerate does not load its own (torch.load refuses ShardedTensor).
# What was saved, what accelerate loads: within FSDP1 and FSDP2, and from one to the other.
PATHS = (
    ("local1", "sharded1"),
    ("sharded1", "full1"),
    ("full1", "ranks2"),
    ("ranks2", "sharded2"),
    ("sharded2", "full2"),
    ("ranks2", "ranks2"),
)
TRAINER_PATHS = (
    ("sharded1", "full2"),
    ("full2", "sharded1"),
    ("sharded2", "sharded2"),
    ("full1", "full1"),
)
STEP = "checkpoint-3"
DEEPSPEED = {"accelerate": "sharded2", "trainer": "trainer-sharded2-even"}  # by what saved it: the form that goes on


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``accelerate/`` (ZeRO 3) and ``trainer/checkpoint-3`` (ZeRO 2), as DeepSpeed saved them on 4 ranks."""
    directory = tmp_path_factory.mktemp("deepspeed")
    for name in DEEPSPEED:
        with tarfile.open(GOLDEN / "deepspeed" / f"{name}.tar.xz") as packed:
            packed.extractall(directory, filter="data")
        (directory / name / "next.json").rename(directory / f"{name}.json")
    return directory


@pytest.fixture(scope="module")
def saved(library: LibraryOf) -> Library:
    return library("transformers")


@pytest.fixture(scope="module")
def converted(saved: Library, by_deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """What is loaded on 2 ranks, by its id: the conversions, and PyTorch's own resharding of what was saved."""
    below, jobs = tmp_path_factory.mktemp("converted"), []
    for source, form in PATHS:
        target = below / f"{source}-{form}"
        device = {"mesh_device": "cpu"} if form == "ranks2" else {}
        options = {**DEFAULT, **device} if source == form else FORMS[form[:-1]]
        written(saved.saved / f"accelerate-{source}", target, **options)
        jobs.append(Job(f"{source} to {form}", form, target))
    for source, form in TRAINER_PATHS:
        target = below / f"trainer-{source}-{form}" / STEP
        target.parent.mkdir()
        written(saved.saved / f"trainer-{source}", target, **(DEFAULT if source == form else FORMS[form[:-1]]))
        jobs.append(Job(f"trainer: {source} to {form}", f"trainer-{form}", target))
    checkpoint = saved.saved / "trainer-sharded2" / STEP
    written(checkpoint, below / "between", flavor="accelerate", world_size=4)
    for name in ("by-accelerate", "without-state", "by-itself"):  # the random states of accelerate are others
        (below / name).mkdir()
        target = below / name / STEP
        jobs.append(Job(f"trainer: {name}", "trainer-sharded2", target))
        if name != "by-itself":
            report = written(below / "between", target, flavor="trainer", world_size=2)
            assert [
                "no trainer_state.json" in note.message for note in report.notes if note.kind == "unconfigured"
            ] == [True]
        if name == "by-accelerate":
            shutil.copy(checkpoint / "trainer_state.json", target)
    shutil.copytree(checkpoint, below / "by-itself" / STEP, ignore=shutil.ignore_patterns("rng_state_*"))
    for source, form in DEEPSPEED.items():
        target = below / f"deepspeed-{source}" / STEP
        target.parent.mkdir()
        groups = {"no_weight_decay": ("standard",)} if source == "trainer" else {}  # DeepSpeed made its optimizer
        written(by_deepspeed / source, target, **DEFAULT, **groups)
        jobs.append(Job(f"deepspeed: {source}", form, target))
    for trained, loaded in sorted({source[-1] + form[-1] for source, form in PATHS}):
        jobs.append(Job(trained + loaded, f"sharded{loaded}", saved.saved / f"accelerate-sharded{trained}"))
    for trained, loaded in sorted({source[-1] + form[-1] for source, form in TRAINER_PATHS}):
        path = saved.saved / f"trainer-sharded{trained}" / STEP
        jobs.append(Job(f"trainer: {trained}{loaded}", f"trainer-sharded{loaded}", path))
    return {job.id: job for job in jobs}


def test_verify_says_which_of_them_resume(converted: dict[str, Job], saved: Library, tmp_path: Path) -> None:
    """Those from which the libraries go on, in the other tests, and what stops them or makes them start afresh."""
    for name, job in converted.items():
        found = resumption(job.path, "trainer" if name.startswith(("trainer", "deepspeed: trainer")) else "accelerate")
        if name in ("trainer: without-state", "trainer: by-accelerate"):
            continue  # below
        assert found.missing == () and found.command is None, name
    (reason,) = resumption(converted["trainer: without-state"].path, "trainer").missing
    assert "no trainer_state.json: without it trainer stops with FileNotFoundError" in reason
    source = saved.saved / "trainer-sharded2" / STEP
    for removed, expected in (("optimizer_0", "optimizer is missing"), ("scheduler.pt", "starts with a new optimizer")):
        target = tmp_path / removed / STEP
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(removed))
        if removed == "optimizer_0":
            (target / "scheduler.pt").unlink()
            (target / "rng_state_0.pth").unlink()
            (target / "rng_state_1.pth").unlink()
            (target / "rng_state_2.pth").unlink()
        found = resumption(target, "trainer")
        assert any(expected in reason for reason in found.missing), found
    other = resumption(source, "accelerate")
    assert not other.resumes and other.command is not None and "--world-size 2 --flavor accelerate" in other.command
    assert other.still_missing == ()
    ranks = resumption(saved.saved / "accelerate-ranks2", "accelerate")
    assert "load only on the 3 ranks" in ranks.missing[0] and ranks.command is not None
    assert resumption(saved.saved / "accelerate-ranks2", "accelerate", ranks=3).resumes
    more = resumption(saved.saved / "accelerate-sharded2", "accelerate", ranks=5)
    assert more.resumes and any(change.startswith("ranks 3, 4 of 5: no random_states_N.pkl") for change in more.changes)


@pytest.fixture(scope="module")
def losses(saved: Library, converted: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return saved.losses(list(converted.values()), tmp_path_factory.mktemp("losses"))


def test_accelerate_goes_on_from_every_form_as_from_pytorchs_own_resharding(saved: Library, losses: Losses) -> None:
    for source, form in PATHS:
        assert inspect(saved.saved / f"accelerate-{source}").checkpoint.flavor == "accelerate"
        found, expected = losses[f"{source} to {form}"], losses[source[-1] + form[-1]]
        assert len(expected[0]) == 5, expected
        assert found == expected, (source, form)


def test_the_trainer_resumes_from_every_form_as_from_pytorchs_own_resharding(
    losses: Losses,
) -> None:
    for source, form in TRAINER_PATHS:
        found, expected = losses[f"trainer: {source} to {form}"], losses[f"trainer: {source[-1]}{form[-1]}"]
        assert len(expected[0]) == 4, expected
        assert expected[0][0] != expected[1][0], "each rank has its own data, and dropout by its own random state"
        assert found == expected, (source, form)
        steps = [step for step, _ in json.loads(found[0][-1])]
        assert steps == [1, 2, 3, 4, 5], "the history of the three steps before came along"


def test_the_trainer_resumes_at_its_step_from_a_checkpoint_of_accelerate(
    saved: Library, converted: dict[str, Job], losses: Losses
) -> None:
    found, expected = (losses[f"trainer: {name}"] for name in ("by-accelerate", "by-itself"))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs and ours[2] == "5", "two losses, to which the optimizer belongs, step and learning rates"
    assert "FileNotFoundError" in losses["trainer: without-state"][0][0]
    between = converted["trainer: by-accelerate"].path.parent.parent / "between"
    schedule = torch.load(saved.saved / "trainer-sharded2" / STEP / "scheduler.pt", weights_only=True)
    assert torch.load(between / "scheduler.bin", weights_only=True) == schedule
    assert verify(between).whole and verify(converted["trainer: by-accelerate"].path).whole


def test_fsdp2_goes_on_from_deepspeed_as_deepspeed_itself(
    by_deepspeed: Path, converted: dict[str, Job], losses: Losses
) -> None:
    """On 2 ranks instead of 4: the same losses, random states and learning rates."""
    for source in DEEPSPEED:
        expected = json.loads((by_deepspeed / f"{source}.json").read_text())
        assert [each[:2] for each in losses[f"deepspeed: {source}"]] == [each[:2] for each in expected[:2]], source
    assert losses["deepspeed: accelerate"] == json.loads((by_deepspeed / "accelerate.json").read_text())[:2]
    rates = [rate for _, rate in json.loads(losses["deepspeed: trainer"][0][-1])]
    theirs = [rate for _, rate in json.loads(json.loads((by_deepspeed / "trainer.json").read_text())[0][-1])]
    assert (rates[:3], rates[3:]) == (theirs[:3], theirs[2:4])  # under DeepSpeed it logs those of the next step
    assert not (by_deepspeed / "trainer" / STEP / "scheduler.pt").exists()
    schedule = torch.load(converted["deepspeed: trainer"].path / "scheduler.pt", weights_only=True)
    assert schedule["last_epoch"] == 3


def test_every_file_beside_a_checkpoint_of_the_trainer_arrives(saved: Library, converted: dict[str, Job]) -> None:
    for source, form in TRAINER_PATHS:
        run, target = saved.saved / f"trainer-{source}", converted[f"trainer: {source} to {form}"].path
        assert inspect(run).checkpoint.flavor == "trainer"
        beside = {path.name for path in (run / STEP).iterdir() if path.suffix in (".pt", ".pth", ".json")}
        assert {"scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_2.pth"} <= beside
        if form.startswith("sharded") or source == form:
            beside.remove("rng_state_2.pth")
            assert not (target / "rng_state_2.pth").exists()
        for name in beside:
            assert (target / name).read_bytes() == (run / STEP / name).read_bytes(), name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("accelerate-sharded2", "random_states_{}.pkl"),
        ("accelerate-full1", "random_states_{}.pkl"),
        (f"trainer-sharded2/{STEP}", "rng_state_{}.pth"),
    ],
)
def test_more_ranks_than_saved_share_the_random_states(source: str, name: str, saved: Library, tmp_path: Path) -> None:
    written(saved.saved / source, tmp_path / "five", to="sharded", world_size=5)
    for rank in range(5):
        expected = (saved.saved / source / name.format(rank % 3)).read_bytes()
        assert (tmp_path / "five" / name.format(rank)).read_bytes() == expected
    assert verify(tmp_path / "five").whole


@pytest.mark.parametrize("source", ["sharded1", "ranks2", "sharded2"])
def test_every_form_of_one_training_becomes_the_full_checkpoint_that_accelerate_saves(
    source: str, saved: Library, tmp_path: Path
) -> None:
    written(saved.saved / f"accelerate-{source}", tmp_path / "full", to="full")
    assert_full(tmp_path / "full", saved.saved / f"accelerate-full{source[-1]}")


def test_local_state_dicts_for_other_ranks_hold_the_same_training(saved: Library, tmp_path: Path) -> None:
    report = written(saved.saved / "accelerate-local1", tmp_path / "two", **DEFAULT)
    names = {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert {"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "optimizer_0/.metadata"} <= names
    # accelerate does not load its own: nothing says that it does, and what is proposed makes files that it loads.
    assert not report.loads and any(
        "accelerate does not load its own flattened files" in each for each in report.warnings
    )
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "two" / "pytorch_model_fsdp_rank0.bin", weights_only=True)
    refused = resumption(tmp_path / "two", "accelerate")
    assert not refused.resumes and refused.command is not None and "--to sharded" in refused.command
    written(tmp_path / "two", tmp_path / "sharded", to="sharded", world_size=2)
    assert resumption(tmp_path / "sharded", "accelerate").resumes
    written(tmp_path / "two", tmp_path / "full", to="full")
    assert_full(tmp_path / "full", saved.saved / "accelerate-full1")


@pytest.mark.parametrize("source", ["accelerate-sharded1", "accelerate-ranks2", "accelerate-full2", "trainer-sharded2"])
def test_one_file_loads_with_torch_load(source: str, saved: Library, tmp_path: Path) -> None:
    report = written(saved.saved / source, tmp_path / "full.pt")
    found = torch.load(tmp_path / "full.pt")
    assert found["model"] and found["optimizer"]["state"].keys() <= found["model"].keys()
    random_states = found["rng_state" if source.startswith("trainer") else "random_states"]
    state = random_states["numpy" if source.startswith("trainer") else "numpy_random_seed"]
    np.random.RandomState().set_state(state)
    (note,) = (note.message for note in report.notes if note.kind == "plain")
    assert f"--flavor {source.partition('-')[0]}" in note


def assert_full(found: Path, expected: Path) -> None:
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        ours, theirs = (torch.load(path / name, weights_only=True) for path in (found, expected))
        assert list(differences(ours, theirs, f"{name}: ")) == []
