"""verl saves on 4 ranks, we convert, verl resumes on 2: losses as from PyTorch's resharding; its merger agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdpckpt.api import inspect
from fsdpckpt.errors import NeedsInformationError
from tests.e2e.flavors.conftest import Job, Library, LibraryOf, Loaded, resumption, written
from tests.e2e.flavors.truth import differences, of_reference
from tests.oracle.compare import identical

UNITS: dict[str, object] = {"unit": ("model.layers.*",)}
SHARDED: dict[str, object] = {"to": "sharded", "world_size": 2}
FLATTENED: dict[str, object] = {"to": "flattened", "world_size": 2, **UNITS}
VERL: dict[str, object] = {"mesh_device": "cpu"}
# What was saved, what is loaded (1 and 2 are FSDP1 and FSDP2, h a mesh of replicas), and the conversion between them.
PATHS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("2", "2", {"world_size": 2}),  # what a user types who must resume on 2 GPUs
    ("1", "1", {"world_size": 2, **UNITS}),
    ("1", "2", {**SHARDED, **UNITS}),
    ("2", "1", {**FLATTENED, "use_orig_params": False}),
    ("1h", "2", {**SHARDED, **UNITS, "mesh": ("fsdp=2",)}),
    ("1h", "1", {"to": "flattened", **UNITS, "mesh": ("fsdp=2",)}),
    ("2h", "2", {**SHARDED, "mesh": ("fsdp=2",)}),
)
REPLICAS: dict[str, object] = {"mesh": ("ddp=2,fsdp=2",)}
ON_REPLICAS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("2", "2h", {"to": "sharded", **REPLICAS}),
    ("1", "1h", {"to": "flattened", **REPLICAS, **UNITS}),
    ("1h", "2h", {"to": "sharded", "world_size": 4, **UNITS}),
)


@pytest.fixture(scope="module")
def verl(library: LibraryOf) -> Library:
    return library("verl")


@pytest.fixture(scope="module")
def loaded(verl: Library, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every conversion, and what verl's ranks say of them; two of them merged by verl as well."""
    scratch = tmp_path_factory.mktemp("verl")
    jobs = []
    for saved, goes_on, options in PATHS:
        target = scratch / f"{saved}-{goes_on}"
        written(verl.saved / f"verl{saved}", target, **VERL, **options)
        jobs.append(Job(target.name, f"verl{goes_on}", target))
    bare = of_reference(verl.saved / "reference2" / "step-3", scratch / "bare.pt")
    torch.save({section: bare[section] for section in ("model", "optimizer")}, scratch / "bare.pt")
    written(scratch / "bare.pt", scratch / "bare", flavor="verl", **VERL, **SHARDED, buffers=("none",))
    jobs.append(Job("bare", "verl2", scratch / "bare"))
    for saved, goes_on in sorted({(saved, goes_on) for saved, goes_on, _ in PATHS}):
        path = verl.saved / f"reference{saved}" / "step-3"
        jobs.append(Job(f"reference {saved}-{goes_on}", f"reference{goes_on}", path))
    for name in ("2-2", "1-1"):
        jobs.append(Job(f"merged {name}", "merged", scratch / name))
    for kind in ("2", "1", "2h"):  # below a name of its own, beside which its merger writes
        source = scratch / f"source{kind}"
        source.symlink_to(verl.saved / f"verl{kind}" / "global_step_3" / "actor")
        jobs.append(Job(f"merged source{kind}", "merged", source))
    return scratch, verl.losses(jobs, scratch)


def test_verl_goes_on_from_every_form_as_from_pytorchs_own_resharding_and_verify_says_so(
    loaded: Loaded, verl: Library
) -> None:
    scratch, losses = loaded
    for saved, goes_on, _ in PATHS:
        expected = losses[f"reference {saved}-{goes_on}"]
        assert [len(rank) for rank in expected] == [4, 4]
        assert [rank[:4] for rank in losses[f"{saved}-{goes_on}"]] == expected, (saved, goes_on)
        drawn = [rank[4:] for rank in losses[f"{saved}-{goes_on}"]]
        assert len(drawn[0]) == 3 and drawn[0] != drawn[1], "each rank has random states of its own"
        assert resumption(scratch / f"{saved}-{goes_on}", "verl").resumes, (saved, goes_on)
    said = resumption(verl.saved / "verl2", "verl", ranks=6)
    assert said.command is not None and "--world-size 6" in said.command
    assert [reason for reason in said.missing if "load only on the 4 ranks" in reason] == list(said.missing)
    # A file that has neither a schedule nor random states.
    assert [rank[:2] for rank in losses["bare"]] == [rank[:2] for rank in losses["reference 2-2"]]
    assert [rank[3] for rank in losses["bare"]] == ["2", "2"], "the schedule began anew, two steps ago"


def test_verl_goes_on_with_replicas(verl: Library, tmp_path: Path) -> None:
    jobs = []
    for saved, goes_on, options in ON_REPLICAS:
        written(verl.saved / f"verl{saved}", tmp_path / f"{saved}-{goes_on}", **VERL, **options)
        jobs.append(Job(f"{saved}-{goes_on}", f"verl{goes_on}", tmp_path / f"{saved}-{goes_on}"))
        reference = verl.saved / f"reference{saved}" / "step-3"
        jobs.append(Job(f"reference {saved}-{goes_on}", f"reference{goes_on}", reference))
    losses = verl.losses(jobs, tmp_path, ranks=4)
    for saved, goes_on, _ in ON_REPLICAS:
        expected = losses[f"reference {saved}-{goes_on}"]
        assert [len(rank) for rank in expected] == [4] * 4
        assert [rank[:4] for rank in losses[f"{saved}-{goes_on}"]] == expected, (saved, goes_on)


