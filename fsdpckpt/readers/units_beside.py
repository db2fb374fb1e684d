"""Units that lie beside a checkpoint: in its ``fsdpckpt.json``, or in a units file of its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.units import Units
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.protocols import Entry
from fsdpckpt.storage.sources import Sources

_MARK = b'"fsdpckpt-units"'  # the value of "format", which the program writes first
_HEAD = 4096


@dataclass(frozen=True, slots=True)
class BesideUnits:
    """``units`` and the file that has them; without ``units`` several files differ, and ``path`` names them all."""

    units: Units | None
    path: str
    notes: tuple[Note, ...] = ()


def units_in_manifest(document: object, path: str) -> BesideUnits | None:
    """The units in the ``fsdpckpt.json`` at ``path``, None when it has none."""
    listed = document.get("units") if isinstance(document, dict) else None
    if listed is None:
        return None
    from fsdpckpt.ir.units_json import decode

    try:
        return BesideUnits(decode(listed, source=path), path)
    except SourceError as error:
        return BesideUnits(None, "", (_unreadable(error),))


def units_beside(entries: Sequence[Entry], sources: Sources) -> BesideUnits | None:
    """The units in the units files among ``entries``, the files of one directory; None when there is none.

    Files that say the same count as one; when they differ, none is chosen. One that is broken is not used: a
    checkpoint that needs no units is read all the same, and one that needs them asks for them.
    """
    files: list[tuple[str, Units]] = []
    notes: list[Note] = []
    for entry in entries:
        if _may_hold_units(entry, sources):
            try:
                files.append((entry.path, _read(entry, sources)))
            except SourceError as error:
                notes.append(_unreadable(error))
    if all(units == files[0][1] for _, units in files[1:]):
        if not files:
            return BesideUnits(None, "", tuple(notes)) if notes else None
        return BesideUnits(files[0][1], files[0][0], tuple(notes))
    paths = " and ".join(path for path, _ in files)
    message = f"{paths} are different units files, and none is used: name the right one with --units FILE"
    return BesideUnits(None, paths, (*notes, Note("units-ambiguous", message)))


def _unreadable(error: SourceError) -> Note:
    details = f" ({'; '.join(error.details[:3])})" if error.details else ""
    return Note("units-unreadable", f"{error.what}{details}: these units are not used")


def _may_hold_units(entry: Entry, sources: Sources) -> bool:
    """Whether the file says that it is a units file: near its beginning, or anywhere when its name says so too."""
    if entry.directory or not entry.name.endswith(".json") or entry.name == MANIFEST:
        return False
    try:
        source = sources.open(entry.path)
        head = source.read(0, min(_HEAD, entry.nbytes))
        if _MARK in head:
            return True
        return "units" in entry.name.lower() and _MARK in _content(entry, sources)
    except SourceError:  # a file beside the checkpoint that nobody asked for
        return False


def _read(entry: Entry, sources: Sources) -> Units:
    from fsdpckpt.ir.units_json import loads

    return loads(_content(entry, sources), source=entry.path)


def _content(entry: Entry, sources: Sources) -> bytes:
    """The bytes of the file; of one that is too large for units, enough that ``loads`` says so."""
    from fsdpckpt.ir.units_json import MOST_BYTES

    return sources.open(entry.path).read(0, min(entry.nbytes, MOST_BYTES + 1))
