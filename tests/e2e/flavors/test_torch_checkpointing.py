"""torch_checkpointing saves on 4 ranks, we convert, it loads on 2: every value is the one that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.flavors.conftest import Job, Library, LibraryOf, Losses, resumption, written

# What was saved, and the conversions after which it is loaded: to its own ranks, and to others, which it reshards from.
SAVED: dict[str, dict[str, object]] = {"torch": {}, "safetensors": {}, "replicas": {"mesh": ("2",)}}


@pytest.fixture(scope="module")
def library_of_items(library: LibraryOf) -> Library:
    return library("torch_checkpointing")


@pytest.fixture(scope="module")
def loaded(library_of_items: Library, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    scratch = tmp_path_factory.mktemp("torch_checkpointing")
    jobs = []
    for form, options in SAVED.items():
        source = library_of_items.saved / form
        written(source, scratch / f"{form}-2", **options, **({} if options else {"world_size": 2}))
        jobs.append(Job(f"{form}-2", "torch", scratch / f"{form}-2"))
    written(scratch / "torch-2", scratch / "dcp", flavor="plain")
    written(scratch / "dcp", scratch / "from-dcp", flavor="torch_checkpointing", key_type="id", world_size=3)
    written(scratch / "torch-2", scratch / "torch-3", world_size=3)
    written(library_of_items.saved / "replicas", scratch / "replicas-6", mesh=("replicate=2,shard=3",))
    for name in ("from-dcp", "torch-3", "replicas-6"):
        jobs.append(Job(name, "torch", scratch / name))
    return library_of_items.losses(jobs, scratch)


def test_every_value_is_the_one_that_was_saved(library_of_items: Library, loaded: Losses) -> None:
    for id_, ranks in loaded.items():
        form = "torch" if id_ == "from-dcp" else id_.partition("-")[0]
        truth = (library_of_items.saved / f"{form}.digests").read_text().splitlines()
        assert [said[: len(truth)] for said in ranks] == [truth, truth], id_


def test_each_rank_has_its_own_items(loaded: Losses) -> None:
    for id_, ranks in loaded.items():
        others = "3 [0]" if id_ == "from-dcp" else "3 [1]"  # DCP keeps what rank 0 has
        assert [said[-1] for said in ranks] == ["3 [0]", others], id_


def test_verify_says_that_it_resumes(library_of_items: Library) -> None:
    assert resumption(library_of_items.saved / "torch", "torch_checkpointing", ranks=4).resumes


def test_files_in_directories_are_read(library_of_items: Library, tmp_path: Path) -> None:
    report = written(library_of_items.saved / "safetensors", tmp_path / "full.pt")
    assert not any("rank_" in note.message for note in report.notes if note.kind == "not-carried")