@pytest.mark.parametrize(
    ("saved", "options", "mesh", "group"),
    [
        ("1h", {"world_size": 8}, "ddp=2,fsdp=4", 4),
        ("2h", {"world_size": 8, "use_orig_params": False}, "ddp=2,fsdp=4", 4),
        ("1h", {"world_size": 8, "strategy": "hybrid-shard", "shard_size": 2}, "ddp=4,fsdp=2", 2),
        ("1h", {"mesh": ("ddp=4,fsdp=2",)}, "ddp=4,fsdp=2", 2),
        ("1h", {"mesh": ("fsdp=8",)}, "fsdp=8", None),
        ("1h", {"world_size": 8, "strategy": "full-shard"}, "fsdp=8", None),
    ],
)
def test_the_groups_of_flat_parameters_are_the_rows_of_the_mesh_of_the_weights(
    verl: Library, tmp_path: Path, saved: str, options: dict[str, object], mesh: str, group: int | None
) -> None:
    written(verl.saved / f"verl{saved}", tmp_path / "out", to="flattened", **VERL, **UNITS, **options)
    found = inspect(tmp_path / "out").checkpoint
    assert {str(leaf.sharding.mesh) for leaf in found.leaves() if leaf.sharding is not None} == {mesh}
    units = json.loads((tmp_path / "out" / "fsdpckpt.json").read_text())["units"]
    assert units.get("shard_size") == group


@pytest.mark.parametrize("name", ["2-2", "1-1", "source2", "source1", "source2h"])
def test_verls_merger_makes_the_same_of_our_files_as_we_of_verls(
    loaded: Loaded, verl: Library, tmp_path: Path, name: str
) -> None:
    assert loaded[1][f"merged {name}"] == [[], []]
    kind = name.removeprefix("source").partition("-")[0]
    source = verl.saved / f"verl{kind}"
    written(source, tmp_path / "hf", flavor="huggingface", dtype="bfloat16")
    theirs = load_file(loaded[0] / f"{name}-merged" / "model.safetensors")
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    assert ours.keys() == theirs.keys() and len(ours) == 21
    assert all(ours[key].dtype == torch.bfloat16 and identical(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("kind", ["1", "2", "1h", "2h"])
def test_one_file_of_verls_checkpoint_is_what_pytorch_says_of_the_training(
    verl: Library, tmp_path: Path, kind: str
) -> None:
    source = verl.saved / f"verl{kind}"
    assert inspect(source).checkpoint.flavor == "verl"
    units = UNITS if kind.startswith("1") else {}
    written(source, tmp_path / "full.pt", to="full", key_type="name", **units)
    found = torch.load(tmp_path / "full.pt")
    expected = of_reference(verl.saved / f"reference{kind}" / "step-3", tmp_path / "truth.pt")
    assert len(found["model"]) == 21 and len(found["optimizer"]["state"]) == 21
    assert differences(found, expected) == []


def test_verls_configuration_and_tokenizer_arrive(loaded: Loaded, verl: Library) -> None:
    for name, version in (("2-2", 2), ("1-1", 1)):
        target = loaded[0] / name
        assert json.loads((target / "fsdp_config.json").read_text()) == {"FSDP_version": version, "world_size": 2}
        source = verl.saved / f"verl{version}" / "global_step_3" / "actor" / "huggingface"
        names = {path.name for path in source.iterdir()}
        assert names == {path.name for path in (target / "huggingface").iterdir()} >= {"config.json", "tokenizer.json"}
        assert all((target / "huggingface" / one).read_bytes() == (source / one).read_bytes() for one in names)


def test_verls_weights_become_a_directory_of_hugging_face(verl: Library, tmp_path: Path) -> None:
    report = written(verl.saved / "verl2", tmp_path / "hf", flavor="huggingface")
    found = {path.name for path in (tmp_path / "hf").iterdir()}
    assert found == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "fsdpckpt.json"}
    said = [note.message for note in report.notes if note.kind == "not-carried"]
    assert any("optimizer" in line for line in said) and any("lr_scheduler, rng" in line for line in said)


def test_a_step_of_reinforcement_learning_is_its_actor_and_of_two_roles_neither_is_chosen(
    verl: Library, tmp_path: Path
) -> None:
    step = tmp_path / "run" / "global_step_3"
    shutil.copytree(verl.saved / "verl2" / "global_step_3" / "actor", step / "actor")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save({"_snapshot": {"_snapshot_step": 41}}, step / "data.pt")
    report = written(tmp_path / "run", tmp_path / "out", **VERL, **SHARDED)
    assert (tmp_path / "out" / "huggingface" / "config.json").is_file()
    assert any("not copied from" in note.message and "data.pt" in note.message for note in report.notes)
    shutil.copytree(step / "actor", step / "critic")
    with pytest.raises(NeedsInformationError, match="2 checkpoints"):
        inspect(tmp_path / "run")


def test_data_loaders_of_supervised_training_go_to_the_ranks_of_their_number(verl: Library, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_3"
    shutil.copytree(verl.saved / "verl2" / "global_step_3" / "actor", step)
    for rank in range(4):
        torch.save({"_snapshot": {"_snapshot_step": 41 + rank}}, step / f"data_{rank}.pt")
    report = written(tmp_path / "run", tmp_path / "out", **VERL, **SHARDED)
    assert [path.name for path in sorted((tmp_path / "out").glob("data_*"))] == ["data_0.pt", "data_1.pt"]
    assert all(
        (tmp_path / "out" / f"data_{rank}.pt").read_bytes() == (step / f"data_{rank}.pt").read_bytes()
        for rank in range(2)
    )
    assert any("data_{2..3}.pt" in note.message for note in report.notes if note.kind == "not-carried")
