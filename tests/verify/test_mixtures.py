"""Files of several saves in one directory: another step, another world size, another rank's, none at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError

FORMS: dict[str, dict[str, Any]] = {
    "dcp": {"to": "sharded", "container": "dcp"},
    "ranks": {"to": "sharded", "container": "torch"},
    "flattened": {"to": "flattened", "unit": ("none",), "use_orig_params": True},
}
MANIFEST = "fsdpckpt.json"


def saved(path: Path, form: str, *, step: int, world: int = 3, sealed: bool = True, **more: Any) -> Path:
    """A checkpoint whose tensors are those of no other ``step``. ``sealed`` False: without what says who wrote it."""
    draw = torch.Generator().manual_seed(step)
    model = {"a": torch.randn(8, 5, generator=draw), "b": torch.randn(6, generator=draw)}
    states = {
        name: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(value.shape, generator=draw)}
        for name, value in model.items()
    }
    groups = [{"lr": 0.1, "params": list(model)}]
    full = path.with_suffix(".pt")
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": groups}}, full)
    buffers = {} if form == "flattened" else {"buffers": ("none",)}
    fsdpckpt.convert(full, path, world_size=world, **FORMS[form], **buffers, **more)
    if not sealed:
        (path / MANIFEST).unlink()
    return path


def problem_kinds(path: Path) -> set[str]:
    """The kinds of what verify lists, or the class of what stops it."""
    try:
        return {problem.kind for problem in fsdpckpt.verify(path).problems}
    except FsdpckptError as error:
        assert error.exit_code == 3, error
        return {type(error).__name__}


def lines(path: Path) -> list[str]:
    """All that verify says is wrong, stopped or not."""
    try:
        return [problem.message for problem in fsdpckpt.verify(path).problems]
    except FsdpckptError as error:
        return list(error.details)


def data_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != MANIFEST)


@pytest.mark.parametrize("form", FORMS)
def test_any_one_file_of_another_step_is_found_by_the_manifest(tmp_path: Path, form: str) -> None:
    one, other = (saved(tmp_path / f"step-{step}", form, step=step) for step in (4, 5))
    assert problem_kinds(one) == set()
    for name in data_files(one):
        if (one / name).read_bytes() != (other / name).read_bytes():
            mixed = shutil.copytree(one, tmp_path / "mixed")
            shutil.copy(other / name, mixed / name)
            assert problem_kinds(mixed) & {"checksum", "SourceCorruptError", "SourceIncompleteError"}, name
            shutil.rmtree(mixed)


@pytest.mark.parametrize("form", FORMS)
def test_any_one_file_that_is_missing_is_found(tmp_path: Path, form: str) -> None:
    whole = saved(tmp_path / "whole", form, step=4)
    for name in data_files(whole):
        mixed = shutil.copytree(whole, tmp_path / "mixed")
        (mixed / name).unlink()
        kinds = problem_kinds(mixed)
        assert kinds & {"missing-file", "SourceIncompleteError", "SourceUnrecognisedError"}, (name, kinds)
        shutil.rmtree(mixed)


@pytest.mark.parametrize("sealed", [True, False])
def test_an_optimizer_file_of_another_step_is_found_by_its_steps(tmp_path: Path, *, sealed: bool) -> None:
    one, other = (saved(tmp_path / f"step-{step}", "ranks", step=step, sealed=sealed) for step in (4, 5))
    shutil.copy(other / "optim_world_size_3_rank_1.pt", one)
    assert problem_kinds(one) >= {"replica"} | ({"checksum"} if sealed else set())


def test_optimizer_slices_of_another_step_are_found_by_their_steps(tmp_path: Path) -> None:
    one, other = (saved(tmp_path / f"step-{step}", "flattened", step=step, sealed=False) for step in (4, 5))
    shutil.copy(other / "optim_world_size_3_rank_1.pt", one)
    assert problem_kinds(one) & {"replica", "step", "SourceCorruptError"}


@pytest.mark.parametrize("form", ["ranks", "flattened"])
def test_a_rank_file_under_another_rank_s_name_is_found(tmp_path: Path, form: str) -> None:
    whole = saved(tmp_path / "whole", form, step=4)
    for section in ("model", "optim"):
        first, second = (f"{section}_world_size_3_rank_{rank}.pt" for rank in (0, 1))
        mixed = shutil.copytree(whole, tmp_path / "mixed")
        shutil.copy(whole / first, mixed / second)
        assert problem_kinds(mixed), "a duplicate"
        shutil.copy(whole / second, mixed / first)
        assert problem_kinds(mixed), "swapped"
        shutil.rmtree(mixed)


def test_swapped_data_files_of_dcp_are_found(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "dcp", step=4, world=2)
    first, second = whole / "__0_0.distcp", whole / "__1_0.distcp"
    content = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(content)
    assert problem_kinds(whole)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sealed", [True, False])
def test_files_of_a_larger_world_size_beside_those_of_the_checkpoint_are_found(
    tmp_path: Path, form: str, *, sealed: bool
) -> None:
    one = saved(tmp_path / "one", form, step=4, world=2, sealed=sealed)
    larger = saved(tmp_path / "larger", form, step=4, world=5, sealed=False)
    stale = data_files(larger)[-1]
    assert not (one / stale).exists()
    shutil.copy(larger / stale, one / stale)
    assert problem_kinds(one), stale


def test_all_that_is_wrong_is_listed_and_named(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "dcp", step=4)
    other = saved(tmp_path / "other", "dcp", step=5)
    shutil.copy(other / "__1_0.distcp", whole)
    shutil.copy(other / "__1_0.distcp", whole / "__7_0.distcp")
    with (whole / "__2_0.distcp").open("r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))
    text = "\n".join(lines(whole))
    for name in ("__1_0.distcp", "__2_0.distcp", "__7_0.distcp is not among the files"):
        assert f"{whole}/{name}" in text


def test_a_directory_that_cannot_be_read_still_lists_every_damaged_file(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "ranks", step=4)
    with (whole / "model_world_size_3_rank_0.pt").open("r+b") as file:
        file.truncate(100)
    data = bytearray((whole / "optim_world_size_3_rank_2.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (whole / "optim_world_size_3_rank_2.pt").write_bytes(data)
    with pytest.raises(FsdpckptError) as raised:
        fsdpckpt.verify(whole)
    assert raised.value.exit_code == 3
    text = "\n".join(raised.value.details)
    assert "model_world_size_3_rank_0.pt has 100 bytes" in text
    assert "optim_world_size_3_rank_2.pt" in text


def test_a_conversion_refuses_metadata_that_the_manifest_contradicts(tmp_path: Path) -> None:
    one, other = (saved(tmp_path / f"world-{world}", "dcp", step=4, world=world) for world in (2, 3))
    shutil.copy(other / ".metadata", one)
    shutil.copy(other / "__2_0.distcp", one)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        shutil.copy(other / name, one)
    with pytest.raises(FsdpckptError) as raised:
        fsdpckpt.convert(one, tmp_path / "out.pt", to="full")
    assert raised.value.exit_code == 3
    assert "does not match" in "\n".join(raised.value.details)
    (one / MANIFEST).unlink()
    fsdpckpt.convert(one, tmp_path / "out.pt", to="full")


def test_a_manifest_that_was_damaged_is_said_to_be_and_not_used(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "dcp", step=4)
    text = (whole / MANIFEST).read_text()
    (whole / MANIFEST).write_text(text.replace('"layout": "sharded"', '"layout": "shorded"'))
    assert problem_kinds(whole) == {"manifest"}
    (whole / MANIFEST).write_text("{")
    assert problem_kinds(whole) == {"manifest"}


def test_files_that_only_the_manifest_misses_are_found(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "ranks", step=4)
    for path in whole.glob("optim_*"):
        path.unlink()
    assert problem_kinds(whole) == {"missing-file"}
    assert len(fsdpckpt.verify(whole).problems) == 3


def test_bytes_behind_the_end_of_a_file_are_found(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "dcp", step=4)
    with (whole / "__1_0.distcp").open("ab") as file:
        file.write(b"behind")
    assert problem_kinds(whole) == {"length"}


def test_files_of_other_kinds_beside_the_checkpoint_are_no_problem(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", "ranks", step=4)
    (whole / "README.md").write_text("notes")
    (whole / "config.json").write_text("{}")
    assert problem_kinds(whole) == set()
