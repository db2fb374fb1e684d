"""Lightning trains on 3 ranks, we convert, Lightning resumes on 2 with the losses of PyTorch's resharding."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpckpt.api import inspect
from tests.e2e.flavors.conftest import Job, Library, LibraryOf, resumption, written

SHARDED: dict[str, object] = {"to": "sharded", "world_size": 2}
# What was saved, what Lightning loads, and the conversion between them.
PATHS = (
    ("fabric-full", "fabric-sharded", {"flavor": "fabric", **SHARDED}),
    ("fabric-sharded", "fabric-full", {}),
    ("fabric-sharded", "fabric-sharded", {"world_size": 2}),
    ("trainer-full", "trainer-sharded", {"buffers": ("inner.scale",), **SHARDED}),
    ("trainer-sharded", "trainer-full", {"buffers": ("inner.scale",)}),  # ids count frozen parameters, not buffers
    ("parallel-sharded", "parallel-sharded", {"world_size": 2}),
    ("parallel-sharded", "parallel-full", {"buffers": ("inner.scale",)}),
)


@pytest.fixture(scope="module")
def lightning(library: LibraryOf) -> Library:
    return library("lightning")


def test_training_goes_on_from_every_form_as_from_pytorchs_own_resharding(lightning: Library, tmp_path: Path) -> None:
    jobs = []
    recognised = {  # one file of Fabric's is as anyone saves it
        "fabric-full": "plain",
        "fabric-sharded": "fabric",
        "parallel-sharded": "lightning-model-parallel",
    }
    for source, form, options in PATHS:
        assert inspect(lightning.saved / named(source)).checkpoint.flavor == recognised.get(source, "lightning")
        target = tmp_path / named(form, f"{source}-")
        written(lightning.saved / named(source), target, **options)
        jobs.append(Job(f"{source} to {form}", form, target))
    foreign = tmp_path / "from-fabric"
    written(lightning.saved / "fabric-full.ckpt", foreign, flavor="lightning", add_prefix="inner.", **SHARDED)
    jobs.append(Job("from fabric", "trainer-sharded", foreign))
    for form in ("fabric-sharded", "trainer-sharded", "parallel-sharded"):
        jobs.append(Job(form, form, lightning.saved / form))
    for job in jobs:
        flavor = {"trainer": "lightning", "parallel": "lightning-model-parallel"}.get(
            job.form.partition("-")[0], "fabric"
        )
        said = resumption(job.path, flavor)
        assert said.resumes or job.form == "fabric-full", (
            job.id,
            said,
        )  # as anyone saves it: nothing shows whose it is
    losses = lightning.losses(jobs, tmp_path)
    for source, form, _ in PATHS:
        found, expected = losses[f"{source} to {form}"], losses[form.partition("-")[0] + "-sharded"]
        assert len(expected[0]) == 4, expected
        assert found == expected, (source, form)
    found = [rank[:2] for rank in losses["from fabric"]]
    assert found == [rank[:2] for rank in losses["fabric-sharded"]], "the Trainer goes on where Fabric stopped"


def named(form: str, prefix: str = "") -> str:
    return prefix + form + (".ckpt" if form.endswith("full") else "")
