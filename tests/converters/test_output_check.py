"""An output that does not read back: the disk's fault where its bytes changed, and otherwise a bug that says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fsdpckpt.converters import check
from fsdpckpt.converters.check import OutputCheck
from fsdpckpt.errors import InternalError, SourceError, TargetUnwritableError
from tests.converters.jobs import refused, save


@pytest.fixture
def source() -> str:
    return save({"model": {f"layers.{number}.weight": torch.randn(31, 17) for number in range(3)}})


def _before_the_check(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Call ``change(directory)`` once everything is written."""
    run = OutputCheck.run

    def changed(self: OutputCheck) -> dict[str, str]:
        change(Path(self.path))
        return run(self)

    monkeypatch.setattr(OutputCheck, "run", changed)


def _flip(name: str, place: int):
    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        data[place] ^= 1
        (directory / name).write_bytes(data)

    return flip


@pytest.mark.parametrize(
    ("container", "name", "place", "verify"),
    [
        ("safetensors", "model.safetensors", 9, "structure"),  # the header
        ("dcp", ".metadata", 40, "structure"),
        ("safetensors", "model.safetensors", -1, "full"),
        ("dcp", "__0_0.distcp", 3000, "full"),
    ],
)
def test_bytes_that_changed_on_the_disk_are_the_disk_s_fault(
    source: str, monkeypatch: pytest.MonkeyPatch, container: str, name: str, place: int, verify: str
) -> None:
    _before_the_check(monkeypatch, _flip(name, place))
    words = "is not what was written to it"
    error = refused(TargetUnwritableError, words, source, "out", container=container, verify=verify)
    assert error.exit_code == 5 and name in (error.file or "")
    assert os.listdir() == ["source.pt"]


def test_an_output_that_cannot_be_read_back_is_no_fault_of_the_source(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: OutputCheck, *_: object) -> None:
        raise SourceError("it cannot be read", file=os.path.join(self.path, "model.safetensors"))

    monkeypatch.setattr(OutputCheck, "_read", fails)
    words = "the output cannot be read back: it cannot be read"
    refused(TargetUnwritableError, words, source, "out", container="safetensors", verify="full")


def test_an_output_that_is_as_it_was_written_and_wrong_is_a_bug(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "first_difference", lambda *_, **__: 7)
    words = "does not read back as it was planned"
    refused(InternalError, words, source, "out", container="safetensors", verify="full")
    assert os.listdir() == ["source.pt"]
