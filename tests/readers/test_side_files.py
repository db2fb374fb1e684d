"""Files beside a checkpoint: carried as they are by the same producer, Hugging Face's by those that keep them.

What this program wrote is held against its ``fsdpckpt.json`` before anything is made of it.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters import Report
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.errors import SourceError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import EvidenceKind, Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.progress import NoProgress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.side_files import side_files
from fsdpckpt.storage.sources import Sources
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_missing_sections import verl

OPTIMIZER = {"state": {"w": {"exp_avg": torch.randn(5, 3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A Trainer's directory of 3 ranks, with files that this program must not open, and one of no bytes."""
    path = tmp_path / "checkpoint-9"
    path.mkdir()
    torch.save({"w": torch.randn(5, 3)}, path / "pytorch_model_fsdp.bin")
    torch.save({"w": torch.randn(5, 3)}, path / "pytorch_model.bin")
    torch.save(OPTIMIZER, path / "optimizer.bin")
    torch.save({"last_epoch": 4}, path / "scheduler.pt")
    generator = random.Random(5)
    for name in ("training_args.bin", "trainer_state.json", "config.json", "tokenizer.json", "vocab.txt", "notes.xyz"):
        (path / name).write_bytes(generator.randbytes(101))
    (path / "empty.txt").write_bytes(b"")
    for rank in range(3):
        (path / f"rng_state_{rank}.pth").write_bytes(generator.randbytes(77 + rank))
    return path


def to(source: Path, target: Path, **options: object) -> Report:
    return convert(Solo(), str(source), str(target), ConvertOptions(**options), NoProgress())  # type: ignore[arg-type]


