"""``--ignore-file`` leaves one of two copies out, and the error that names both says how to type it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.api import inspect_incomplete
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError, SourceUnrecognisedError, UsageError
from fsdpckpt.readers.candidates import glob_of
from fsdpckpt.readers.protocol import Part, PartContents
from tests.makers import dcp_of
from tests.oracle.compare import identical

GOLDEN = Path(__file__).parent.parent / "golden"
MODEL = {"a.w": torch.randn(5, 3), "a.b": torch.randn(5)}
EXPORT = {name: tensor + 1 for name, tensor in MODEL.items()}
STATE = {
    "state": {name: {"exp_avg": torch.randn_like(tensor)} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": 0.1, "params": list(MODEL)}],
}


def accelerate(path: Path, export: str) -> None:
    """State with an export in it, as a training script leaves it that ends with ``save_model``."""
    dcp_of({"model": MODEL})(path / "pytorch_model_fsdp_0")
    dcp_of({"optimizer": STATE})(path / "optimizer_0")
    (path / export).parent.mkdir(exist_ok=True)
    save_file(EXPORT, path / export)


def typed(error: NeedsInformationError) -> list[str]:
    """The globs that the message tells to type."""
    words = shlex.split(re.sub(r"[,:;]", " ", str(error.next_step)))
    return [words[at + 1] for at, word in enumerate(words) if word == "--ignore-file"]


def weight(path: Path, **options: Any) -> torch.Tensor:
    with fsdpckpt.open(path, **options) as checkpoint:
        found: torch.Tensor = checkpoint["a.w"].torch()
    return found


@pytest.mark.parametrize("export", ["final/model.safetensors", "consolidated.safetensors"])
def test_an_export_beside_the_state_is_left_out(export: str, tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", export)
    with pytest.raises(NeedsInformationError, match="2 candidates for the model") as caught:
        fsdpckpt.inspect(source)
    assert typed(caught.value) == [export]
    assert str(caught.value.next_step).endswith(f"; or give {source / export} as SRC")
    ignored: dict[str, Any] = {"ignore_file": typed(caught.value)}
    assert identical(weight(source, **ignored), MODEL["a.w"])
    assert len(fsdpckpt.inspect(source, **ignored).to_json()["sections"]) >= 2
    assert fsdpckpt.verify(source, **ignored).whole
    report = fsdpckpt.convert(source, tmp_path / "out", world_size=2, **ignored)
    assert report.flavor == "accelerate" and not (tmp_path / "out" / export).exists()
    assert any(export in note.keys for note in report.notes if note.kind == "ignored")
    assert fsdpckpt.diff(source, tmp_path / "out", **ignored).same
    assert identical(weight(source, ignore_file=["pytorch_model_fsdp_0", "optimizer_0"]), EXPORT["a.w"])
    fsdpckpt.convert(source, tmp_path / "dir", world_size=2, ignore_file=[export.partition("/")[0] + "/"])


def test_a_file_in_a_dcp_directory_is_left_out(tmp_path: Path) -> None:
    dcp_of({"model": MODEL, "optimizer": STATE})(tmp_path / "dcp")
    torch.save(EXPORT, tmp_path / "dcp" / "model.pt")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt")
    assert typed(caught.value) == ["model.pt"]
    assert str(caught.value.next_step).endswith(" --ignore-file model.pt")
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt", ignore_file="model.pt")
    assert identical(torch.load(tmp_path / "full.pt")["model"]["a.w"], MODEL["a.w"])


def test_files_that_another_file_names_are_left_out_too(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "dcp")
    with pytest.raises(SourceIncompleteError, match="1 of 1 data files is missing"):
        fsdpckpt.inspect(tmp_path / "dcp", ignore_file="__0_0.distcp")
    (tmp_path / "shards").mkdir()
    for number, (name, tensor) in enumerate(MODEL.items()):
        save_file({name: tensor}, tmp_path / "shards" / f"part{number}.safetensors")
    index = {"weight_map": {name: f"part{number}.safetensors" for number, name in enumerate(MODEL)}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceIncompleteError, match="1 of them cannot be found"):
        fsdpckpt.inspect(tmp_path / "shards", ignore_file="part1.safetensors")
    zero = GOLDEN / "deepspeed" / "zero2-fp32"
    assert fsdpckpt.inspect(zero, ignore_file="truth.pt")
    with pytest.raises(SourceUnrecognisedError, match="no checkpoint was found"):
        fsdpckpt.inspect(zero, ignore_file=["truth.pt", "global_step3"])


def test_a_units_file_is_left_out_below_the_source_and_not_above(tmp_path: Path) -> None:
    units = {"w": torch.zeros(3)}
    (source := tmp_path / "run" / "step-1").mkdir(parents=True)
    torch.save(units, source / "model.pt")
    (source / "units.json").write_text("x")
    (source.parent / "units.json").write_text("y")
    assert fsdpckpt.inspect(source, ignore_file="units.json")
    (source / "units.json").unlink()
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.inspect(source, ignore_file="units.json")


def test_a_file_that_the_manifest_lists_is_left_out_and_not_missing(tmp_path: Path) -> None:
    torch.save({"model": MODEL, "optimizer": STATE}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", to="sharded", container="torch", world_size=2)
    ignored = "optim_world_size_2_rank_*.pt"
    assert fsdpckpt.verify(tmp_path / "out", ignore_file=ignored).whole
    assert fsdpckpt.inspect(tmp_path / "out", ignore_file=ignored).to_json()["problems"] == []


def test_a_name_with_brackets_is_left_out_of_the_copies(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", "model.safetensors")
    (source / "scheduler[1].bin").write_bytes(b"x")
    ignored = ["model.safetensors", "scheduler*"]
    fsdpckpt.convert(source, tmp_path / "out", world_size=2, ignore_file=ignored)
    assert not (tmp_path / "out" / "scheduler[1].bin").exists()


def test_sets_of_files_are_left_out_by_one_glob(tmp_path: Path) -> None:
    (source := tmp_path / "both").mkdir()
    for rank in range(3):
        torch.save({**MODEL, "own": torch.tensor([rank])}, source / f"model_world_size_3_rank_{rank}.pt")
    for number in (1, 2):
        name = list(EXPORT)[number - 1]
        save_file({name: EXPORT[name]}, source / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.inspect(source)
    assert typed(caught.value) == ["model-*.safetensors"]  # what the job itself wrote is kept
    assert fsdpckpt.inspect(source, ignore_file=["model-*.safetensors"])


def test_what_the_ranks_wrote_is_kept_and_not_what_was_gathered_from_it(tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copy(
            GOLDEN / "torch-2.4/f2_plain_t" / f"model_{rank}.pt", tmp_path / f"model_world_size_2_rank_{rank}.pt"
        )
    truth = torch.load(GOLDEN / "torch-2.4/f2_plain_t/truth/full.pt", weights_only=False)["model"]
    torch.save(dict(truth), tmp_path / "full.pt")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.inspect(tmp_path)
    assert typed(caught.value) == ["full.pt"]
    torch.save({f"head.{name}": tensor for name, tensor in truth.items()}, tmp_path / "full.pt")
    with pytest.raises(NeedsInformationError, match="they hold different parameters") as caught:
        fsdpckpt.inspect(tmp_path)
    assert typed(caught.value) == [], "it may be the rest of the model"


@pytest.mark.parametrize(
    ("label", "names", "glob"),
    [
        ("/run/final/model.safetensors", "", "final/model.safetensors"),
        ("/run/m_world_size_12_rank_0.pt .. m_world_size_12_rank_11.pt", "m_world_size_12_rank_*.pt", None),
        ("/run/x/rank0-of-2-model.bin .. rank1-of-2-model.bin", "rank*-of-2-model.bin", "x/rank*-of-2-model.bin"),
        ("/run/model-*.safetensors", "model-*.safetensors", None),
        ("/run/model.safetensors.index.json", "", "model*.safetensors*"),
        ("/run", "", ""),
    ],
)
def test_a_part_is_named_by_the_glob_that_leaves_it_out(label: str, names: str, glob: str | None) -> None:
    def read(*_: object) -> PartContents:
        raise AssertionError("not to be read")

    assert glob_of(Part(label, "stem", read, names), "/run/") == (names if glob is None else glob)


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", "model.safetensors")
    shutil.rmtree(source / "optimizer_0")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.inspect(source, ignore_file=["model.safetensors", "nowhere.pt"])
    torch.save(MODEL, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.verify(tmp_path / "model.pt", ignore_file=["model.pt"])


def test_what_is_left_out_is_no_part_of_what_can_be_read_alone(tmp_path: Path) -> None:
    """And the command that converts it leaves the same out."""
    (source := tmp_path / "both").mkdir()
    for rank in range(2):
        torch.save(MODEL, source / f"model_world_size_2_rank_{rank}.pt")
        torch.save(STATE, source / f"optim_world_size_2_rank_{rank}.pt")
    (source / "optim_world_size_2_rank_1.pt").unlink()
    save_file(EXPORT, source / "export.safetensors")
    for command, words in (
        (fsdpckpt.verify, "--only model --ignore-file 'export.*'"),
        (fsdpckpt.inspect, "--only model --ignore-file 'export.*'"),
        (lambda path, **ignored: fsdpckpt.convert(path, tmp_path / "out", **ignored), "add --only model"),
    ):
        with pytest.raises(SourceIncompleteError) as caught:
            command(source, ignore_file=["export.*"])
        text = caught.value.text
        if command is fsdpckpt.inspect:
            left = inspect_incomplete(source, caught.value, ignore_file=("export.*",))
            assert left is not None and list(left.readable) == ["model"]
            (text,) = left.commands
        assert words in text
        with pytest.raises(SourceIncompleteError) as caught:
            command(source, ignore_file=["export.*", "model_*_rank_0.pt"])
        assert "--only model" not in caught.value.text
