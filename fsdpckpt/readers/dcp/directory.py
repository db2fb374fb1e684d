"""One DCP directory: its files, and its metadata, whole or put together from that of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Note
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage import Entry, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import bytes_text, is_or_are, plural

if TYPE_CHECKING:
    from fsdpckpt.formats.dcp import DcpMetadata

_DATA_FILE = re.compile(r"^__(\d{1,6})_\d+\.distcp$")
RANK_METADATA = re.compile(r"^__(\d{1,6})\.metadata$")
_BATCH = 256  # tensors to parse at a time: with thousands of chunks each takes some megabytes


@dataclass(slots=True)
class DcpDirectory:
    """By relative path of the data files that the metadata names: ``nbytes``, the length; ``ranks``, the writer;
    ``numbers``, the number in the file table, once it is read.
    """

    path: str
    metadata: DcpMetadata
    nbytes: dict[str, int]
    ranks: dict[str, int]
    world_size: int
    evidence: list[Evidence] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def file(self, relative_path: str) -> str:
        return f"{self.path.rstrip('/')}/{relative_path}"

    def names(self) -> dict[int, str]:
        """The relative paths by number in the file table."""
        return {number: path for path, number in self.numbers.items()}

    def by_file(self, values: Mapping[str, int]) -> Int64Array:
        """``values`` by relative path as a column, indexed by the numbers that chunks have for their files."""
        return np.array([values[path] for path in self.metadata.files], np.int64)


def open_directory(path: str, sources: Sources) -> DcpDirectory:
    """Read the metadata in ``path`` and compare it with the files that exist.

    Raises SourceIncompleteError (no metadata, or data files missing: lists all), SourceCorruptError (items that end
    after their file), SourceUnsupportedError (compressed items), and what ``parse_metadata`` raises.
    """
    entries = {entry.name: entry for entry in sources.list_directory(path)}
    metadata, evidence = _metadata(path, entries, sources)
    if metadata.transforms:
        names = ", ".join(sorted(metadata.transforms))
        raise SourceUnsupportedError(
            f"{path} holds transformed items ({names}), which fsdpckpt does not read",
            why="it was saved with FileSystemWriter(_extensions=[...]): compressed data has no byte ranges to copy",
            next_step="load it with torch.distributed.checkpoint and save it again without _extensions",
            file=path,
            found=names,
        )
    needed = _ends(metadata)
    nbytes = _lengths(path, needed, entries, sources)
    ranks = {name: _rank(name) for name in needed}
    world_size = _world_size(metadata, ranks, entries)
    written = f"data files: {len(needed)}; ranks that wrote them: {world_size}"
    reasons = [Evidence(EvidenceKind.CONTAINER, message) for message in (evidence, written)]
    directory = DcpDirectory(path, metadata, nbytes, ranks, world_size, reasons)
    others = [entry.name for entry in entries.values() if entry.name.endswith(".distcp") and entry.nbytes]
    strays = [name for name in others if name not in nbytes]  # data files the metadata does not name
    if strays:
        message = f"{plural(len(strays), 'data file', 'belong')} to another save: {', '.join(strays[:5])}"
        directory.notes.append(Note("stray", message, damage=True))
    return directory


def _ends(metadata: DcpMetadata) -> dict[str, int]:
    """Where the last item of each file ends."""
    ends = np.zeros(len(metadata.files), np.uint64)  # large enough for two counts below 2^63
    chunks = (tensor.chunks for tensor in metadata.tensors.values())
    while batch := list(islice(chunks, _BATCH)):
        file = np.concatenate([rows.file for rows in batch])
        item = np.concatenate([rows.item for rows in batch])
        np.maximum.at(ends, file, item.astype(np.uint64).sum(axis=1))
    needed = dict(zip(metadata.files, ends.tolist(), strict=True))
    for stored in metadata.items.values():
        end = stored.offset + stored.length
        needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
    return needed


def _metadata(path: str, entries: dict[str, Entry], sources: Sources) -> tuple[DcpMetadata, str]:
    if ".metadata" in entries:
        return _parse(entries[".metadata"], sources), f"a DCP directory: {path} has a .metadata file"
    local = {int(match[1]): entries[name] for name in entries if (match := RANK_METADATA.match(name))}
    data = {int(match[1]) for name in entries if (match := _DATA_FILE.match(name))}
    if not local:
        if any(name.endswith(".distcp") for name in entries):
            raise SourceIncompleteError(
                f"{path} has DCP data files, but no .metadata",
                why="the save did not finish or still runs: .metadata is written last"
                + (" (a .metadata.tmp is there)" if ".metadata.tmp" in entries else ""),
                next_step="wait for the save, or use the checkpoint before this one",
                file=f"{path.rstrip('/')}/.metadata",
            )
        raise SourceUnrecognisedError(
            f"{path} is not a DCP directory", expected=".metadata", found=plural(len(entries), "file")
        )
    missing = sorted((data | set(range(max(local)))) - set(local))
    if missing:
        files = [f"{path.rstrip('/')}/__{rank}.metadata" for rank in missing]
        raise SourceIncompleteError(
            f"{path} has rank-local metadata, but not of every rank",
            details=[f"__{rank}.metadata" for rank in missing],
            files=files,
            why="these ranks did not finish, or their files are on another machine",
            next_step="copy the files of all ranks into one directory",
            file=files[0],
            rank=missing[0],
        )
    from fsdpckpt.formats.dcp import merge_metadata

    parts = [(local[rank].path, _parse(local[rank], sources)) for rank in sorted(local)]
    return merge_metadata(parts), f"a DCP directory with rank-local metadata of {plural(len(local), 'rank')}"


def _parse(entry: Entry, sources: Sources) -> DcpMetadata:
    from fsdpckpt.formats.dcp import parse_metadata
    from fsdpckpt.formats.pickle.check import check_size

    check_size(sources.open(entry.path).nbytes, entry.path)
    return sources.parsed(entry.path, parse_metadata)


def _lengths(path: str, needed: dict[str, int], entries: dict[str, Entry], sources: Sources) -> dict[str, int]:
    """The length of every file of ``needed``, which is where its last item must end."""
    above = path.rstrip("/") + "/"
    elsewhere = [name for name in needed if name not in entries and ("/" in name or is_url(path))]
    asked = sources.stat_all([above + name for name in elsewhere])  # a web server lists no hidden files
    present = {**entries, **dict(zip(elsewhere, asked, strict=True))}
    files = ((name, present.get(name)) for name in needed)
    nbytes = {name: entry.nbytes for name, entry in files if entry is not None and not entry.directory}
    missing = [name for name in needed if name not in nbytes]
    short = {
        name: f"{name}: {bytes_text(length)}, items end at {bytes_text(needed[name])}"
        for name, length in nbytes.items()
        if length < needed[name]
    }
    if missing:
        truncated = f", {len(short)} {is_or_are(len(short))} truncated" if short else ""
        raise SourceIncompleteError(
            f"{path}: {len(missing)} of {len(needed)} data files {is_or_are(len(missing))} missing{truncated}",
            details=[*sorted(missing), *short.values()],
            files=[above + name for name in (*sorted(missing), *short)],
            why="the copy did not finish, or ranks on other machines wrote to their own disks",
            next_step="copy the missing files into the directory",
            file=above + missing[0],
        )
    if short:
        raise SourceCorruptError(
            f"{path}: {len(short)} data {'file is' if len(short) == 1 else 'files are'} truncated",
            details=list(short.values()),
            files=[above + name for name in short],
            why="the copy did not finish, or files of another save overwrote them",
            next_step="copy the checkpoint again",
            file=above + next(iter(short)),
        )
    return nbytes


def _rank(name: str) -> int:
    match = _DATA_FILE.match(name.rpartition("/")[2])
    return int(match[1]) if match else 0


def _world_size(metadata: DcpMetadata, ranks: dict[str, int], entries: dict[str, Entry]) -> int:
    """The number of ranks that wrote something, or an empty file (if they only had copies of what other ranks
    wrote).
    """
    highest = max(ranks.values(), default=0)
    for name, entry in entries.items():
        match = _DATA_FILE.match(name)
        if match and entry.nbytes == 0:
            highest = max(highest, int(match[1]))
    chunks = max((len(tensor.chunks) for tensor in metadata.tensors.values()), default=1)
    return max(highest + 1, chunks)