def names(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {"fsdpckpt.json"}


def test_the_same_producers_files_arrive_byte_for_byte(trainer: Path, tmp_path: Path) -> None:
    report = to(trainer, tmp_path / "out", to=Layout.SHARDED, world_size=2)
    state = {name for name in names(tmp_path / "out") if "/" in name}
    carried = names(trainer) - {"pytorch_model_fsdp.bin", "pytorch_model.bin", "optimizer.bin", "rng_state_2.pth"}
    assert names(tmp_path / "out") - state == carried
    for name in carried:
        assert (tmp_path / "out" / name).read_bytes() == (trainer / name).read_bytes()
    (copied,) = [note for note in report.notes if note.kind == "carried"]
    assert set(copied.keys) == carried and copied.message.startswith("copied unchanged: ")
    left = [note.message for note in report.notes if note.kind == "not-carried"]
    assert len(left) == 1 and "pytorch_model.bin" in left[0] and "rng_state_2.pth" in left[0]


@pytest.mark.parametrize("flavor", ["trainer", "torchtitan", "plain"])
def test_hidden_files_are_not_copied_and_named(trainer: Path, tmp_path: Path, flavor: str) -> None:
    (trainer / ".gitattributes").write_text("*.bin filter=lfs")
    (trainer / ".cache").mkdir()
    (trainer / ".cache" / "state").write_bytes(b"1234")
    (trainer / "logs").mkdir()
    (trainer / "logs" / "events").write_bytes(b"1234")
    (trainer / "optimizer.bin").unlink()
    dcp.save({"optimizer": OPTIMIZER}, checkpoint_id=trainer / "optimizer_0")
    (trainer / "optimizer_0" / ".nfs01").write_bytes(b"1234")
    report = to(trainer, tmp_path / "out", flavor=flavor, to=Layout.SHARDED, world_size=2)
    left = "\n".join(note.message for note in report.notes if note.kind == "not-carried")
    named = [*(key for note in report.notes for key in note.keys), left]
    for name in (".gitattributes", ".cache", "logs", ".nfs01"):
        assert any(name in each for each in named), name
    assert not any(name.startswith((".git", ".cache")) for name in names(tmp_path / "out"))


@pytest.mark.parametrize(("ranks", "world", "given", "reused"), [
    (3, 1, [0], None), (3, 3, [0, 1, 2], None), (3, 0, [0, 1, 2], None),
    (3, 5, [0, 1, 2, 0, 1], "ranks 3 and 4 reuse the files of ranks 0 and 1"),
    (1, 2, [0, 0], "rank 1 reuses the file of rank 0"),
])  # fmt: skip
def test_rank_r_gets_the_random_states_of_rank_r_modulo_the_sources(
    trainer: Path, tmp_path: Path, ranks: int, world: int, given: list[int], reused: str | None
) -> None:
    """Those of a run of one rank have no number; a full target keeps the states of all ranks."""
    states = [(trainer / f"rng_state_{rank}.pth").read_bytes() for rank in range(3)]
    if ranks == 1:
        (trainer / "rng_state_0.pth").rename(trainer / "rng_state.pth")
        for rank in (1, 2):
            (trainer / f"rng_state_{rank}.pth").unlink()
    options = {"to": Layout.SHARDED, "world_size": world} if world else {"to": Layout.FULL}
    report = to(trainer, tmp_path / "out", flavor="trainer", **options)
    said = [note.message for note in report.notes if "reuse" in note.message]
    assert said == ([f"rng_state_{{rank}}.pth: {reused}"] if reused else [])
    own = sorted(name for name in names(tmp_path / "out") if name.startswith("rng_state"))
    assert own == (["rng_state.pth"] if world == 1 else [f"rng_state_{rank}.pth" for rank in range(world or 3)])
    for name, source in zip(own, given, strict=True):
        assert (tmp_path / "out" / name).read_bytes() == states[source]


def test_another_producer_gets_what_hugging_face_keeps_beside_a_model(trainer: Path, tmp_path: Path) -> None:
    (trainer / "config.json").write_text("{}")
    report = to(trainer, tmp_path / "out", flavor="huggingface")
    assert names(tmp_path / "out") == {"model.safetensors", "config.json", "tokenizer.json", "vocab.txt"}
    said = [note for note in report.notes if note.kind == "not-carried"]
    named = {key for note in said for key in note.keys}
    assert {"scheduler.pt", "training_args.bin", "trainer_state.json", "notes.xyz", "rng_state_2.pth"} <= named
    assert not {"scheduler", "rng_state"} & named, "said once, as files"
    assert any("optimizer" in note.message for note in said)


def test_the_directory_that_verl_exports_to_is_copied_as_a_whole(tmp_path: Path) -> None:
    verl(source := tmp_path / "actor")
    exported = {"huggingface/config.json", "huggingface/model.safetensors", "huggingface/more/notes.xyz"}
    for name in exported:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    to(source, tmp_path / "three", to=Layout.SHARDED, world_size=3, buffers=("none",))
    assert {name for name in names(tmp_path / "three") if "/" in name} == exported
    to(source, tmp_path / "weights", flavor="accelerate", to=Layout.FULL)
    assert {name for name in names(tmp_path / "weights") if name.endswith((".json", ".xyz"))} == {"config.json"}


def test_what_was_written_is_known_as_the_producers_and_goes_on_with_its_files(trainer: Path, tmp_path: Path) -> None:
    to(trainer, tmp_path / "two", flavor="trainer", to=Layout.SHARDED, world_size=2)
    to(tmp_path / "two", tmp_path / "again", flavor="trainer", to=Layout.FULL)
    for name in ("training_args.bin", "notes.xyz", "rng_state_1.pth"):
        assert (tmp_path / "again" / name).read_bytes() == (trainer / name).read_bytes()
    saved = torch.load(trainer / "pytorch_model_fsdp.bin", weights_only=True)
    assert identical(torch.load(tmp_path / "again" / "pytorch_model_fsdp.bin", weights_only=True)["w"], saved["w"])


def test_a_plain_target_gets_none_of_them(trainer: Path, tmp_path: Path) -> None:
    to(trainer, tmp_path / "out", flavor="plain", container="torch", to=Layout.SHARDED, world_size=2, buffers=("none",))
    assert "training_args.bin" not in names(tmp_path / "out")
    (tmp_path / "out" / "fsdp_config.json").write_text("{}")  # with it the files have verl's names
    with Sources() as sources:
        assert open_checkpoint(str(tmp_path / "out"), sources=sources).flavor == "plain"


def test_a_file_that_was_read_for_its_extras_is_listed_once(trainer: Path) -> None:
    flavor = flavor_named("trainer")
    assert flavor is not None
    with Sources() as sources:
        checkpoint = open_checkpoint(str(trainer), sources=sources)
        beside = side_files(checkpoint, flavor, 2, sources)
        paths = [file.path for file in (*checkpoint.files, *beside.sources)]
        assert len(set(paths)) == len(paths) and any(path.endswith("scheduler.pt") for path in paths)
        for name, tensor in beside.files.items():
            assert paths[int(tensor.chunks.file[0])] == str(trainer / name), name


# --- what is said is what was done ------------------------------------------------------------------------------------


def said(report: Report) -> dict[str, set[str]]:
    kinds = ("carried", "not-carried")
    return {kind: {key for note in report.notes if note.kind == kind for key in note.keys} for kind in kinds}


def test_a_target_of_one_file_has_no_copies_and_says_so(tmp_path: Path) -> None:
    (source := tmp_path / "last.ckpt").mkdir()
    dcp.save({"model": {"w": torch.randn(5, 3)}, "optimizer_0": OPTIMIZER}, checkpoint_id=source, no_dist=True)
    meta = {"pytorch-lightning_version": "2.6.6", "loops": {}, "lr_schedulers": [], "epoch": 1, "global_step": 3}
    torch.save(meta, source / "meta.pt")
    (source / "hparams.yaml").write_text("lr: 1")
    one = to(source, tmp_path / "one.ckpt", to=Layout.FULL)
    assert one.flavor == "lightning" and (tmp_path / "one.ckpt").is_file()
    assert said(one)["carried"] == set() and "hparams.yaml" in said(one)["not-carried"]
    many = to(source, tmp_path / "many", world_size=2)
    assert said(many)["carried"] == {"hparams.yaml"} and (tmp_path / "many" / "hparams.yaml").exists()


def test_what_replaces_a_file_of_the_source_is_what_was_copied(trainer: Path, tmp_path: Path) -> None:
    (trainer / "config.json").write_text("{}")
    (reference := tmp_path / "base").mkdir()
    (reference / "config.json").write_text('{"architectures": ["X"]}')
    to(trainer, tmp_path / "out", flavor="huggingface", reference=str(reference))
    report = to(trainer, tmp_path / "again", flavor="huggingface", reference=str(reference))
    assert (tmp_path / "out" / "config.json").read_text() == (reference / "config.json").read_text()
    copies = {note.message.partition(":")[0]: note.keys for note in report.notes if note.kind == "carried"}
    assert copies == {
        f"copied from {reference}": ("config.json",),
        "copied unchanged": ("tokenizer.json", "vocab.txt"),
    }
    document = json.loads((tmp_path / "out" / "fsdpckpt.json").read_text())
    assert "config.json" not in document["copied"], "that of the source is not"


@pytest.mark.parametrize("flavor", ["trainer", "huggingface", "accelerate", "plain", "verl", "torchtitan"])
def test_every_file_that_is_said_to_be_copied_is_there(flavor: str, trainer: Path, tmp_path: Path) -> None:
    (trainer / "config.json").write_text("{}")
    options = {} if flavor in ("huggingface", "plain") else {"to": Layout.SHARDED, "world_size": 2}
    report = to(trainer, tmp_path / "out", flavor=flavor, buffers=("none",), **options)
    there = names(tmp_path / "out") if (tmp_path / "out").is_dir() else set()
    assert said(report)["carried"] <= there
    assert not said(report)["not-carried"] & there


SHARDED = {"to": "sharded", "world_size": 2}
MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"


def full(path: Path, seed: int) -> Path:
    draw = torch.Generator().manual_seed(seed)
    model = {"a.weight": torch.randn(7, 5, generator=draw), "a.bias": torch.randn(7, generator=draw)}
    states = {key: {"exp_avg": torch.randn(value.shape, generator=draw)} for key, value in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": groups}}, path)
    return path


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    """accelerate's form: the model and the optimizer in directories of their own, below the manifest's."""
    source = full(tmp_path / "one.pt", 1)
    fsdpckpt.convert(source, tmp_path / "accelerate", flavor="accelerate", **SHARDED)
    return tmp_path / "accelerate"


def refusal(source: Path, tmp_path: Path, **options: object) -> str:
    """What a conversion says that it refuses."""
    with pytest.raises(SourceError) as refused:
        fsdpckpt.convert(source, tmp_path / "out.pt", to="full", **options)
    assert not (tmp_path / "out.pt").exists()
    return "\n".join(refused.value.details)


def test_metadata_of_another_save_in_a_directory_below_is_refused(accelerate: Path, tmp_path: Path) -> None:
    path = accelerate / MODEL_FOLDER / ".metadata"
    fsdpckpt.convert(full(tmp_path / "two.pt", 2), tmp_path / "two", flavor="accelerate", to="sharded", world_size=3)
    shutil.copy(tmp_path / "two" / MODEL_FOLDER / ".metadata", path)
    for data in (tmp_path / "two" / MODEL_FOLDER).glob("*.distcp"):
        shutil.copy(data, accelerate / MODEL_FOLDER)
    said = refusal(accelerate, tmp_path)
    assert f"{path} does not match" in said
    (accelerate / "fsdpckpt.json").unlink()
    fsdpckpt.convert(accelerate, tmp_path / "out.pt", to="full")


def test_metadata_of_the_same_length_is_refused_if_its_bytes_are_others(accelerate: Path, tmp_path: Path) -> None:
    path = accelerate / MODEL_FOLDER / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"a.bias", b"a.bean"))
    assert f"{path} does not match" in refusal(accelerate, tmp_path)
    assert EvidenceKind.MANIFEST not in [each.kind for each in opened(accelerate).evidence]


