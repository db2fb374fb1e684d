"""What ``fsdpckpt.json`` adds to a directory that this program wrote: key types, units, lengths, checksums, digests.

A manifest that is damaged is not used. One that contradicts the small files beside it (DCP's metadata, an index) says
that these are damaged, or that another program has written there since: which of the two is not for us to decide.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fsdpckpt.flavors.table import flavor_named
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Manifest, Note, OptimState, Problem, StatedFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.flavors import MANIFEST
from fsdpckpt.readers.manifest_listing import check_listing, listed
from fsdpckpt.readers.units_beside import BesideUnits, units_in_manifest
from fsdpckpt.storage.sources import Sources

__all__ = ["SEAL", "read_manifest", "with_manifest", "with_units"]

SEAL = ',\n "crc32": "'
"""Stands before the CRC-32 of all that precedes it; the manifest ends behind that."""

_SEAL_END = b'"\n}\n'
_CRC_DIGITS = 8
_MOST_DIGITS = 20  # of an id: Python refuses to read a number of thousands of them
_SMALL = (".metadata", ".json")  # files that are read anyway, whose bytes decide what the others mean
_CRC = re.compile("[0-9a-f]{8}")


def read_manifest(
    directory: str, names: Iterable[str], sources: Sources
) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """The manifest in ``directory``, which holds files called ``names``; None when it is not there or is damaged."""
    document, problems = _document(directory, names, sources)
    return (_manifest(directory, document) if document is not None else None), problems


def with_manifest(checkpoint: Checkpoint, directory: str, names: Collection[str], sources: Sources) -> Checkpoint:
    """``checkpoint`` with what the manifest in ``directory``, which holds files called ``names``, says of it."""
    document, problems = _document(directory, names, sources)
    if document is None:
        notes = (Note("manifest", problem.message) for problem in problems)  # a conversion tells of these
        return replace(checkpoint, problems=(*checkpoint.problems, *problems), notes=(*checkpoint.notes, *notes))
    manifest = _manifest(directory, document)
    there = listed(manifest, sources)
    checkpoint.problems = (*checkpoint.problems, *check_listing(manifest, there))
    contradictions = _contradictions(manifest, there, sources)
    if contradictions:
        return replace(checkpoint, manifest=manifest, problems=(*checkpoint.problems, *contradictions))
    units = units_in_manifest(document, manifest.path)
    if units is not None:  # it was written with these very files
        with_units(checkpoint, units)
    optim = checkpoint.optim
    if document.get("key_type") == "id" and optim is not None:
        checkpoint.optim = _with_ids(optim)
    _forget_management(checkpoint, document.get("undetermined"))
    flavor = document.get("flavor")
    if isinstance(flavor, str) and flavor_named(flavor) is not None:
        checkpoint.flavor = flavor
    evidence = f"{MANIFEST}: written by fsdpckpt {document.get('version')}"
    return replace(checkpoint, manifest=manifest, evidence=(*checkpoint.evidence, evidence))


def with_units(checkpoint: Checkpoint, found: BesideUnits) -> None:
    """Give ``checkpoint`` the units that were found."""
    checkpoint.units, checkpoint.units_from = found.units, found.path
    if checkpoint.layout is Layout.FLATTENED or (checkpoint.optim is not None and checkpoint.optim.key_type == "id"):
        checkpoint.notes = (*checkpoint.notes, *found.notes)  # where nothing is flat nobody needs to choose
    if found.units is not None:
        checkpoint.evidence = (*checkpoint.evidence, f"{found.path} says what lies in flat parameters")


def _document(
    directory: str, names: Iterable[str], sources: Sources
) -> tuple[dict[str, object] | None, tuple[Problem, ...]]:
    """The manifest's JSON; None when there is none, or when it is damaged, which the problems say."""
    if MANIFEST not in names:
        return None, ()
    path = _path(directory)
    source = sources.open(path)
    data = source.read(0, source.nbytes)
    if _seal_broken(data):
        return None, _damaged(path, "its bytes do not sum to the checksum at its end")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None, _damaged(path, "it is no JSON")
    return (document, ()) if isinstance(document, dict) else (None, _damaged(path, "it is no JSON object"))


def _seal_broken(data: bytes) -> bool:
    """Whether the checksum at the end, or what it sums, is not as it was written. Who writes a manifest by hand may
    leave it out altogether.
    """
    nbytes = len(SEAL) + _CRC_DIGITS + len(_SEAL_END)
    body, end = data[:-nbytes], data[-nbytes:]
    crc = b"%08x" % zlib.crc32(body)
    return end != SEAL.encode() + crc + _SEAL_END and (SEAL.encode() in end or crc in end)


def _path(directory: str) -> str:
    return f"{directory.rstrip('/')}/{MANIFEST}"


def _damaged(path: str, how: str) -> tuple[Problem, ...]:
    message = f"{path} is damaged, and nothing that it says is used: {how}"
    return (Problem("manifest", message, fatal=False, file=path),)


def _manifest(directory: str, document: Mapping[str, object]) -> Manifest:
    files, digests = _files(document.get("files")), _digests(document.get("digests"))
    return Manifest(_path(directory), directory.rstrip("/"), files, digests)


def _files(listed: object) -> dict[str, StatedFile]:
    found: dict[str, StatedFile] = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        nbytes, crc = (entry.get("nbytes"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
        if (
            isinstance(name, str)
            and _inside(name)
            and isinstance(nbytes, int)
            and isinstance(crc, str)
            and _CRC.fullmatch(crc)
        ):
            found[name] = StatedFile(nbytes, int(crc, 16))
    return found


def _inside(name: str) -> bool:
    """Whether a file of this name lies in the directory: no other one is looked at."""
    return "\0" not in name and not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))


def _digests(listed: object) -> dict[str, str]:
    entries = listed.items() if isinstance(listed, dict) else ()
    return {key: value for key, value in entries if isinstance(key, str) and isinstance(value, str)}


def _contradictions(manifest: Manifest, there: Collection[str], sources: Sources) -> list[Problem]:
    found = []
    for name, stated in manifest.files.items():
        if name not in there or not name.endswith(_SMALL):
            continue
        source = sources.open(f"{manifest.directory}/{name}")
        if source.nbytes != stated.nbytes or zlib.crc32(source.read(0, source.nbytes)) != stated.crc:
            message = (
                f"{source.path} is not what {manifest.path} says of it: it is damaged, or another program wrote here "
                f"since (then remove {MANIFEST})"
            )
            found.append(Problem("checksum", message, file=source.path))
    return found


def _forget_management(checkpoint: Checkpoint, undetermined: object) -> None:
    """Keys of which nobody knew whether FSDP shards them are no surer for having been written."""
    if not isinstance(undetermined, list) or checkpoint.model is None:
        return
    params = checkpoint.model.params
    for key in undetermined:
        leaf = params.get(key) if isinstance(key, str) else None
        if isinstance(leaf, Tensor):
            params[key] = replace(leaf, managed=None)


def _with_ids(optim: OptimState) -> OptimState:
    """Ids that a container wrote as strings and no param group tells of."""
    if optim.param_groups or not all(
        isinstance(key, int) or (key.isdecimal() and len(key) < _MOST_DIGITS) for key in optim.state
    ):
        return optim
    return OptimState({int(key): states for key, states in optim.state.items()}, optim.param_groups, optim.extra)
