"""Reads ``fsdpckpt.json``, the manifest that this program leaves beside a checkpoint.

It is in every directory that this program wrote: key types, units, lengths, checksums and digests. A damaged
one is not used, and nothing is converted beside it: who removes it gives the checksums up. If it contradicts the small
files beside it (DCP's metadata, an index), either these are damaged or another program has written there since; nothing
shows which.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fsdpckpt.errors import SourceError
from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.ir.checkpoint import (
    Checkpoint,
    Evidence,
    EvidenceKind,
    Layout,
    Manifest,
    ManifestFile,
    Note,
    Problem,
    ProblemKind,
)
from fsdpckpt.ir.files import paths_in, stored_by_number
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.spans import tensor_bytes_by_file
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, require_key
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.readers.side_files import auxiliary, section_of_name
from fsdpckpt.readers.units_files import FoundUnits, enter_refused, note_other_units, refused_units, with_units
from fsdpckpt.storage import ByteSource, Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import bytes_text

SEAL = ',\n "crc32": "'
"""Precedes the CRC-32 of all bytes before it, with which the manifest ends."""

_SEAL_END = b'"\n}\n'
_CRC_DIGITS = 8
_MAX_DIGITS = 20  # digits of an id: Python refuses to parse thousands of them
_BATCH = 1 << 24  # bytes
_SMALL = (".metadata", ".json")  # files that are always read: the others mean nothing without them
_SMALL_BYTES = 1 << 20
_WHOLE = (Layout.FULL, Layout.SHARDED)
_CRC = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """What ``fsdpckpt.json`` says. ``manifest``: None if it is missing, or damaged, which is then in ``problems``.

    ``document``: its JSON. ``units``: those of the checkpoint, None if it records none. ``without_slices``: the paths
    of the listed files, unless they were written as slices of flat parameters. ``lost``: the dicts that are others in
    the DCP directory.
    """

    manifest: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    document: Mapping[str, object] = field(default_factory=dict)
    units: FoundUnits | None = None
    without_slices: frozenset[str] = frozenset()
    lost: tuple[LostDict, ...] = ()


def read_manifest(directory: str, names: Collection[str], sources: Sources) -> ReadManifest:
    """Read the manifest in ``directory``, which holds files called ``names``."""
    if MANIFEST not in names:
        return ReadManifest()
    path = f"{directory.rstrip('/')}/{MANIFEST}"
    source = sources.open(path)
    data = source.read(0, source.nbytes)
    document, how = None, "it is not a JSON object"
    if _seal_broken(data):
        how = "its bytes do not match the checksum at its end"
    else:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            how = "it is not JSON"
    if not isinstance(document, dict):
        what = f"{path} is damaged: {how}. Without it (remove it) nothing can be compared with the checksums in it"
        return ReadManifest(problems=(Problem("manifest", what, file=path),))
    recorded = document.get("digests")
    digests = recorded if isinstance(recorded, dict) else {}
    digests = {key: value for key, value in digests.items() if isinstance(value, str)}
    manifest = Manifest(path, directory.rstrip("/"), _files(document.get("files")), digests)
    paths = map(manifest.path_of, manifest.files)
    without_slices = frozenset(paths) if document.get("layout") in _WHOLE else frozenset()
    lost = _lost_dicts(document.get("lost_dicts"), path)
    return ReadManifest(manifest, (), document, _units(document.get("units"), path), without_slices, lost)


def _lost_dicts(recorded: object, path: str) -> tuple[LostDict, ...]:
    """The dicts that are others in the DCP directory; none from a record that this program does not write."""
    decode = partial(decode_allowed, file=path)
    try:
        return tuple(LostDict.from_json(each, decode) for each in recorded) if isinstance(recorded, list) else ()
    except (KeyError, TypeError, ValueError, SourceError):
        return ()


def _units(recorded: object, path: str) -> FoundUnits | None:
    if recorded is None:
        return None
    from fsdpckpt.ir.units_json import decode

    try:
        return FoundUnits(decode(recorded, source=path), path)
    except SourceError as error:
        return FoundUnits(None, "", (refused_units(path, error),))


def with_manifest(checkpoint: Checkpoint, read: ReadManifest, sources: Sources) -> Checkpoint:
    """Apply the manifest of its directory to ``checkpoint``."""
    manifest, document = read.manifest, read.document
    if manifest is None:
        checkpoint.ledger = checkpoint.ledger.with_problems(*read.problems)
        notes = (Note("manifest", problem.message) for problem in read.problems)  # a conversion reports these
        checkpoint.ledger = checkpoint.ledger.with_notes(*notes)
        return checkpoint
    checkpoint.origin = replace(checkpoint.origin, manifest=_with_tensor_bytes(manifest, checkpoint))
    present = present_files(manifest, sources)
    contradictions = _contradictions(manifest, present, checkpoint, sources)
    checkpoint.ledger = checkpoint.ledger.with_problems(*check_listing(manifest, present), *contradictions)
    if contradictions:
        _enter_changed(checkpoint, contradictions)
        return checkpoint
    if read.units is not None:  # they were written with these very files
        note_other_units(checkpoint, read.units)
        with_units(checkpoint, read.units)
    if document.get("section_units"):
        _with_section_units(checkpoint, document.get("section_units"), manifest.path)
    optim = checkpoint.optim
    if document.get("key_type") == "id" and optim is not None:
        checkpoint.optim = _with_ids(optim)
    _restore_undetermined(checkpoint, document.get("undetermined"))
    flavor = document.get("flavor")
    if isinstance(flavor, str) and flavor_named(flavor) is not None:
        checkpoint.origin = replace(checkpoint.origin, flavor=flavor)
    evidence = Evidence(EvidenceKind.MANIFEST, f"{MANIFEST}: written by fsdpckpt {document.get('version')}")
    checkpoint.ledger = checkpoint.ledger.with_evidence(evidence)
    return checkpoint


def _with_section_units(checkpoint: Checkpoint, recorded: object, path: str) -> None:
    """Give the named sections of ``checkpoint`` the units that were recorded with them, by their places."""
    units_at: dict[tuple[str, tuple[object, ...]], Units | None] = {}
    for entry in recorded if isinstance(recorded, list) else ():
        keys = _recorded_path(entry.get("path"), path) if isinstance(entry, dict) else None
        if keys is not None:
            found = _units(entry.get("units"), path)
            units_at[str(entry.get("section")), keys] = found.units if found is not None else None
            if found is not None and found.refused:
                enter_refused(checkpoint, found)
    checkpoint.named = tuple(
        replace(named, units=units_at.get((str(named.section), named.path), named.units)) for named in checkpoint.named
    )
    evidence = Evidence(EvidenceKind.UNITS, f"{path} says what lies in the flat parameters of each section")
    checkpoint.ledger = checkpoint.ledger.with_evidence(evidence)


def _recorded_path(recorded: object, path: str) -> tuple[Key, ...] | None:
    """The keys of a section, None for a record that this program does not write."""
    try:
        keys = decode_allowed(recorded, file=path) if isinstance(recorded, list) else None
        return tuple(map(require_key, keys)) if isinstance(keys, list) else None
    except (TypeError, SourceError):  # what is no key
        return None


def with_manifests_of_parts(checkpoint: Checkpoint, directory: str, sources: Sources) -> None:
    """Add to the manifest of ``checkpoint``, which was found in ``directory``, those of the directories below it that
    hold its parts: what was written on its own keeps the checksums that were recorded for it.
    """
    top = directory.rstrip("/")
    manifest = checkpoint.origin.manifest
    listed = set() if manifest is None else {f"{top}/{name}" for name in manifest.files}
    files = [path for path in paths_in(checkpoint.files) if path.startswith(f"{top}/") and path not in listed]
    for folder in sorted({posixpath.dirname(path) for path in files} - {top}):
        read = read_manifest(folder, [entry.name for entry in sources.list_directory(folder)], sources)
        present = present_files(read.manifest, sources) if read.manifest is not None else {}
        _add_manifest(checkpoint, read, present, top, sources)


def with_manifest_beside(checkpoint: Checkpoint, path: str, sources: Sources) -> None:
    """Apply to ``checkpoint``, which is the file at ``path``, what a manifest in its directory says of this file."""
    directory, name = os.path.split(path)
    if path.startswith(("http://", "https://")):  # a server may answer for any name
        return
    beside = sources.stat(os.path.join(directory, MANIFEST))
    entry = sources.stat(path)
    if beside is None or beside.directory or entry is None:
        return
    read = read_manifest(directory or ".", (MANIFEST,), sources)
    if read.manifest is not None:
        listed = read.manifest.files.get(name)
        files = {name: listed} if listed is not None else {}
        read = replace(read, manifest=replace(read.manifest, directory=directory, files=files, digests={}))
    _add_manifest(checkpoint, read, {name: entry}, directory, sources)


def _add_manifest(
    checkpoint: Checkpoint, read: ReadManifest, present: Mapping[str, Entry], top: str, sources: Sources
) -> None:
    """Add the files of a manifest, and what is wrong with them, to ``checkpoint``. Names become relative to ``top``.

    ``present``: as for ``check_listing``.
    """
    manifest = read.manifest
    checkpoint.ledger = checkpoint.ledger.with_problems(*read.problems)
    if manifest is None or not manifest.files:
        return
    contradictions = _contradictions(manifest, present, checkpoint, sources)
    checkpoint.ledger = checkpoint.ledger.with_problems(*check_listing(manifest, present), *contradictions)
    _enter_changed(checkpoint, contradictions)
    folder = manifest.directory.removeprefix(top).strip("/")
    files = {posixpath.join(folder, name): listed for name, listed in manifest.files.items()}
    whole = checkpoint.origin.manifest
    whole = Manifest(manifest.path, top, files, {}) if whole is None else replace(whole, files={**whole.files, **files})
    checkpoint.origin = replace(checkpoint.origin, manifest=_with_tensor_bytes(whole, checkpoint))


def _with_tensor_bytes(manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """``manifest`` with how much of each file belongs to tensors."""
    by_number = tensor_bytes_by_file(checkpoint.leaves())
    if by_number is None:
        return manifest
    by_path = {file.path: by_number.get(number, 0) for number, file in stored_by_number(checkpoint.files).items()}
    files: dict[str, ManifestFile] = {}
    for name, listed in manifest.files.items():
        files[name] = replace(listed, tensor_bytes=by_path.get(manifest.path_of(name), 0))
    return replace(manifest, files=files)


def _seal_broken(data: bytes) -> bool:
    """Whether the checksum at the end, or the bytes it covers, changed. A manifest written by hand may have none."""
    nbytes = len(SEAL) + _CRC_DIGITS + len(_SEAL_END)
    body, end = data[:-nbytes], data[-nbytes:]
    crc = b"%08x" % zlib.crc32(body)
    return end != SEAL.encode() + crc + _SEAL_END and (SEAL.encode() in end or crc in end)


def _files(listed: object) -> dict[str, ManifestFile]:
    files: dict[str, ManifestFile] = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        nbytes, crc = (entry.get("nbytes"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
        if (
            isinstance(name, str)
            and _is_inside(name)
            and isinstance(nbytes, int)
            and (crc is None or (isinstance(crc, str) and _CRC.fullmatch(crc)))
        ):
            files[name] = ManifestFile(nbytes, int(crc, 16) if crc is not None else None)
    return files


def _is_inside(name: str) -> bool:
    """Whether a file of this name is inside the directory; files elsewhere are never opened."""
    return "\0" not in name and not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))


def _contradictions(
    manifest: Manifest, present: Collection[str], checkpoint: Checkpoint, sources: Sources
) -> list[Problem]:
    """Problems of small files that are not what ``manifest`` recorded: those that are always read, and those in which
    ``checkpoint`` has no tensors, so that nobody reads them later.
    """
    problems = []
    with_tensors = set(paths_in(checkpoint.files))
    for name, listed in manifest.files.items():
        apart = listed.nbytes <= _SMALL_BYTES and manifest.path_of(name) not in with_tensors
        if name not in present or listed.crc is None or not (apart or name.endswith(_SMALL)):
            continue
        source = sources.open(manifest.path_of(name))
        if source.nbytes != listed.nbytes or _crc(source) != listed.crc:
            message = (
                f"{source.path} does not match {manifest.path}: it is damaged, or another program wrote here since "
                f"(then remove {MANIFEST})"
            )
            problems.append(Problem("checksum", message, file=source.path))
    return problems


def _enter_changed(checkpoint: Checkpoint, contradictions: Sequence[Problem]) -> None:
    changed = (*checkpoint.origin.changed, *(problem.file for problem in contradictions if problem.file is not None))
    checkpoint.origin = replace(checkpoint.origin, changed=changed)


def _crc(source: ByteSource) -> int:
    crc = 0
    for at in range(0, source.nbytes, _BATCH):  # the .metadata of thousands of ranks takes gigabytes
        crc = zlib.crc32(source.read(at, min(_BATCH, source.nbytes - at)), crc)
    return crc


def _restore_undetermined(checkpoint: Checkpoint, undetermined: object) -> None:
    """Leave open whether FSDP shards the parameters ``undetermined``: the source of this output did not say."""
    if not isinstance(undetermined, list) or checkpoint.model is None:
        return
    params = checkpoint.model.params
    for key in undetermined:
        leaf = params.get(key) if isinstance(key, str) else None
        if isinstance(leaf, Tensor):
            params[key] = replace(leaf, sharded=None)


def _with_ids(optim: Optimizer) -> Optimizer:
    """``optim`` with its ids as numbers: a container stored them as strings, and there are no param groups."""
    keys = list(optim.all_keys())
    if optim.param_groups or not all(map(_is_id, keys)):
        return optim
    return optim.renamed({key: int(key) for key in keys})


def _is_id(key: ParamKey) -> bool:
    return isinstance(key, int) or (key.isdecimal() and len(key) < _MAX_DIGITS)


_DECIDING = (".metadata", ".index.json")  # small, and without them the others mean nothing


def check_listing(manifest: Manifest, present: Mapping[str, Entry]) -> list[Problem]:
    """Problems of files that are missing or have a different length, and of files in the same directories that the
    manifest does not list.

    ``present``: the result of ``present_files``. A missing file that only describes a model is not fatal.
    """
    problems: list[Problem] = []
    for name, listed in manifest.files.items():
        path = manifest.path_of(name)
        entry = present.get(name)
        if entry is None:
            message = f"{path} is missing, and {MANIFEST} lists it (if that is meant, remove {MANIFEST} too)"
            fatal = name.endswith(_DECIDING) or not auxiliary(posixpath.basename(name))
            problems.append(Problem("missing-file", message, fatal=fatal, file=path, section=section_of_name(name)))
        elif entry.nbytes != listed.nbytes:
            message = f"{path} has {bytes_text(entry.nbytes)}, and {MANIFEST} says {bytes_text(listed.nbytes)}"
            kind: ProblemKind = "truncated" if entry.nbytes < listed.nbytes else "length"
            problems.append(Problem(kind, message, file=path, section=section_of_name(name)))
    return [*problems, *_stray_problems(manifest, present)]


def present_files(manifest: Manifest, sources: Sources) -> dict[str, Entry]:
    """The files in every directory that the manifest names, by their path relative to its own."""
    files: dict[str, Entry] = {}
    for folder in sorted({"", *(posixpath.dirname(name) for name in manifest.files)}):
        path = posixpath.join(manifest.directory, folder).rstrip("/") or "."
        entry = sources.stat(path)
        if entry is not None and entry.directory:
            for inner in sources.list_directory(path):
                if not inner.directory:
                    files[posixpath.join(folder, inner.name)] = inner
    return files


def _stray_problems(manifest: Manifest, present: Mapping[str, Entry]) -> list[Problem]:
    """Problems of files that look like those of the checkpoint but were not written with it."""
    kinds = {os.path.splitext(name)[1] for name in manifest.files} - {"", ".json"}
    strays = [name for name in present if os.path.splitext(name)[1] in kinds and name not in manifest.files]
    why = f"is not among the files that {MANIFEST} lists: another save left it, or it was put there since"
    paths = map(manifest.path_of, sorted(strays))
    return [Problem("stray", f"{path} {why}", fatal=False, file=path) for path in paths]