def test_a_part_that_is_gone_is_an_error_and_not_a_smaller_checkpoint(accelerate: Path, tmp_path: Path) -> None:
    shutil.rmtree(accelerate / OPTIMIZER_FOLDER)
    assert f"{OPTIMIZER_FOLDER}/.metadata is missing" in refusal(accelerate, tmp_path)
    fsdpckpt.convert(accelerate, tmp_path / "model.pt", to="full", only="model")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_missing_rank_file_of_the_optimizer_leaves_the_model_whole(tmp_path: Path, *, sealed: bool) -> None:
    source = full(tmp_path / "one.pt", 1)
    ranks = tmp_path / "ranks"
    fsdpckpt.convert(source, ranks, container="torch", buffers=["none"], **SHARDED)
    (ranks / "optim_world_size_2_rank_1.pt").unlink()
    if not sealed:
        (ranks / "fsdpckpt.json").unlink()
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(ranks, tmp_path / "all.pt", to="full")
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(ranks, tmp_path / "optim.pt", to="full", only="optim")
    report = fsdpckpt.convert(ranks, tmp_path / "model.pt", to="full", only="model")
    assert any("optim_world_size_2_rank_0.pt" in note.message for note in report.notes)
    fsdpckpt.convert(source, tmp_path / "truth.pt", to="full", only="model")
    assert fsdpckpt.diff(tmp_path / "model.pt", tmp_path / "truth.pt").same


