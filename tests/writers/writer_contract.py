"""The tests that every ``Writer`` passes: the tests of a writer inherit ``WriterContract`` and say what it writes."""

from __future__ import annotations

import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import fsdpckpt
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.writers import DtypeRule, Writer, WriteSpec
from tests.materialise import file_bytes, materialise
from tests.writers.source import Raw, Trained


class WriterContract(ABC):
    """What a writer owes the planner, the executor and whoever loads its files.

    ``writer``: a staticmethod. ``specs``: what it is asked for; every test runs with each of them. ``single``: whether
    the target is one file.
    """

    writer: ClassVar[Writer]
    specs: ClassVar[Sequence[WriteSpec]]
    single: ClassVar[bool] = False

    def source(self) -> tuple[Checkpoint, Raw]:
        """A checkpoint with a model, an optimizer and an extra, and the bytes it lies in."""
        trained = Trained(seed=11, key_type="name")
        return trained.checkpoint, trained.raw

    @abstractmethod
    def load(self, path: str, spec: WriteSpec) -> None:
        """Load what lies at ``path`` with PyTorch (or the format's own library). Raises when it does not load."""

    @pytest.fixture
    def spec(self, request: pytest.FixtureRequest) -> WriteSpec:
        return self.specs[request.param]

    def test_every_byte_of_every_file_is_said_once(self, spec: WriteSpec) -> None:
        checkpoint, _ = self.source()
        files = self.writer(checkpoint, spec).files
        names = [file.path for file in files]
        assert names and len(set(names)) == len(names)
        assert (names == [""]) is self.single
        for file in files:
            assert posixpath.normpath(file.path) == file.path or file.path == ""
            assert not file.path.startswith(("/", "..")) and "\\" not in file.path
            rows = sorted(_extents(file))
            ends = [offset + nbytes for offset, nbytes in rows]
            assert [offset for offset, _ in rows] == [0, *ends][: len(rows)], f"{file.path}: a gap, or bytes twice"
            assert (ends or [0])[-1] == file.nbytes
            assert all(start >= 0 and start + nbytes <= len(file.built().blob) for _, start, nbytes in file.literals)
            for item in file.write_items:
                assert len(item.start) == len(item.size) == len(item.tensor.shape)
                for start, size, extent in zip(item.start, item.size, item.tensor.shape, strict=True):
                    assert 0 <= start <= start + size <= extent
                assert item.nbytes == int(np.prod(item.size)) * item.dtype.itemsize
                assert item.order is None or sorted(item.order) == list(range(len(item.size)))

    def test_equal_input_gives_equal_bytes_and_stays_as_it_is(self, spec: WriteSpec) -> None:
        checkpoint, raw = self.source()
        first, again, other = (
            self._bytes(*held, spec) for held in ((checkpoint, raw), (checkpoint, raw), self.source())
        )
        assert first == again == other
        assert [named.key for named in checkpoint.tensors()] == [named.key for named in self.source()[0].tensors()]

    def test_what_was_written_is_as_long_as_was_laid_out_and_loads_and_its_reader_finds_nothing_wrong(
        self, tmp_path: Path, spec: WriteSpec
    ) -> None:
        checkpoint, raw = self.source()
        target = self.writer(checkpoint, spec)
        path = str(tmp_path / "target")
        materialise(target, raw.files, path)
        for file in target.files:
            assert os.path.getsize(os.path.join(path, file.path) if file.path else path) == file.nbytes
        problems = [problem for problem in fsdpckpt.verify(path).problems if problem.kind != "step"]  # made up, uneven
        assert not problems, problems
        self.load(path, spec)

    def test_casts_are_noted_and_apply_to_the_model_alone(self, spec: WriteSpec) -> None:
        checkpoint, _ = self.source()
        half = DTYPES["float16"]
        target = self.writer(checkpoint, replace(spec, dtypes=DtypeRule(model=half)))
        assert any(note.kind == "cast" for note in target.notes)
        floating = {leaf for leaf in checkpoint.model.params.values() if leaf.dtype.floating}
        for item in (item for file in target.files for item in file.write_items):
            assert item.dtype is (half if item.tensor in floating else item.tensor.dtype)

    def test_a_model_alone_is_laid_out(self, spec: WriteSpec) -> None:
        checkpoint, raw = self.source()
        model = replace(checkpoint, optim=None, extra={}, rank_extra=())
        written = {item.tensor for file in self.writer(model, spec).files for item in file.write_items}
        assert model.model is not None and written == set(model.model.params.values())
        assert self._bytes(model, raw, spec)

    def _bytes(self, checkpoint: Checkpoint, raw: Raw, spec: WriteSpec) -> dict[str, bytes]:
        return {file.path: file_bytes(file, raw.files) for file in self.writer(checkpoint, spec).files}

    def __init_subclass__(cls) -> None:
        """Run every test with each of ``specs``."""
        numbers = range(len(cls.specs))
        cls.pytestmark = [pytest.mark.parametrize("spec", numbers, indirect=True), *getattr(cls, "pytestmark", [])]


def _extents(file: TargetFile) -> list[tuple[int, int]]:
    literals = [(offset, nbytes) for offset, _, nbytes in file.literals]
    return literals + [(item.offset, item.nbytes) for item in file.write_items]
