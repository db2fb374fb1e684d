"""verl's and torchtitan's checkpoints of 4 ranks, converted, go on with 2: losses as by PyTorch's resharding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest

from fsdpckpt.api import inspect
from fsdpckpt.ir.checkpoint import Layout
from tests.e2e.flavors.conftest import Job, Library, written

SHARDED: dict[str, object] = {"to": Layout.SHARDED, "world_size": 2}
FLATTENED: dict[str, object] = {"to": Layout.FLATTENED, "world_size": 2}
UNITS: dict[str, object] = {"unit": ("blocks.*",)}
# What was saved, what is loaded, and the conversion between them.
PATHS = (
    ("verl2", "verl2", {"flavor": "verl", "mesh_device": "cpu", **SHARDED}),
    ("verl1", "verl1", {"flavor": "verl", "mesh_device": "cpu", **FLATTENED, **UNITS}),
    ("verl1", "verl2", {"flavor": "verl", "mesh_device": "cpu", **SHARDED, **UNITS}),
    ("verl2", "verl1", {"flavor": "verl", "mesh_device": "cpu", **FLATTENED, **UNITS, "use_orig_params": False}),
    ("verl1h", "verl2", {"flavor": "verl", "mesh_device": "cpu", **SHARDED, **UNITS}),
    ("verl2h", "torchtitan2", {"flavor": "torchtitan", **SHARDED}),
    ("torchtitan2", "torchtitan2", {"flavor": "torchtitan", **SHARDED}),
    ("torchtitan2", "torchtitan-old2", {"flavor": "torchtitan-old", **SHARDED}),
    ("torchtitan-old2", "torchtitan2", {"flavor": "torchtitan", **SHARDED}),
)


def kind(form: str) -> str:
    """1 or 2, with h for a mesh of replicas."""
    return form.lstrip("-" + ascii_lowercase)


@pytest.fixture(scope="module")
def calls(library: Callable[..., Library]) -> Library:
    return library("torch", ranks=4)


def test_training_goes_on_from_every_form_as_from_pytorchs_own_resharding(calls: Library, tmp_path: Path) -> None:
    jobs = []
    references = {(kind(source), kind(form)) for source, form, _ in PATHS}
    for number, (source, form, options) in enumerate(PATHS):
        assert inspect(calls.saved / source).checkpoint.flavor == source.partition("-")[0].rstrip("12h")
        target = tmp_path / f"{number}"
        written(calls.saved / source, target, **options)
        jobs.append(Job(str(number), form, target))
    for trained, loaded in sorted(references):
        path = calls.saved / f"reference{trained}" / "step-3"
        jobs.append(Job(f"{trained} {loaded}", f"reference{loaded}", path))
    losses = calls.losses(jobs, tmp_path)
    for number, (source, form, _) in enumerate(PATHS):
        expected = losses[f"{kind(source)} {kind(form)}"]
        assert len(expected[0]) == 2, expected
        assert [found[:2] for found in losses[str(number)]] == expected, (source, form)
    drawn = [ranks[2:] for ranks in losses["0"]]
    assert len(drawn[0]) == 3 and drawn[0] != drawn[1], "each rank has random states of its own"


def test_verls_configuration_and_tokenizer_arrive(calls: Library, tmp_path: Path) -> None:
    target = tmp_path / "actor"
    written(calls.saved / "verl2", target, flavor="verl", **SHARDED)
    assert json.loads((target / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 2}
    source = calls.saved / "verl2" / "global_step_3" / "actor" / "huggingface"
    for name in ("config.json", "tokenizer.json"):
        assert (target / "huggingface" / name).read_bytes() == (source / name).read_bytes()


def test_verls_weights_become_a_directory_of_hugging_face(calls: Library, tmp_path: Path) -> None:
    report = written(calls.saved / "verl2", tmp_path / "hf", flavor="huggingface")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "fsdpckpt.json",
    }  # fmt: skip
    said = [note.message for note in report.notes if note.kind == "not-carried"]
    assert any("optimizer" in line for line in said) and any("lr_scheduler, rng" in line for line in said)
