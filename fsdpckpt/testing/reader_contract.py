"""What every reader promises. Its tests inherit ``ReaderContract`` and say how a checkpoint of its kind is made."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Evidence, EvidenceKind
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import FileTable, Part, PartContents, Reader, ReadOptions
from fsdpckpt.readers.registry import all_readers
from fsdpckpt.storage import ByteSource, Entry
from fsdpckpt.storage.local import MemoryFile
from fsdpckpt.storage.sources import Sources

__all__ = ["WEIGHTS", "ReaderContract"]

WEIGHTS: dict[str, np.ndarray] = {
    "embed.weight": np.arange(1 << 20, dtype=np.float32).reshape(1 << 11, 1 << 9),
    "head.weight": np.arange(1 << 16, dtype=np.float32).reshape(1 << 7, 1 << 9) / 3,
    "head.bias": np.arange(1 << 7, dtype=np.float32),
}
_HEADERS = 1 << 19  # bytes: far more than the headers of these files have, far fewer than their tensors
_HEAD = 1 << 12  # bytes of a file that may be looked at in order to recognise it


class CountedSources(Sources):
    """Counts the bytes that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def open_new(self, path: str) -> ByteSource:
        opened = super().open_new(path)
        read = opened.read

        def counted(offset: int, nbytes: int) -> bytes:
            self.nbytes += nbytes
            return read(offset, nbytes)

        opened.read = counted  # type: ignore[method-assign]
        return opened


class MemorySources(Sources):
    """The files of one directory, or one file, in memory under paths that no disk has."""

    def __init__(self, path: Path) -> None:
        self.top = "/nowhere"
        files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
        self.content = {f"{self.top}/{file.relative_to(path.parent)}": file.read_bytes() for file in files}
        super().__init__()

    def open_new(self, path: str) -> ByteSource:
        return MemoryFile(self.content[path], path)

    def stat(self, path: str) -> Entry | None:
        name = path.rpartition("/")[2]
        if path in self.content:
            return Entry(name, path, len(self.content[path]), directory=False)
        return Entry(name, path, 0, directory=True) if any(key.startswith(f"{path}/") for key in self.content) else None

    def list_directory(self, path: str) -> list[Entry]:
        names = sorted({key.removeprefix(f"{path}/").partition("/")[0] for key in self.content if key.startswith(path)})
        return [entry for name in names if (entry := self.stat(f"{path}/{name}")) is not None]


