"""Every reader, in the order in which they are asked: the first that claims a file reads it.

A new format is one subpackage and one line here, or an entry point of another package (``docs/adding-a-format.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar, cast

from fsdpckpt.errors import UsageError
from fsdpckpt.extensions import READERS as ENTRY_POINTS
from fsdpckpt.extensions import Extension, extensions
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind
from fsdpckpt.readers.dcp import DcpReader
from fsdpckpt.readers.dcp.megatron import MegatronReader
from fsdpckpt.readers.deepspeed import DeepSpeedReader
from fsdpckpt.readers.megatron_torch import MegatronTorchReader
from fsdpckpt.readers.nanotron import NanotronReader
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, Reader, ReadOptions
from fsdpckpt.readers.safetensors import SafetensorsReader
from fsdpckpt.readers.torch_checkpointing import TorchCheckpointingReader
from fsdpckpt.readers.torch_ranks import TorchReader
from fsdpckpt.readers.torch_shards import TorchShardsReader
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

_Made = TypeVar("_Made")

READERS: tuple[Reader, ...] = (
    MegatronReader(),
    DcpReader(),
    TorchCheckpointingReader(),
    NanotronReader(),
    MegatronTorchReader(),
    SafetensorsReader(),
    DeepSpeedReader(),
    TorchShardsReader(),
    TorchReader(),
)


@dataclass(frozen=True, slots=True)
class ForeignReader:
    """The reader of another package, which announced it as ``extension``."""

    reader: Reader
    extension: Extension

    @property
    def described(self) -> str:
        """Its name, the package and its version."""
        return f"{self.extension.name} of {self.extension.origin}"

    def file(self, file: Entry, sources: Sources) -> Part | None:
        """The part that it makes of ``file``. Raises UsageError if it fails, or returns anything else."""
        with self.extension.running(f"fails to recognise {file.path}"):
            part = self.reader.recognise_file(file, sources)
            return None if part is None else _require(part, Part)

    def claim(self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources) -> Claim:
        """What it claims in a directory. Raises UsageError if it fails, or returns anything else."""
        with self.extension.running(f"fails to recognise {path}"):
            claim = _require(self.reader.recognise_directory(path, files, options, sources), Claim)
            for part in claim.parts:
                _require(part, Part)
            return claim


@cache
def foreign_readers() -> tuple[ForeignReader, ...]:
    """The readers that installed packages announce. Raises what ``extensions`` raises."""
    found = []
    for extension in extensions(ENTRY_POINTS):
        with extension.running("cannot be made a reader"):
            value = extension.value() if isinstance(extension.value, type) else extension.value
        if not all(callable(getattr(value, name, None)) for name in ("recognise_file", "recognise_directory")):
            expected = "a class, or an object, with recognise_file and recognise_directory"
            raise extension.refused("is not a reader", expected, type(value).__name__)
        found.append(ForeignReader(cast(Reader, value), extension))
    return tuple(found)


def recognise_foreign_file(file: Entry, sources: Sources) -> Part | None:
    """The part that a reader of another package makes of ``file``, None if none claims it.

    Raises UsageError if several do.
    """
    parts = [(each, each.file(file, sources)) for each in foreign_readers()]
    claimed = [(each, part) for each, part in parts if part is not None]
    _require_one(file.path, [each for each, _ in claimed])
    return next((_read_by(each, part) for each, part in claimed), None)


def claim_foreign(path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources) -> Claim:
    """What the readers of other packages claim in a directory. Raises UsageError if several claim something."""
    claims = [(each, each.claim(path, files, options, sources)) for each in foreign_readers()]
    claimed = [(each, claim) for each, claim in claims if claim.parts or claim.names]
    _require_one(path, [each for each, _ in claimed])
    for each, claim in claimed:
        return replace(claim, parts=[_read_by(each, part) for part in claim.parts])
    return Claim()


def _require(value: object, expected: type[_Made]) -> _Made:
    """``value``, if a reader returned what it should; else TypeError, which ``Extension.running`` explains."""
    if not isinstance(value, expected):
        raise TypeError(f"expected a {expected.__name__}, got {type(value).__name__}")
    return value


def _require_one(path: str, readers: Sequence[ForeignReader]) -> None:
    if len(readers) > 1:
        raise UsageError(
            f"the readers of several packages claim {path}",
            details=[each.described for each in readers],
            why="each of them was made for such files, and they may read them differently",
            next_step="uninstall all of these packages but one",
        )


def _read_by(foreign: ForeignReader, part: Part) -> Part:
    """``part``, whose tree says which package read it."""

    def read(files: FileTable, sources: Sources) -> PartContents:
        with foreign.extension.running(f"fails to read {part.label}"):
            tree = _require(part.read(files, sources), PartContents)
        tree.evidence.append(Evidence(EvidenceKind.READER, f"read by {foreign.described}"))
        return tree

    return replace(part, read=read)


def all_readers() -> tuple[Reader, ...]:
    """Every reader, in the order in which they are asked: ours come last, as they claim any torch file."""
    return (*(foreign.reader for foreign in foreign_readers()), *READERS)
