"""Reads units files: they lie beside a checkpoint and record what its own files do not, the names in flat parameters
or the order of the parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpckpt import flags
from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.units import Units
from fsdpckpt.readers.protocol import MANIFEST, UNITS
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources, is_in

_UNITS_MARK = b'"fsdpckpt-units"'  # the value of "format", which the program writes first
_UNITS_HEAD = 4096
_KEYS_OF_UNITS = frozenset({"program", "use_orig_params", "parameters", "unmanaged"})


@dataclass(frozen=True, slots=True)
class RefusedUnits:
    """The units file at ``path`` cannot be read: ``why``."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class FoundUnits:
    """``units`` and the file that has them; if ``units`` is None, several files differ, and ``path`` names them all.

    ``ambiguous``: why none of several is used.
    """

    units: Units | None
    path: str
    refused: tuple[RefusedUnits, ...] = ()
    ambiguous: str = ""


def find_units(entries: Sequence[Entry], sources: Sources) -> FoundUnits | None:
    """The units in the units files among ``entries``, the files of one directory; None if there is none.

    Equal files count as one; if they differ, none is chosen. A broken file is not used: a checkpoint that needs no
    units is still read, and one that needs them is refused (``units_beside_unreadable``).
    """
    files: list[tuple[str, Units]] = []
    refused: list[RefusedUnits] = []
    for entry in entries:
        if _may_hold_units(entry, sources):
            from fsdpckpt.ir.units_json import loads

            try:
                units = loads(_content(entry, sources), source=entry.path)
                files += [(entry.path, units)] if units is not None else []
            except SourceError as error:
                refused.append(refused_units(entry.path, error))
    if all(units == files[0][1] for _, units in files[1:]):
        if not files:
            return FoundUnits(None, "", tuple(refused)) if refused else None
        return FoundUnits(files[0][1], files[0][0], tuple(refused))
    paths = " and ".join(path for path, _ in files)
    message = f"{paths} are different units files, and none is used: name the right one with {flags.units('FILE')}"
    return FoundUnits(None, paths, tuple(refused), message)


def refused_units(path: str, error: SourceError) -> RefusedUnits:
    details = f" ({'; '.join(error.details[:3])})" if error.details else ""
    return RefusedUnits(path, f"{error.what}{details}: these units are not used")


def _may_hold_units(entry: Entry, sources: Sources) -> bool:
    """Whether the file is named as ``save_units`` names one, whatever is left in it, unless it is plainly of another
    program; or marked as a units file: near its beginning, or anywhere if its name speaks of units.
    """
    if entry.directory or not entry.name.endswith(".json") or entry.name == MANIFEST:
        return False
    try:
        if entry.name == UNITS:
            return not _is_of_another_program(_content(entry, sources))
        head = sources.open(entry.path).read(0, min(_UNITS_HEAD, entry.nbytes))
        if _UNITS_MARK in head or "units" not in entry.name.lower():
            return _UNITS_MARK in head
        return _UNITS_MARK in _content(entry, sources)
    except SourceError:  # a file beside the checkpoint that was not requested
        return entry.name == UNITS


def _is_of_another_program(content: bytes) -> bool:
    """Whether this is a whole JSON object that has nothing of a units file, such as the units of measured data."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    unlike = isinstance(document, dict) and bool(document) and not _KEYS_OF_UNITS.intersection(document)
    return unlike and _UNITS_MARK not in content


def _content(entry: Entry, sources: Sources) -> bytes:
    """The bytes of the file; of a file too large for units, only enough for ``loads`` to report that."""
    from fsdpckpt.ir.units_json import MAX_BYTES

    return sources.open(entry.path).read(0, min(entry.nbytes, MAX_BYTES + 1))


def with_units(checkpoint: Checkpoint, found: FoundUnits) -> None:
    """Give ``checkpoint`` the units that were found."""
    checkpoint.units = found.units
    checkpoint.origin = replace(checkpoint.origin, units_from=found.path)
    enter_refused(checkpoint, found)
    if found.ambiguous and _needs_units(checkpoint):
        ambiguous = Note("units-ambiguous", found.ambiguous, for_verify=True)
        checkpoint.ledger = checkpoint.ledger.with_notes(ambiguous)
    if found.units is not None:
        what = "what lies in flat parameters" if found.units.flat else "the order of the parameters"
        evidence = Evidence(EvidenceKind.UNITS, f"{found.path} says {what}")
        checkpoint.ledger = checkpoint.ledger.with_evidence(evidence)


def _needs_units(checkpoint: Checkpoint) -> bool:
    """Whether there are flat parameters or ids, which units name."""
    return checkpoint.layout is Layout.FLATTENED or (checkpoint.optim is not None and checkpoint.optim.key_type == "id")


def enter_refused(checkpoint: Checkpoint, found: FoundUnits) -> None:
    """Say of ``checkpoint`` which files of units are not used, and why. One that is not in SRC is a run's, or another
    file's: it matters only to a checkpoint that needs it.
    """
    needed = _needs_units(checkpoint)
    of_checkpoint = [each for each in found.refused if needed or is_in(each.path, checkpoint.source)]
    refused = (*checkpoint.origin.units_refused, *(each.why for each in of_checkpoint))
    checkpoint.origin = replace(checkpoint.origin, units_refused=refused)
    notes = [Note("units-unreadable", each.why, warning=True, damage=True) for each in of_checkpoint]
    checkpoint.ledger = checkpoint.ledger.with_notes(*notes)


def note_other_units(checkpoint: Checkpoint, recorded: FoundUnits) -> None:
    """Say that a units file in the directory of ``checkpoint`` says something else than its manifest."""
    beside = checkpoint.origin.units_from
    if checkpoint.units in (None, recorded.units) or recorded.units is None or not is_in(beside, checkpoint.source):
        return
    message = f"{beside} is about other units than {recorded.path} records with these files, and is not used"
    note = Note("units-ambiguous", message, for_verify=True)
    checkpoint.ledger = checkpoint.ledger.with_notes(note)
