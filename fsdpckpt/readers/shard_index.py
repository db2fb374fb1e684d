"""Reads the index of Hugging Face's shards (``model.safetensors.index.json``, ``pytorch_model.bin.index.json``).

``save_pretrained`` divides large weights among numbered files; the index maps each name to its file. The numbers in the
names show alone which files there must be, so shards without an index are compared with these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Note
from fsdpckpt.readers.counters import SHARDS, kind_of_number
from fsdpckpt.readers.protocol import file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of

_MAX_BYTES = 1 << 28  # large enough for a million tensors
_MAX_NAMES = 1 << 16  # missing shards that are named: a number in one file name can ask for a million
_MAX_SHOWN = 50
_NUMBERED = re.compile(r"^(?P<stem>.*?)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})(?P<suffix>\.[^.]+)$")


@dataclass(frozen=True, slots=True)
class NumberedName:
    """``<stem>-<number>-of-<total><suffix>``, the name of one of several shards."""

    stem: str
    number: int
    total: int
    suffix: str

    def of(self, number: int) -> str:
        return f"{self.stem}-{number:05d}-of-{self.total:05d}{self.suffix}"


def numbered(name: str) -> NumberedName | None:
    """The words of a shard's name; None for other names, also for one like ``w_tp-rank-0-of-2``."""
    match = _NUMBERED.match(name)
    if match is None or kind_of_number(name, match.span("number")) != SHARDS:
        return None
    return NumberedName(match["stem"], int(match["number"]), int(match["total"]), match["suffix"])


def require_all_numbers(paths: Sequence[str], *, more: Iterable[str] = ()) -> None:
    """Raises SourceIncompleteError that lists the shards which the names of ``paths`` show to be missing, and
    SourceCorruptError for a number that their total does not allow.

    ``more``: the names of others that are known to be.
    """
    sets: dict[tuple[str, int, str], set[int]] = {}
    for path in paths:
        name = numbered(file_name(path))
        if name is not None:
            sets.setdefault((name.stem, name.total, name.suffix), set()).add(name.number)
    by_path = {path: numbered(file_name(path)) for path in paths}
    impossible = [path for path, name in by_path.items() if name is not None and not 1 <= name.number <= name.total]
    if impossible:
        raise SourceCorruptError(
            f"{plural(len(impossible), 'shard', 'have')} a number that the total in the name does not allow",
            details=[file_name(path) for path in impossible],
            files=impossible,
            expected="numbers from 1 to the total",
            why="a shard of another save is in the directory, or a file was renamed",
            next_step="move it away, or restore its name",
            file=impossible[0],
        )
    missing = (
        NumberedName(stem, number, total, suffix).of(number)
        for (stem, total, suffix), numbers in sorted(sets.items())
        for number in range(1, total + 1)
        if number not in numbers
    )
    named = list(islice(chain(missing, more), _MAX_NAMES))
    if named:
        count = f"{len(named)}{' or more' if len(named) == _MAX_NAMES else ''}"
        raise SourceIncompleteError(
            f"{count} {'shard is' if len(named) == 1 else 'shards are'} missing",
            details=named,
            files=[paths[0][: -len(file_name(paths[0]))] + name for name in named],
            why="the download or the save did not finish, or a rank's files are on another machine",
            next_step="copy all shards into one directory",
            file=paths[0],
        )


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The index at ``path``: ``weight_map`` from names to file names, ``metadata`` as it is in the file."""

    path: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]
    notes: tuple[Note, ...]

    @property
    def directory(self) -> str:
        """What precedes the name of each shard."""
        return self.path[: -len(file_name(self.path))]

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.weight_map.values()))

    @property
    def evidence(self) -> Evidence:
        tensors, files = plural(len(self.weight_map), "tensor"), plural(len(self.shards), "file")
        return Evidence(EvidenceKind.CONTAINER, f"{file_name(self.path)} lists {tensors} in {files}")

    def compare(self, by_shard: Mapping[str, Collection[str]]) -> list[Note]:
        """Compare the index with the names that each shard holds; the notes list names that it lacks.

        Raises SourceIncompleteError that lists the names which their shards do not hold.
        """
        absent = {name: shard for name, shard in self.weight_map.items() if name not in by_shard[shard]}
        if absent:
            shown = list(absent.items())[:_MAX_SHOWN]
            raise SourceIncompleteError(
                f"{file_name(self.path)} lists {plural(len(absent), 'tensor')} that their shard does not hold",
                details=[f"{name} is not in {shard}" for name, shard in shown],
                files=[self.directory + shard for _, shard in shown],
                why="shards of different saves are in one directory, or a shard was replaced",
                next_step="copy index and shards from the same save again",
                file=self.path,
                key=next(iter(absent)),
            )
        unlisted = [name for names in by_shard.values() for name in names if name not in self.weight_map]
        if not unlisted:
            return []
        count = plural(len(unlisted), "tensor", "are")
        message = f"{count} in the shards but not in the index: {', '.join(unlisted[:5])}"
        return [Note("unlisted", message, unlisted[0])]


def open_index(path: str, sources: Sources) -> ShardIndex:
    """Read the index at ``path`` and compare it with the files that are beside it.

    Raises SourceCorruptError for anything but an index, SourceIncompleteError that lists the shards that are not there.
    """
    weight_map, metadata = _read(path, sources)
    directory = path[: -len(file_name(path))]
    listed = directory.rstrip("/") or ("/" if directory else ".")
    present = {entry.name for entry in sources.list_directory(listed)}
    shards = set(weight_map.values())
    missing = sorted(shards - present)
    if missing:
        raise SourceIncompleteError(
            f"{file_name(path)} lists {plural(len(shards), 'file')}, and {len(missing):,} of them cannot be found",
            details=missing,
            files=[directory + shard for shard in missing],
            why="the download or the save did not finish",
            next_step="copy the missing files beside the index",
            file=path,
        )
    stems = {(name.stem, name.suffix) for shard in shards if (name := numbered(shard)) is not None}
    others: list[str] = []
    for each in sorted(present - shards):
        name = numbered(each)
        if name is not None and (name.stem, name.suffix) in stems:
            others.append(each)
    notes: tuple[Note, ...] = ()
    if others:
        message = f"{plural(len(others), 'shard', 'belong')} to another save: {some_of(others, 5)}"
        notes = (Note("stray", message, keys=tuple(others), damage=True),)
    return ShardIndex(path, weight_map, metadata, notes)


def _read(path: str, sources: Sources) -> tuple[dict[str, str], Mapping[str, object]]:
    source = sources.open(path)
    try:
        if source.nbytes > _MAX_BYTES:
            raise ValueError("too long")
        document = json.loads(source.read(0, source.nbytes))
        weight_map = document["weight_map"]
        good = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good:
        raise SourceCorruptError(
            f"{path} is not an index of shards",
            file=path,
            expected='a JSON object with a "weight_map" of names to files',
            why="the file was truncated or edited",
        )
    outside = sorted({shard for shard in weight_map.values() if "/" in shard or "\\" in shard or shard in ("", "..")})
    if outside:
        raise SourceCorruptError(
            f"{path} names files outside its directory", file=path, details=outside, why="the index was edited"
        )
    metadata = document.get("metadata")
    return dict(weight_map), metadata if isinstance(metadata, dict) else {}
