"""accelerate trains on 3 ranks, we convert, accelerate goes on with 2: the same losses as by PyTorch's resharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdpckpt.api import inspect
from fsdpckpt.ir.checkpoint import Container, Layout
from tests.e2e.flavors.conftest import Job, Library, written
from tests.oracle.compare import differences

FORMS = {
    "full": {"to": Layout.FULL},
    "sharded": {"to": Layout.SHARDED, "container": Container.DCP, "world_size": 2},
    "ranks": {
        "to": Layout.SHARDED,
        "container": Container.TORCH,
        "world_size": 2,
        "buffers": ("scale",),
        "mesh_device": "cpu",
    },
}


@pytest.fixture(scope="module")
def accelerate(library: Callable[..., Library]) -> Library:
    return library("accelerate")


# LOCAL_STATE_DICT is no target here: accelerate does not load its own (torch.load refuses ShardedTensor).
# What was saved, what accelerate loads: within FSDP1 and FSDP2, and from one to the other.
PATHS = (
    ("local1", "sharded1"),
    ("sharded1", "full1"),
    ("full1", "ranks2"),
    ("ranks2", "sharded2"),
    ("sharded2", "full2"),
)


def test_training_goes_on_from_every_form_as_from_pytorchs_own_resharding(accelerate: Library, tmp_path: Path) -> None:
    jobs = []
    for source, form in PATHS:
        target = tmp_path / f"{source}-{form}"
        assert inspect(accelerate.saved / f"accelerate-{source}").checkpoint.flavor == "accelerate"
        written(accelerate.saved / f"accelerate-{source}", target, flavor="accelerate", **FORMS[form[:-1]])
        jobs.append(Job(f"{source} to {form}", form, target))
    references = {source[-1] + form[-1] for source, form in PATHS}
    jobs += [
        Job(trained + loaded, f"sharded{loaded}", accelerate.saved / f"accelerate-sharded{trained}")
        for trained, loaded in sorted(references)
    ]
    losses = accelerate.losses(jobs, tmp_path)
    for source, form in PATHS:
        found, expected = losses[f"{source} to {form}"], losses[source[-1] + form[-1]]
        assert len(expected[0]) == 5, expected
        assert found == expected, (source, form)


def test_local_state_dicts_for_other_ranks_hold_the_same_training(accelerate: Library, tmp_path: Path) -> None:
    flattened = {"flavor": "accelerate", "to": Layout.FLATTENED, "world_size": 2}
    written(accelerate.saved / "accelerate-local1", tmp_path / "two", **flattened)
    names = {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert {"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "optimizer_0/.metadata"} <= names
    written(tmp_path / "two", tmp_path / "full", flavor="accelerate", to=Layout.FULL)
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        found = torch.load(tmp_path / "full" / name, weights_only=True)
        expected = torch.load(accelerate.saved / "accelerate-full1" / name, weights_only=True)
        assert list(differences(found, expected, f"{name}: ")) == []
