"""Units that lie beside a checkpoint are found; two that differ are not chosen between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.ir.units_json import encode
from tests.readers.contents import opened

PARAM = Parameter("w", (5, 3), DTYPES["float32"])
UNITS = units_of_lists((Unit("", (PARAM,)),), ("w",), use_orig_params=False)
OTHER = replace(UNITS, use_orig_params=True)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "step-10"
    directory.mkdir(parents=True)
    for rank in range(2):
        state = {0: {"exp_avg": torch.randn(8, generator=torch.Generator().manual_seed(rank))}}
        groups = [{"lr": 0.1, "params": [0]}]
        torch.save({"state": state, "param_groups": groups}, directory / f"optim_world_size_2_rank_{rank}.pt")
    return directory


def write(path: Path, units: Units, **more: Any) -> str:
    path.write_text(json.dumps({**encode(units), **more}))
    return str(path)


def found_at(source: Path | str) -> tuple[Units | None, str]:
    """The units of a checkpoint, and the file that they are from."""
    found = opened(source)
    return found.units, found.origin.units_from


@pytest.mark.parametrize("name", ["units.json", "my_model.json"])
def test_a_units_file_in_the_directory_is_found_by_its_content(name: str, step: Path) -> None:
    (step / "config.json").write_text(json.dumps({"units": 7}))
    path = write(step / name, UNITS)
    found = opened(step)
    assert (found.units, found.origin.units_from) == (UNITS, path)
    assert any(path in str(line) for line in found.evidence)
    assert not any("units.json" in note.message for note in found.notes)


@pytest.mark.parametrize(("name", "units"), [("my_Units.json", UNITS), ("my_model.json", None)])
def test_a_file_that_says_late_what_it_is_is_a_units_file_only_by_name(
    name: str, units: Units | None, step: Path
) -> None:
    (step / name).write_text("\n" * 5000 + json.dumps(encode(UNITS)))
    assert opened(step).units == units


def test_without_a_units_file_there_are_no_units(step: Path) -> None:
    (step / "config.json").write_text(json.dumps({"format": "pt"}))
    (step / "my_units.json").write_text("[1, 2]")
    (step / "notes.md").write_text('A units file has "format": "fsdpckpt-units".')
    (step / "folder.json").mkdir()
    (step / "gone.json").symlink_to("nowhere")
    found = opened(step)
    assert (found.units, found.origin.units_from) == (None, "")
    assert not any(note.kind.startswith("units") for note in found.notes)


def test_units_lie_beside_the_steps_of_a_run_and_the_nearest_count(step: Path) -> None:
    above = write(step.parent / "units.json", OTHER)
    for source in (step, step.parent, str(step) + "/"):
        assert found_at(source) == (OTHER, above)
    near = write(step / "units.json", UNITS)
    for source in (step, step.parent):
        assert found_at(source) == (UNITS, near)


def test_units_lie_beside_the_steps_of_a_run_whose_roles_are_below_them(step: Path) -> None:
    (step / "actor").mkdir()
    for path in step.glob("optim_*"):
        path.rename(step / "actor" / path.name)
    above = write(step.parent / "units.json", OTHER)
    for source in (step, step.parent, step.parent.parent):
        assert found_at(source) == (OTHER, above)
    assert opened(step / "actor").units is None


def test_units_beside_a_step_that_is_named_without_its_directory(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(step.parent / "units.json", OTHER)
    monkeypatch.chdir(step.parent)
    for source in (step.name, f"./{step.name}", f"{step.name}/"):
        assert found_at(source) == (OTHER, "./units.json")


def test_units_above_a_directory_that_is_no_step_are_another_models(step: Path) -> None:
    write(step.parent.parent / "units.json", OTHER)
    step.rename(step.parent / "small")
    write(step.parent / "units.json", OTHER)
    assert opened(step.parent / "small").units is None


def test_two_files_that_differ_are_named_and_not_chosen_between(step: Path) -> None:
    one, other = write(step / "a.json", UNITS), write(step / "b.json", OTHER)
    found = opened(step)
    assert found.units is None
    (note,) = [note for note in found.notes if note.kind == "units-ambiguous"]
    assert one in note.message and other in note.message and "--units" in note.message
    assert one in found.origin.units_from and other in found.origin.units_from
    write(step / "b.json", UNITS)
    assert opened(step).units == UNITS


def test_a_broken_units_file_is_noted_and_not_used(step: Path) -> None:
    write(step / "units.json", UNITS, version=99)
    found = opened(step)
    assert found.units is None
    (note,) = found.notes
    assert note.kind == "units-unreadable" and f"{step / 'units.json'}" in note.message
    (step / "units.json").write_text(json.dumps({**encode(UNITS), "units": [{"params": 5}, {"params": 6}]}))
    (note,) = opened(step).notes
    assert "(units[0].prefix: expected a string, found nothing; " in note.message


def test_what_the_manifest_says_was_written_with_these_files(step: Path) -> None:
    write(step / "units.json", OTHER)
    (step / "fsdpckpt.json").write_text(json.dumps({"version": "1", "units": encode(UNITS)}))
    found = opened(step)
    assert (found.units, found.origin.units_from) == (UNITS, str(step / "fsdpckpt.json"))
    (note,) = [note for note in found.notes if note.kind.startswith("units")]
    assert note.for_verify and f"{step / 'units.json'} is about other units" in note.message
    write(step / "units.json", UNITS)
    assert not any(note.kind.startswith("units") for note in opened(step).notes)


def test_units_beside_a_single_file(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.randn(5, 3)}}, tmp_path / "model.pt")
    path = write(tmp_path / "units.json", UNITS)
    assert opened(tmp_path / "model.pt").origin.units_from == path


@pytest.mark.parametrize(("key", "kinds"), [(0, ["units-ambiguous"]), ("w", [])])
def test_units_that_differ_are_named_only_where_ids_need_them(key: int | str, kinds: list[str], tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    optimizer = {"state": {key: {"exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": [key]}]}
    torch.save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "model.pt")
    for name, units in (("a.json", UNITS), ("b.json", OTHER)):
        write(tmp_path / name, units)
    assert [note.kind for note in opened(tmp_path / "model.pt").notes] == kinds


TORN = [b"", bytes(4096), b"[1, 2", b'{"for', b"\xff\xfe", b"[1, 2]", b"{}", b'"fsdpckpt-units"']


@pytest.mark.parametrize("content", TORN)
def test_a_torn_file_under_the_usual_name_is_not_taken_for_none(content: bytes, step: Path) -> None:
    """A full disk leaves empty files, and a lost machine zeros: nothing in them says that they were units."""
    (step / "other.json").write_bytes(content)
    assert bool(opened(step).origin.units_refused) is (content == TORN[-1])
    (step / "other.json").unlink()
    (step / "units.json").write_bytes(content)
    found = opened(step)
    (refused,) = found.origin.units_refused
    assert f"{step / 'units.json'}" in refused and "not a" in refused
    (note,) = [note for note in found.notes if note.damage]
    assert note.kind == "units-unreadable" and note.warning


@pytest.mark.parametrize("content", TORN)
def test_a_torn_file_is_damage_beside_a_manifest_too_and_where_names_need_no_units(
    content: bytes, step: Path, tmp_path: Path
) -> None:
    """It is a file of the checkpoint. Above it, it is the run's, and matters to those that need one."""
    named = tmp_path / "run" / "step-20"
    named.mkdir()
    torch.save({"model": {"w": torch.randn(5, 3)}}, named / "model.pt")
    (step / "fsdpckpt.json").write_text(json.dumps({"version": "1", "units": encode(UNITS)}))
    for directory in (step, named):
        (directory / "units.json").write_bytes(content)
        assert [note.kind for note in opened(directory).notes if note.damage] == ["units-unreadable"]
        stray = [each.message for each in fsdpckpt.verify(directory).problems if each.kind == "stray"]
        assert [f"{directory / 'units.json'}" in message for message in stray] == [True]
    (named / "units.json").rename(named.parent / "units.json")
    assert not any(note.damage for note in opened(named).notes)


@pytest.mark.parametrize("document", [{"temperature": "K"}, {"units": "metric"}, {"name": "knight", "attack": 3}])
def test_the_units_of_another_program_are_no_damage(document: dict[str, Any], step: Path) -> None:
    """``units.json`` is a usual name for units of measured data."""
    (step / "units.json").write_text(json.dumps(document))
    assert not any(note.damage for note in opened(step).notes)
    assert fsdpckpt.verify(step).whole
    (step / "units.json").write_text(json.dumps({**document, "use_orig_params": True}))
    assert not fsdpckpt.verify(step).whole
