"""What one conversion did, as data: for the summary, ``--json`` and ``fsdpckpt.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdpckpt.ir.checkpoint import Note

__all__ = ["PlannedFile", "Report"]


_DERIVED = ("disk_needed", "disk_suffices")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One target file: its path below DST ("" when DST is the file) and length in bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Sizes are bytes, ``seconds`` wall time. ``peak_memory_planned``: the copy buffers, under ``--max-memory``.

    ``bytes_read`` is tensor data; headers and metadata come on top. ``disk_needed`` is what DST will occupy,
    ``disk_free`` what a dry run found free there (None: nobody looked).
    ``staged_in``: the local directory it needs that in, when DST is in an object store.
    ``workers``: processes, each with ``threads`` threads and ``peak_memory_planned`` bytes.
    """

    source: str
    target: str
    layout: str
    container: str
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
    evidence: tuple[str, ...] = field(default=())
    workers: int = 1
    disk_free: int | None = None
    staged_in: str | None = None

    @property
    def disk_needed(self) -> int:
        return self.bytes_written

    @property
    def disk_suffices(self) -> bool | None:
        """Whether DST fits; None when nobody looked."""
        return None if self.disk_free is None else self.disk_needed <= self.disk_free

    def to_json(self) -> dict[str, object]:
        """The report as JSON types; keys are the field names, plus ``disk_needed`` and ``disk_suffices``."""
        document: dict[str, object] = asdict(self)
        return document | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """The report that ``to_json`` made ``document`` of."""
        fields = {name: value for name, value in document.items() if name not in _DERIVED}
        fields["notes"] = tuple(Note(**{**note, "keys": tuple(note["keys"])}) for note in fields["notes"])
        fields["files"] = tuple(PlannedFile(**file) for file in fields["files"])
        return cls(**{**fields, "evidence": tuple(fields["evidence"])})
