"""Every command after ``next:`` is one that the command line takes, as it was printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from fsdpckpt.cli.app import app
from tests.cli.conftest import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-2.4"
RANKS = ("--to", "sharded", "--container", "torch", "--world-size", "2")
# What a user does with the sources below that cannot end well: in the words of the command line.
FAILING = """
inspect nowhere | inspect nowhere/at/all | inspect full.pt/ | inspect notes | verify several | inspect empty
inspect dcp --keys nothing | inspect dcp --section nothing | inspect dcp --verbose | inspect dcp --version
inspect no-metadata | inspect truncated | inspect no-rank | inspect torn.pt | inspect dcp more | inspect '' | inspect s3://
verify damaged.pt | verify no-metadata | verify truncated | verify no-rank | verify torn.pt | verify dcp --include x
verify dcp --finite --include nothing | diff dcp nowhere | diff ids.pt dcp | diff dcp dcp --rtol x | diff dcp
convert dcp full.pt | convert dcp notes | convert dcp notes --overwrite | convert dcp torn.pt --overwrite
convert dcp . | convert dcp dcp | convert dcp dcp/in | convert dcp out.tp
convert dcp out --include nothing | convert dcp out --rename nothing=x | convert dcp out --reference nowhere
convert dcp out --like nowhere | convert dcp out --units nowhere | convert dcp out --buffers nothing
convert dcp out --mesh x | convert dcp out --only extra | convert dcp out --to flat | convert dcp out --to huggingface
convert dcp out --to flattened --world-size 2 | convert dcp out --to sharded --container torch
convert model.pt out --to sharded --container torch --world-size 2 | convert dcp out --flavor deepspeed
convert dcp out.pt --max-memory 1 | convert dcp out.pt --threads 0 | convert dcp out.pt --nproc-per-node x
convert dcp out.pt --launcher torchrun | convert dcp out.pt --force | convert dcp out.pt --container safetensors
convert damaged.pt out.pt | convert no-metadata out.pt | convert truncated out.pt | convert no-rank out.pt
convert flat out.pt | convert several out.pt | convert several.pt out.pt
units | units --from dcp | units --from nowhere | units --from dcp --wrap a:B | units --model a:b --unit x
units --from dcp -o notes
verfy dcp | nothing
"""
COMMANDS = [command.strip() for line in FAILING.strip().splitlines() for command in line.split(" | ")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of several forms, whole and damaged, and with what is none."""
    from fsdpckpt import convert

    root = tmp_path_factory.mktemp("sources")
    dcp = shutil.copytree(GOLDEN / "f2_default" / "ckpt", root / "dcp")
    convert(dcp, root / "full.pt")
    convert(dcp, root / "model.pt", only="model")
    convert(dcp, root / "ids.pt", only="optim", to="full", key_type="id", reference=str(root / "full.pt"))
    convert(dcp, root / "no-rank", to="sharded", container="torch", world_size=2, only="model")
    (root / "no-rank" / "model_world_size_2_rank_1.pt").unlink()
    (root / "no-rank" / "fsdpckpt.json").unlink()
    (shutil.copytree(dcp, root / "no-metadata") / ".metadata").unlink()
    os.truncate(shutil.copytree(dcp, root / "truncated") / "__0_0.distcp", 100)
    data = bytearray((root / "full.pt").read_bytes())
    (root / "torn.pt").write_bytes(data[:1000])
    data[len(data) // 2] ^= 1
    (root / "damaged.pt").write_bytes(data)
    flat = shutil.copytree(GOLDEN / "f1_flat_raw", root / "flat")
    shutil.rmtree(flat / "truth")
    (root / "several").mkdir()
    for name in ("a.pt", "b.pt"):
        shutil.copy(root / "model.pt", root / "several" / name)
    (root / "notes").mkdir()
    (root / "notes" / "thesis.tex").write_text("notes")
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_is_advised_is_one(words: str, run: Run, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sources)
    done = run(*shlex.split(words))
    assert done.code in range(1, 6), f"{done.code}: {done.err}"
    for command in advised(done.err):
        take(command)
    assert not {"out", "out.pt", "out.tp"} & set(os.listdir()) and "nothing" not in os.listdir("dcp")


def advised(error: str) -> list[list[str]]:
    """The commands in ``error``: those on lines of their own behind a colon, and those in back quotes."""
    _, there, after = error.partition("next: ")
    first, *others = after.splitlines() if there else [""]
    said = [line.strip() for line in others if line.startswith("  ")]
    assert not first.rstrip().endswith(":") or said
    assert not re.search(r"^fsdpckpt|  #", first), f"a command to copy stands on a line of its own: {first}"
    quoted = re.findall(r"`(fsdpckpt [^`]*)`", error)
    return [shlex.split(command) for command in (*said, *quoted) if command != "fsdpckpt units"]


def take(command: list[str]) -> None:
    """Parse ``command`` as the program would, and look at the paths in it. Raises what the parser raises."""
    if command[0] == "torchrun":
        command = command[command.index("fsdpckpt") :]
    if command[0] in ("ls", "mv"):
        assert shutil.which(command[0]) and os.path.lexists(command[2 if command[1].startswith("-") else 1])
        return
    assert command[0] == "fsdpckpt", command
    if command[1:] in (["--help"], ["--version"]):
        return
    program: Any = typer.main.get_command(app)
    named = program.commands[command[1]]
    if command[2:] == ["--help"]:
        return
    with named.make_context(command[1], list(command[2:])) as context:
        for name in ("source", "a", "b"):
            path = context.params.get(name)
            assert path is None or path == "DST" or os.path.lexists(path), path
