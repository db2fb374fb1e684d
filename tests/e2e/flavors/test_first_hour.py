"""The first hour with a framework's own checkpoint, as a new user spends it: the README's commands, one after another,
typed as they stand there, on what the framework saved.
"""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import Run, run
from tests.e2e.flavors.conftest import LibraryOf
from tests.oracle.compare import identical

__all__ = ["run"]

GOLDEN = Path(__file__).parents[2] / "golden"
README = (Path(__file__).parents[3] / "README.md").read_text()
UNITS = ("--unit", "model.layers.*")


def recipe(source: str) -> list[str]:
    """The README's command that resumes ``source`` on 6 GPUs, without its comment."""
    (line,) = (line for line in README.splitlines() if line.startswith(f"$ fsdpckpt convert {source} on-6 "))
    return shlex.split(line.removeprefix("$ "), comments=True)[1:]


def put(source: Path, place: Path, where: str) -> None:
    """The checkpoint under the name that the README has for it."""
    (place / where).parent.mkdir(parents=True, exist_ok=True)
    (place / where).symlink_to(source)


@pytest.mark.parametrize(
    ("library_name", "saved", "name", "framework", "more"),
    [
        ("verl", "verl1/global_step_3/actor", "global_step_7/actor", "verl", UNITS),
        ("verl", "verl2/global_step_3/actor", "global_step_7/actor", "verl", ()),
        ("transformers", "trainer-sharded2/STEP", "checkpoint-500", "trainer", ()),
        ("transformers", "accelerate-sharded2", "state", "accelerate", ()),
    ],
    ids=["verl-fsdp1", "verl-fsdp2", "trainer", "accelerate"],
)
def test_a_job_of_the_framework_is_resumed_on_6_ranks_by_the_readmes_commands(
    library_name: str, saved: str, name: str, framework: str, more: tuple[str, ...],
    library: LibraryOf, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory = library(library_name).saved
    (source,) = [directory / saved] if "STEP" not in saved else directory.glob(saved.replace("STEP", "checkpoint-*"))
    put(source, tmp_path, name)
    monkeypatch.chdir(tmp_path)
    done = run(*recipe(name), *more)
    assert done.code == 0, done.err
    assert "warning: saved on" in done.err  # the global batch
    loads = re.search(r"^load it with: (.*)$", done.out + done.err, re.M)
    assert loads is not None and "on-6" in loads[1]
    done = run("verify", "on-6", "--for", framework, "--world-size", "6", "--json")
    document = json.loads(done.out)
    assert document["whole"] and document["resumption"]["resumes"], document
    compared = run("diff", name, "on-6")  # the units that on-6/fsdpckpt.json records name the slices of both
    assert compared.code == 0, compared.out + compared.err
    if more:
        assert run("diff", name, "on-6", "--units", "on-6/fsdpckpt.json").code == 0


def test_the_weights_of_a_colleagues_deepspeed_folder_go_to_hugging_face(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is, whether it is whole, and the weights: by the README's commands alone."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it loads the weights")
    with tarfile.open(GOLDEN / "deepspeed" / "trainer.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "trainer" / "checkpoint-3").rename(tmp_path / "checkpoint-500")
    monkeypatch.chdir(tmp_path)
    looked = run("inspect", "checkpoint-500")
    assert looked.code == 0 and "checkpoint-500: sharded, deepspeed (trainer), 4 ranks" in looked.out
    assert run("verify", "checkpoint-500").code == 0
    (line,) = (line for line in README.splitlines() if line.startswith("$ fsdpckpt convert checkpoint-500 hf "))
    words = shlex.split(line.removeprefix("$ fsdpckpt "))
    words = words[: words.index("--reference")]  # its config.json is here
    assert run(*words).code == 0
    model, loading = transformers.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    with fsdpckpt.open("checkpoint-500") as checkpoint:
        names = {name for name in checkpoint if not name.startswith("rng_state")}
        for name, weight in model.state_dict().items():
            assert identical(weight, checkpoint[name].torch().to(weight.dtype)), name
    assert run("diff", "checkpoint-500", "hf", "--only", "model").code == 0
    # With a rank's file missing, it says which, and that nothing of ZeRO's weights is whole without it.
    (path,) = (tmp_path / "checkpoint-500").glob("global_step*/*zero_pp_rank_2_*optim_states.pt")
    path.unlink()
    left = run("inspect", "checkpoint-500")
    assert left.code == 3 and path.name in left.out and "optim_states.pt  ++-+" in left.out
    words = shlex.split(left.err.rstrip().splitlines()[-1])  # the copies that the model computed with
    assert words[3:] == ["DST", "--only", "model"]
    assert run(*words[1:3], "weights.pt", *words[4:]).code == 0
    assert torch.load("weights.pt").keys() == set(model.state_dict()) <= names


def test_the_weights_of_a_colleagues_folder_go_to_hugging_face(
    library: LibraryOf, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's optimizer was not copied: what can be read is shown, and the model is taken alone."""
    actor = library("verl").saved / "verl1" / "global_step_3" / "actor"
    (tmp_path / "actor").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in actor.iterdir():
        if not path.name.startswith("optim_world_size_4_rank_2"):
            (tmp_path / "actor" / path.name).symlink_to(path)
    looked = run("inspect", "actor")
    assert looked.code == 3 and "optim_world_size_4_rank_2.pt" in looked.out + looked.err
    refused = run("convert", "actor", "hf", "--flavor", "huggingface")
    assert refused.code == 3 and "add --only model" in refused.err
    done = run("convert", "actor", "hf", "--flavor", "huggingface", "--only", "model")
    assert done.code == 0, done.err
    assert "AutoModel" in done.out + done.err
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it loads the weights")
    _, loading = transformers.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.is_tensor(next(iter(_.parameters())))
