"""Reports what one conversion did: the result of the command, and ``fsdpckpt.json`` in every directory it writes."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fsdpckpt.converters.steps.draft import TransformedCheckpoint
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.credentials import without_credentials
from fsdpckpt.execute.compared_output import target_differs
from fsdpckpt.ir.account import Fate
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Note
from fsdpckpt.ir.files import require_stored
from fsdpckpt.ir.rows import undetermined
from fsdpckpt.ir.targets import LinkedFile, Target
from fsdpckpt.ir.units_json import encode
from fsdpckpt.ir.values import encode as encode_value
from fsdpckpt.notebook import table
from fsdpckpt.options import LinkMode
from fsdpckpt.producers import Flavor
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.readers.manifest import SEAL
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import is_url
from fsdpckpt.storage.local_target import WritableFile, target_errors
from fsdpckpt.storage.staging import Staging
from fsdpckpt.storage.target_checks import Contents
from fsdpckpt.text import plural, size_text
from fsdpckpt.version import __version__

_LOCAL_COPY = "COPY"
_DERIVED = ("disk_needed", "disk_suffices", "warnings")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One target file: its path below DST ("" when DST is the file) and length in bytes.

    ``source``: the file that it is a link to, None for one that is written.
    """

    path: str
    nbytes: int
    source: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """Sizes are bytes, ``seconds`` wall time. ``peak_memory_planned``: the copy buffers, under ``--max-memory``.

    ``tensor_bytes`` is what the values of DST take, as ``verify`` counts; ``bytes_written`` also has headers, and not
    what is linked. ``bytes_read`` is tensor data, without headers and metadata. ``disk_needed`` is what DST will
    occupy; ``disk_free`` is the space a dry run found there, None if it was not measured. ``staged_in``: the local
    directory that needs this space when DST is in an object store. ``link``: how the linked files among ``files`` were
    made; their bytes count neither as read nor as written. ``replaced``: the files of the checkpoint at DST that
    ``--overwrite`` replaced (in a dry run: would replace). ``workers``: the number of processes, each with ``threads``
    threads and ``peak_memory_planned`` bytes. ``loads``: how the framework's user loads DST, "" for a plain target.
    ``was_complete``: DST was there, and every byte of it is what this conversion would have written. ``streamed``: DST
    is in a store to which its parts were sent as they were assembled: no disk is needed.
    """

    source: str
    target: str
    layout: str
    container: str
    flavor: str
    world_size: int | None
    tensors: int
    parameters: int
    bytes_read: int
    bytes_written: int
    peak_memory_planned: int
    threads: int
    seconds: float
    dry_run: bool
    verified: str
    notes: tuple[Note, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    source_files: int = 0
    evidence: tuple[str, ...] = ()
    workers: int = 1
    disk_free: int | None = None
    staged_in: str | None = None
    link: str = LinkMode.COPY
    replaced: tuple[PlannedFile, ...] = ()
    loads: str = ""
    tensor_bytes: int = 0
    was_complete: bool = False
    streamed: bool = False

    def __repr__(self) -> str:
        """What a notebook shows. ``to_json`` has everything."""
        done = "planned" if self.dry_run else f"verified: {self.verified}"
        ranks = f", {plural(self.world_size, 'rank')}" if self.world_size is not None else ""
        size = f"{size_text(self.bytes_written)} in {plural(len(self.files), 'file')}"
        return (
            f"<{without_credentials(self.target)}: {self.layout}, {self.container} ({self.flavor}){ranks}; "
            f"{plural(self.tensors, 'tensor')}, {size}; {done}; {plural(len(self.notes), 'note')}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: what was written, how to load it, warnings first, then all notes."""
        rows = [("warning" if note.warning else "note", note.message) for note in self.notes]
        rows.sort(key=lambda row: row[0] == "note")
        loads = [("load it with", self.loads)] if self.loads else []
        rows = list(dict.fromkeys([*loads, *rows]))
        return table(repr(self)[1:-1], ("", ""), rows, len(rows))

    def uploaded_to(self, url: str) -> Report:
        """The report of what was converted elsewhere and is now at ``url``."""
        flavor = flavor_named(self.flavor)
        loads = how_to_load(flavor, url) if flavor is not None and self.loads else ""
        return replace(self, target=url, loads=loads)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The messages of the notes that are warnings, each once."""
        return tuple(dict.fromkeys(note.message for note in self.notes if note.warning))

    @property
    def disk_needed(self) -> int:
        return 0 if self.streamed else self.bytes_written

    @property
    def disk_suffices(self) -> bool | None:
        """Whether DST fits on its disk; None if the space was not measured."""
        return None if self.disk_free is None else self.disk_needed <= self.disk_free

    def to_json(self) -> dict[str, object]:
        """The report as JSON types; keys are the field names, plus ``disk_needed``, ``disk_suffices``, ``warnings``."""
        document: dict[str, Any] = asdict(self)
        shown = {name: without_credentials(document[name]) for name in ("source", "target", "loads")}
        for note in document["notes"]:
            del note["for_verify"]  # no fact about the conversion
        return document | shown | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """The inverse of ``to_json``."""
        fields = {name: value for name, value in document.items() if name not in _DERIVED}
        fields["notes"] = tuple(Note(**{**note, "keys": tuple(note["keys"])}) for note in fields["notes"])
        for name in ("files", "replaced"):
            fields[name] = tuple(PlannedFile(**file) for file in fields[name])
        return cls(**{**fields, "evidence": tuple(fields["evidence"])})


def how_to_load(flavor: Flavor, target: str) -> str:
    """How a user of ``flavor`` loads a checkpoint at ``target``. The frameworks' loaders read local paths only."""
    if not flavor.loads or not is_url(target):
        return flavor.loads.format(target=target)
    return f"{flavor.loads.format(target=_LOCAL_COPY)}, where {_LOCAL_COPY} is a copy of {target} on disk"


def replaced_files(replaces: Contents) -> tuple[PlannedFile, ...]:
    """``Report.replaced`` for the given contents of DST."""
    return tuple(PlannedFile(name, contents.nbytes) for name, contents in sorted(replaces.items()))


def encode_manifest(
    target: Target,
    transformed: TransformedCheckpoint,
    decision: Decision,
    *,
    link: LinkMode,
    crcs: Mapping[str, int],
    digests: Mapping[str, str],
) -> bytes:
    """Return the content of ``fsdpckpt.json``.

    ``link``: how ``target.links`` were made. ``crcs``: the CRC-32 of each written file; ``verify`` uses it to find
    damage in containers without checksums. A linked file keeps the CRC-32 from the source's manifest, if there is one.
    ``digests``: the SHA-256 of each tensor's row-major bytes, if ``--verify full`` computed them.
    """
    checkpoint = transformed.checkpoint
    key_type = checkpoint.optim.key_type if checkpoint.optim is not None else None
    notes = [*checkpoint.notes, *target.notes]
    uploaded = decision.container is Container.SAFETENSORS  # people publish such a directory

    own_paths = [without_credentials(path) for path in (checkpoint.source, checkpoint.origin.directory) if path]

    def without_paths(text: str) -> str:
        text = without_credentials(text)
        return _without_directories(text, own_paths) if uploaded else text

    document = {
        "program": "fsdpckpt",
        "version": __version__,
        "format": 1,
        "source": without_paths(checkpoint.source),
        "source_layout": checkpoint.layout,
        "source_container": checkpoint.container,
        "source_world_size": checkpoint.world_size,
        "flavor": decision.flavor_name,
        "layout": decision.layout,
        "container": decision.container,
        "world_size": decision.world_size,
        "mesh": str(decision.mesh) if decision.mesh is not None else None,
        "key_type": transformed.key_type if key_type is not None and transformed.units is not None else key_type,
        "maps": [applied.to_json() for applied in transformed.applied_maps],
        "units": encode(transformed.units) if transformed.units is not None else None,
        **_section_units(checkpoint),
        **({"lost_dicts": [each.to_json() for each in target.lost]} if target.lost else {}),
        "notes": [
            {
                "kind": note.kind,
                "key": without_paths(note.key or "") or None,
                "message": without_paths(note.message),
                "warning": note.warning,
            }
            for note in notes
        ],
        "copied": [path for paths in checkpoint.ledger.account.paths(Fate.COPIED).values() for path in paths],
        "left_out": checkpoint.ledger.account.paths(Fate.LEFT_OUT),
        "undetermined": undetermined(checkpoint),
        "files": {
            **{linked.path: _linked_entry(linked, link, checkpoint, without_paths) for linked in target.links},
            **{file.path: {"nbytes": file.nbytes, "crc32": f"{crcs[file.path]:08x}"} for file in target.files},
        },
        "digests": dict(digests),
    }
    body = json.dumps(document, indent=1).removesuffix("\n}")
    return f'{body}{SEAL}{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()


def _section_units(checkpoint: Checkpoint) -> dict[str, object]:
    """The entry with the units of each named section that has some, and where the section is."""
    entries = [
        {
            "section": str(named.section),
            "name": named.name,
            "path": encode_value(list(named.path)),
            "units": encode(named.units),
        }
        for named in checkpoint.named
        if named.units is not None
    ]
    return {"section_units": entries} if entries else {}


def _linked_entry(
    linked: LinkedFile, link: LinkMode, checkpoint: Checkpoint, without_paths: Callable[[str], str]
) -> dict[str, object]:
    source = require_stored(checkpoint.files[linked.source])
    manifest = checkpoint.origin.manifest
    name = os.path.relpath(source.path, manifest.directory) if manifest is not None else ""
    listed = manifest.files.get(name) if manifest is not None else None
    crc = listed.crc if listed is not None and listed.nbytes == source.nbytes else None
    text = f"{crc:08x}" if crc is not None else None
    return {"nbytes": source.nbytes, "crc32": text, "link": link, "source": without_paths(source.path)}


# A path with a directory in it that begins at the root, in a drive or with a scheme.
_DIRECTORIES = re.compile(r"(?<![\w.:/-])(?:[A-Za-z][\w+.-]*:/)?/(?:[^\s:;,'\"]*/)*")


def _without_directories(text: str, paths: Sequence[str]) -> str:
    """Replace every local path in ``text`` by its last component.

    ``paths``: those of the source, which may contain spaces.
    """
    for path in sorted(paths, key=len, reverse=True):
        text = text.replace(path, posixpath.basename(path.partition("?")[0].rstrip("/")) or ".")
    return _DIRECTORIES.sub("", text)


def put_manifest(staging: Staging, data: bytes) -> None:
    """Write ``data`` as the ``fsdpckpt.json`` of the staged output, replacing an earlier one."""
    path = staging.locate(MANIFEST)
    with target_errors(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    file = WritableFile(path, len(data))
    file.write(0, data)
    file.commit()


def existing_manifest(target: str) -> bytes:
    """The ``fsdpckpt.json`` of a DST that exists. Raises TargetExistsError if it has none."""
    path = os.path.join(os.path.realpath(target), MANIFEST)
    if not os.path.isfile(path):
        raise target_differs(target)
    with open(path, "rb") as file:
        return file.read()