def test_entries_that_this_program_does_not_write_are_not_used(tmp_path: Path) -> None:
    path = full(tmp_path / "model.pt", 1)
    file = {"nbytes": path.stat().st_size}
    wrong = {
        "short-checksum.pt": {**file, "crc32": "1234567"},
        "no-checksum.pt": {**file, "crc32": "1234567z"},
        "number.pt": {**file, "crc32": 7},
        "no-length.pt": {"nbytes": "7"},
        "nothing.pt": None,
        "../above.pt": file,
    }
    manifest = {"files": {"model.pt": file, "lost.pt": file, **wrong}, "digests": {"model a": "12", "model b": 12}}
    (tmp_path / "fsdpckpt.json").write_text(json.dumps(manifest))
    found = opened(tmp_path)
    assert [problem.file for problem in found.problems] == [f"{tmp_path}/lost.pt"]
    assert found.origin.manifest is not None and found.origin.manifest.digests == {"model a": "12"}


def test_what_the_source_left_open_is_not_settled_by_how_it_was_cut(tmp_path: Path) -> None:
    """A buffer that DCP's files have in pieces would be a DTensor in the files of ranks, which FSDP does not load."""
    states = {"w": {"exp_avg": torch.randn(5, 3)}}
    content = {"w": torch.randn(5, 3), "running": torch.randn(5)}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": content, "optimizer": optimizer}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", container="dcp", **SHARDED)
    found = opened(tmp_path / "dcp").model
    assert found is not None
    assert {key: leaf.sharded for key, leaf in found.params.items() if isinstance(leaf, Tensor)} == {
        "w": True,
        "running": None,
    }
