"""The frameworks of ``with_layouts`` save on 3 ranks, we convert, and their loaders continue on 2 with equal losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fsdpckpt.api import inspect, verify
from fsdpckpt.ir.account import Fate
from tests.e2e.flavors.conftest import LIMIT, LOADED_BY, SAVED_BY, Job, Library, Losses, resumption, written
from tests.e2e.flavors.with_layouts import FRAMEWORKS, PLACES
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle, void

MODULE = "tests.e2e.flavors.with_layouts"
FLAVORS = {
    "transformers": "transformers-distributed",
    "nemo-rl": "nemo-rl-v1",
    "nemo-rl-v2": "nemo-rl",
    "automodel-torch": "automodel",
}
MOVED = {  # the target's framework, and what the source lacks for it
    "nemo-rl": ("prime-rl", ""),
    "skyrl": ("prime-rl", ""),
    "prime-rl": ("veomni", ""),
    "torchtune": ("nemo-rl", ""),
    "olmo-core": ("torchtune", "train"),
    "transformers": ("olmo-core", ""),
}


def flavor_of(name: str) -> str:
    return FLAVORS.get(name, name)


@pytest.fixture(scope="module")
def layouts(oracle: Oracle) -> Library:
    def save(directory: Path) -> None:
        void(torchrun(MODULE, "save", str(directory), world_size=SAVED_BY, limit=LIMIT))

    return Library(MODULE, oracle.once("flavors-layouts", save))


@pytest.fixture(scope="module")
def loaded(layouts: Library, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Losses, dict[str, str]]:
    """Every conversion, what the ranks say that loaded them, and what was said of those to another framework."""
    scratch = tmp_path_factory.mktemp("layouts")
    jobs, said = [Job("reference", "veomni", layouts.saved / "veomni" / PLACES["veomni"])], {}
    for name in FRAMEWORKS:
        written(layouts.saved / name, scratch / name, world_size=LOADED_BY)
        jobs.append(Job(name, name, scratch / name))
    for name, (source, _) in MOVED.items():
        report = written(
            layouts.saved / source, scratch / f"to-{name}", flavor=flavor_of(name), to="sharded", world_size=LOADED_BY,
            mesh_device="cpu" if name == "skyrl" else None,
        )  # fmt: skip
        said[name] = "\n".join(note.message for note in report.notes)
        jobs.append(Job(f"to-{name}", name, scratch / f"to-{name}"))
    written(
        layouts.saved / "automodel-torch", scratch / "to-safetensors", container="safetensors", world_size=LOADED_BY
    )
    jobs.append(Job("to-safetensors", "automodel", scratch / "to-safetensors"))
    return scratch, layouts.losses(jobs, scratch), said


@pytest.mark.parametrize("name", [*FRAMEWORKS, "to-safetensors"])
def test_each_framework_goes_on_as_from_its_own_files_and_verify_says_so(
    loaded: tuple[Path, Losses, dict[str, str]], name: str
) -> None:
    path, losses, _ = loaded
    assert losses["reference"][0][-1] == "4", losses["reference"]
    assert losses[name] == losses["reference"]
    if name in FRAMEWORKS:
        assert not resumption(path / name, flavor_of(name)).missing


@pytest.mark.parametrize("name", MOVED)
def test_it_goes_on_from_another_framework_or_says_what_it_lacks(
    loaded: tuple[Path, Losses, dict[str, str]], name: str
) -> None:
    _, losses, said = loaded
    lacking = MOVED[name][1]
    if lacking:
        assert f"has no {lacking}: without it" in said[name]
        return
    found = [rank[:2] for rank in losses[f"to-{name}"]]
    assert found == [rank[:2] for rank in losses["reference"]], losses[f"to-{name}"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_it_is_recognised_by_name_and_every_file_is_accounted_for(layouts: Library, name: str) -> None:
    source = layouts.saved / name
    checkpoint = inspect(source).checkpoint
    assert checkpoint.flavor == flavor_of(name)
    account = checkpoint.ledger.account
    files = [path for path in source.rglob("*") if path.is_file()]
    fates = {path: account.of(str(path.relative_to(source))) for path in files}
    assert all(fates.values())
    unread = {path.name for path, found in fates.items() if found is not None and found.fate is Fate.LEFT_OUT}
    described = {".metadata.json", "config.json", "config.yaml", "losses.json", "meta.json", "tokenizer_config.json"}
    described |= {"fsdp_config.json", "data.pt", "trainer_state.pt", "metadata.json", "CHECKPOINT_COMPLETE"}
    assert unread <= described


@pytest.mark.parametrize("name", ["veomni", "automodel"])
def test_a_rank_without_its_file_would_stop_and_the_proposed_conversion_makes_one(
    layouts: Library, tmp_path: Path, name: str
) -> None:
    said = resumption(layouts.saved / name, name, ranks=5)
    assert any("ranks 3, 4 of 5: no " in each and "stops there" in each for each in said.missing), said.missing
    assert said.command is not None and "--world-size 5" in said.command and not said.still_missing
    written(layouts.saved / name, tmp_path / "on-5", world_size=5)
    assert resumption(tmp_path / "on-5", name, ranks=5).resumes


def test_files_with_the_state_of_a_rank_are_those_of_the_ranks_that_there_are(layouts: Library, tmp_path: Path) -> None:
    report = written(layouts.saved / "prime-rl", tmp_path / "on-5", world_size=5)
    assert sorted(path.name for path in (tmp_path / "on-5" / "dataloader").iterdir()) == [
        f"rank_{rank}.pt" for rank in range(5)
    ]
    assert any("rank_{rank}.pt: ranks 3 and 4" in note.message for note in report.notes)


def test_a_file_that_says_it_is_another_rank_is_a_problem(layouts: Library, tmp_path: Path) -> None:
    shutil.copytree(layouts.saved / "skyrl", tmp_path / "skyrl")
    file = next((tmp_path / "skyrl").rglob("extra_state_world_size_3_rank_1.pt"))
    torch.save({**torch.load(file, weights_only=False), "rank": 2}, file)
    problems = verify(tmp_path / "skyrl").problems
    assert [(problem.kind, problem.rank, problem.message) for problem in problems] == [
        ("rank-mismatch", 1, "rank of rank 1 is 2, and its files say 1")
    ]


@pytest.mark.parametrize("world_size", [None, 2])
def test_a_file_that_holds_the_optimizer_is_read_and_not_copied_too(
    layouts: Library, tmp_path: Path, world_size: int | None
) -> None:
    """torchtune's ``recipe_state.pt`` has the optimizer, unless the recipe is a distributed one."""
    written(layouts.saved / "torchtune", tmp_path / "full.pt")
    found = torch.load(tmp_path / "full.pt", weights_only=False)
    source = tmp_path / "epoch_1"
    source.mkdir()
    safetensors.torch.save_file(found["model"], source / "ft-model-00001-of-00001.safetensors")
    torch.save({"optimizer": found["optimizer"], "epochs_run": 1}, source / "recipe_state.pt")
    options = {"flavor": "torchtune", "to": "sharded", "world_size": world_size}
    written(source, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "recipe_state.pt").exists()


def test_the_facts_of_a_rank_are_those_of_the_new_ranks(layouts: Library, tmp_path: Path) -> None:
    written(layouts.saved / "skyrl", tmp_path / "on-5", world_size=5)
    assert json.loads((tmp_path / "on-5" / "fsdp_config.json").read_text())["world_size"] == 5
    for rank in range(5):
        extra = torch.load(tmp_path / "on-5" / f"extra_state_world_size_5_rank_{rank}.pt", weights_only=False)
        assert (extra["rank"], extra["world_size"]) == (rank, 5)