class ReaderContract(ABC):
    """``reader``: the one under test. ``weights``: the model that ``save`` saves, several MiB of it, where a format has
    names of its own. ``harmless``: names of files that may be cut or lost without any harm.
    """

    reader: Reader
    weights: Mapping[str, np.ndarray] = WEIGHTS
    harmless: frozenset[str] = frozenset()

    @abstractmethod
    def save(self, directory: Path) -> Path:
        """Save a model of ``weights`` in ``directory``, which is empty; returns what a user names to read it."""

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return self.save(tmp_path_factory.mktemp("saved"))

    def parts(self, path: Path, sources: Sources) -> list[Part]:
        if path.is_dir():
            return self.reader.recognise_directory(str(path), _files(path, sources), ReadOptions(), sources).parts
        part = self.reader.recognise_file(_entry(path, sources), sources)
        return [part] if part is not None else []

    def trees(self, path: Path, sources: Sources) -> list[tuple[PartContents, FileTable]]:
        tables = [(part, FileTable()) for part in self.parts(path, sources)]
        return [(part.read(table, sources), table) for part, table in tables]

    def test_it_is_in_the_table(self) -> None:
        assert any(type(reader) is type(self.reader) for reader in all_readers())

    def test_it_recognises_its_own_and_says_why(self, saved: Path) -> None:
        with Sources() as sources:
            trees = self.trees(saved, sources)
        assert trees
        for tree, _ in trees:
            assert all(type(reason) is Evidence for reason in tree.evidence)
            assert any(reason.kind is EvidenceKind.CONTAINER and str(reason) for reason in tree.evidence)

    def test_every_tensor_is_where_it_says(self, saved: Path) -> None:
        with Sources() as sources:
            checkpoint = open_checkpoint(str(saved), sources=sources)
        assert checkpoint.model is not None
        assert checkpoint.problems == ()
        _require_weights(checkpoint, self.weights)

    def test_every_chunk_lies_in_a_file_of_the_table(self, saved: Path) -> None:
        with Sources() as sources:
            checkpoint = open_checkpoint(str(saved), sources=sources)
        for named in checkpoint.tensors():
            chunks = named.tensor.chunks
            last = ((chunks.size - 1) * chunks.stride).sum(axis=1) + 1
            ends = chunks.offset + last * named.tensor.dtype.itemsize
            lengths = np.array([file.nbytes for file in checkpoint.files])[chunks.file]
            assert (chunks.offset >= 0).all()
            assert (ends <= lengths).all()

    def test_it_claims_every_file_that_it_reads_and_no_other(self, saved: Path, tmp_path: Path) -> None:
        copy = _copy(saved, tmp_path)
        directory = copy if copy.is_dir() else copy.parent
        (directory / "notes.txt").write_text("unrelated")
        with Sources() as sources:
            files = _files(directory, sources)
            claim = self.reader.recognise_directory(str(directory), files, ReadOptions(), sources)
            read = [Path(path) for _, table in self.trees(directory, sources) for path in paths_in(table.files())]
        top = {path.relative_to(directory).parts[0] for path in read}
        assert top <= claim.names | claim.directories
        assert claim.names <= set(files) - {"notes.txt"}

    def test_it_leaves_the_files_of_others_alone(self, tmp_path: Path) -> None:
        for name, content in _FOREIGN.items():
            (tmp_path / name).write_bytes(content)
        with Sources() as sources:
            claim = self.reader.recognise_directory(str(tmp_path), _files(tmp_path, sources), ReadOptions(), sources)
            assert (claim.parts, claim.names, claim.left_out) == ([], set(), [])
            for name in _FOREIGN:
                assert self.reader.recognise_file(_entry(tmp_path / name, sources), sources) is None

    def test_no_other_reader_of_the_table_takes_its_files(self, saved: Path) -> None:
        with Sources() as sources:
            files = _files(saved, sources) if saved.is_dir() else {}
            for reader in all_readers():
                if saved.is_dir():
                    claim = reader.recognise_directory(str(saved), files, ReadOptions(), sources)
                    files = {name: file for name, file in files.items() if name not in claim.names}
                    recognised = bool(claim.parts)
                else:
                    recognised = reader.recognise_file(_entry(saved, sources), sources) is not None
                assert recognised == (type(reader) is type(self.reader))

    def test_recognising_looks_at_the_heads_of_files_alone(self, saved: Path) -> None:
        with CountedSources() as sources:
            self.parts(saved, sources)
        count = len(list(saved.rglob("*"))) if saved.is_dir() else 1
        assert sources.nbytes <= _HEAD * count

    def test_it_never_reads_the_data_of_tensors(self, saved: Path) -> None:
        with CountedSources() as sources:
            self.trees(saved, sources)
        assert sources.nbytes < _HEADERS < sum(weight.nbytes for weight in self.weights.values()) // 8

    def test_it_reads_the_same_from_disk_and_from_any_other_source_of_bytes(self, saved: Path) -> None:
        with Sources() as sources:
            there = open_checkpoint(str(saved), sources=sources)
        with MemorySources(saved) as memory:
            here = open_checkpoint(f"{memory.top}/{saved.name}", sources=memory)
        assert _described(here, memory.top) == _described(there, str(saved.parent))

    def test_reading_again_gives_the_same(self, saved: Path) -> None:
        with Sources() as sources:
            first, again = (open_checkpoint(str(saved), sources=sources) for _ in range(2))
        assert _described(first, str(saved)) == _described(again, str(saved))

    def test_a_file_that_was_cut_off_is_an_error_of_the_source(self, saved: Path, tmp_path: Path) -> None:
        for name, nbytes in self._data_files(saved):
            for length in {nbytes - 1, nbytes // 2, min(nbytes, 10), 0}:
                copy = _copy(saved, tmp_path / "copy")
                file = copy / name if copy.is_dir() else copy
                file.write_bytes(file.read_bytes()[:length])
                with Sources() as sources, pytest.raises(SourceError):
                    open_checkpoint(str(copy), sources=sources)

    def test_a_file_that_is_missing_is_an_error_or_a_problem(self, saved: Path, tmp_path: Path) -> None:
        for name, _ in self._data_files(saved) if saved.is_dir() else ():
            copy = _copy(saved, tmp_path / "copy")
            (copy / name).unlink()
            with Sources() as sources:
                try:
                    checkpoint = open_checkpoint(str(copy), sources=sources)
                except SourceError as error:
                    assert error.what
                else:
                    assert any(problem.fatal for problem in checkpoint.problems)

    def _data_files(self, saved: Path) -> Iterator[tuple[str, int]]:
        for file in sorted(saved.rglob("*")) if saved.is_dir() else [saved]:
            if file.is_file() and file.name not in self.harmless:
                yield (str(file.relative_to(saved)) if saved.is_dir() else file.name), file.stat().st_size


_FOREIGN: Mapping[str, bytes] = {
    "config.json": json.dumps({"hidden_size": 4}).encode(),
    "notes.txt": b"some text that is longer than the first bytes of a file\n",
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "random.dat": np.random.default_rng(0).bytes(4096),
    "empty": b"",
}


def _entry(path: Path, sources: Sources) -> Entry:
    entry = sources.stat(str(path))
    assert entry is not None
    return entry


def _files(path: Path, sources: Sources) -> dict[str, Entry]:
    return {entry.name: entry for entry in sources.list_directory(str(path)) if not entry.directory}


def _copy(path: Path, copy: Path) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    if path.is_dir():
        return Path(shutil.copytree(path, copy / path.name))
    return Path(shutil.copy(path, copy / path.name))


def _require_weights(checkpoint: Checkpoint, weights: Mapping[str, np.ndarray]) -> None:
    assert checkpoint.model is not None
    with Sources() as sources:
        files = [bytes(sources.open_file(file).read(0, file.nbytes)) for file in checkpoint.files]
    assert set(checkpoint.model.params) == set(weights)
    for name, leaf in checkpoint.model.params.items():
        assert isinstance(leaf, Tensor)
        np.testing.assert_array_equal(_whole(leaf, files), weights[name])


def _whole(tensor: Tensor, files: Sequence[bytes]) -> np.ndarray:
    """The whole tensor, from all its chunks; every element has to be in one of them."""
    dtype = numpy_dtype(tensor.dtype)
    whole, seen = np.zeros(tensor.shape, dtype), np.zeros(tensor.shape, bool)
    chunks = tensor.chunks
    for row in range(len(chunks)):
        size, start = chunks.size[row].tolist(), chunks.start[row].tolist()
        stride = [step * dtype.itemsize for step in chunks.stride[row].tolist()]
        data = np.ndarray(size, dtype, files[chunks.file[row]], int(chunks.offset[row]), stride)
        box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
        whole[box], seen[box] = data, True
    assert seen.all(), "elements that no chunk holds"
    return whole


def _described(checkpoint: Checkpoint, top: str) -> object:
    """Everything that a reader says, with paths relative to ``top``."""
    columns = ("rank", "file", "offset", "start", "size", "stride")
    tensors = [
        (one.section, one.key, one.tensor.dtype.name, one.tensor.shape, one.tensor.sharded, one.tensor.placement)
        for one in checkpoint.tensors()
    ]
    chunks = [[getattr(one.tensor.chunks, name).tolist() for name in columns] for one in checkpoint.tensors()]
    facts = (checkpoint.layout, checkpoint.container, checkpoint.flavor, checkpoint.world_size, checkpoint.problems)
    files = [(f"{file}".removeprefix(top), file.nbytes) for file in checkpoint.files]
    reasons = [(reason.kind, reason.message.replace(top, "")) for reason in checkpoint.evidence]
    return facts, tensors, chunks, files, reasons, checkpoint.notes
