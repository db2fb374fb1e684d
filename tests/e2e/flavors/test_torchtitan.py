"""torchtitan saves on 3 ranks, we convert, torchtitan resumes on 2 as from its own resharding."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fsdpckpt.api import inspect
from tests.e2e.flavors.conftest import Job, Library, LibraryOf, Loaded, resumption, written
from tests.e2e.flavors.truth import of_reference
from tests.oracle.compare import identical

SHARDED: dict[str, object] = {"to": "sharded", "world_size": 2}


@pytest.fixture(scope="module")
def torchtitan(library: LibraryOf) -> Library:
    return library("torchtitan")


@pytest.fixture(scope="module")
def loaded(torchtitan: Library, library: LibraryOf, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every conversion, and what torchtitan's ranks say of them."""
    scratch = tmp_path_factory.mktemp("torchtitan")
    new, old = torchtitan.saved / "torchtitan", torchtitan.saved / "torchtitan-old"
    written(new, scratch / "new" / "step-3", world_size=2)
    written(old, scratch / "old-kept" / "step-3", world_size=2)
    written(old, scratch / "from-old" / "step-3", flavor="torchtitan", **SHARDED)
    written(new, scratch / "old" / "step-3", flavor="torchtitan-old", **SHARDED)
    jobs = [
        Job("reference", "torchtitan", new),
        Job("new", "torchtitan", scratch / "new"),
        Job("from-old", "torchtitan", scratch / "from-old"),
        Job("old", "torchtitan-old", scratch / "old" / "step-3"),
        Job("old-kept", "torchtitan-old", scratch / "old-kept" / "step-3"),
    ]
    if find_spec("verl") is not None:
        verl = library("verl").saved
        written(verl / "verl2h", scratch / "from-verl" / "step-3", flavor="torchtitan", **SHARDED)
        jobs.append(Job("from-verl", "torchtitan-causal", scratch / "from-verl"))
        jobs.append(Job("reference verl", "reference-causal", verl / "reference2h" / "step-3"))
    return scratch, torchtitan.losses(jobs, scratch)


@pytest.mark.parametrize("name", ["new", "from-old", "old", "old-kept"])
def test_torchtitan_goes_on_as_from_its_own_resharding(loaded: Loaded, name: str) -> None:
    _, losses = loaded
    assert "'step': 3" in losses["reference"][0][-1]
    assert losses[name] == losses["reference"]


def test_verify_says_which_generation_of_torchtitan_resumes(loaded: Loaded, torchtitan: Library) -> None:
    for name, flavor in (("new", "torchtitan"), ("old", "torchtitan-old")):
        path = loaded[0] / name / "step-3"
        other = {"torchtitan": "torchtitan-old", "torchtitan-old": "torchtitan"}[flavor]
        assert resumption(path, flavor).resumes
        said = resumption(path, other)
        assert not said.resumes and said.command is not None and f"--flavor {other}" in said.command


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: scripts/env installs it")
def test_torchtitan_goes_on_from_verls_mesh_of_replicas(loaded: Loaded) -> None:
    _, losses = loaded
    assert [rank[:2] for rank in losses["from-verl"]] == losses["reference verl"]
    assert "'step': 0" in losses["from-verl"][0][-1], "verl has no trainer's state for it"


def test_torchtitan_keeps_the_readers_of_all_ranks(loaded: Loaded, torchtitan: Library) -> None:
    found, source = (
        FileSystemReader(path / "step-3").read_metadata().state_dict_metadata
        for path in (loaded[0] / "new", torchtitan.saved / "torchtitan")
    )
    assert found.keys() == source.keys()
    assert {f"dataloader.dp_rank_{rank}" for rank in range(3)} <= found.keys()


def test_one_file_of_torchtitans_checkpoint_is_what_pytorch_reads_of_it(torchtitan: Library, tmp_path: Path) -> None:
    source = torchtitan.saved / "torchtitan"
    assert inspect(source).checkpoint.flavor == "torchtitan"
    written(source, tmp_path / "full.pt", to="full")
    found = torch.load(tmp_path / "full.pt")
    content = of_reference(source / "step-3", tmp_path / "truth.pt")
    optimizer = content.pop("optimizer")
    assert len(found["model"]) == 13 and len(found["optimizer"]["state"]) == 12
    assert [found[key] for key in ("lr_scheduler", "train_state")] == [
        content.pop(key) for key in ("lr_scheduler", "train_state")
    ]
    assert found["dataloader"] == content.pop("dataloader")
    assert found["model"].keys() == content.keys()
    assert all(identical(found["model"][key], content[key]) for key in content)
    for name, state in found["optimizer"]["state"].items():
        for key, value in state.items():
            assert identical(value, optimizer[f"state.{name}.{key}"])
    for group in found["optimizer"]["param_groups"]:
        for name in group["params"]:
            assert group["lr"] == optimizer[f"param_groups.{name}.lr"]
