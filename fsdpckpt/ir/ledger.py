"""The ledger of a checkpoint: what was recognised, repaired, assumed and found wrong, in the order in which it was.

It is written for people, and only added to. What code needs to know is a field of the checkpoint, or of its ``Origin``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from fsdpckpt.flags import Message
from fsdpckpt.ir.account import Account
from fsdpckpt.ir.terms import Section

NoteKind: TypeAlias = (
    Literal["found-below", "model-found", "optimizer-found", "part-of", "several-models", "several-optimizers", "stray"]
    | Literal["chunks-corrected", "empty-entries", "ids-repaired", "inferred", "orders", "replicas", "repeated", "tied"]
    | Literal["buffer-type", "master-weights", "normalised", "unread", "unshared", "unused", "zero-3"]
    | Literal["missing-state", "odd-states", "undetermined", "unlisted", "unmatched", "unnamed", "unproved-order"]
    | Literal["units", "units-ambiguous", "units-unreadable", "flattened-names", "unflattened"]
    | Literal["cast", "config-dtype", "dropped", "encoded", "filled", "ignored", "mapped", "rekeyed", "renamed"]
    | Literal["groups-flattened", "groups-rebuilt", "plain", "resumption", "unconfigured", "whole"]
    | Literal["carried", "cleared", "copies", "linked", "manifest", "not-carried", "resumed", "staged", "unchecked"]
    | Literal["left-behind", "not-synced", "unlocked"]
)
"""What a note is about, in ``fsdpckpt.json`` and ``--json``: what was found, how it was read, and what was written."""

ProblemKind: TypeAlias = (
    Literal["checksum", "digest", "length", "missing-file", "missing-rank", "not-finite", "truncated", "unreadable"]
    | Literal["aliased-states", "incomplete", "local-shape", "outside", "overlap", "quantized", "replica", "step"]
    | Literal["flattened", "flattened-lost", "names", "parameter-order", "rank-mismatch", "state", "units"]
    | Literal["config", "copies", "manifest", "master", "missing-key", "missing-section", "shape", "stray"]
)
"""What is wrong, in ``--json``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint. ``fatal``: converting it would lose or invent data. ``loads``: whether PyTorch
    loads it as it is.

    ``section``: None if the whole checkpoint is concerned. A conversion that leaves a section out ignores its problems.
    """

    kind: ProblemKind
    message: str
    fatal: bool = True
    file: str | None = None
    key: str | None = None
    rank: int | None = None
    section: Section | None = None
    loads: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Message(self.message))

    def to_json(self) -> dict[str, object]:
        """What users may rely on."""
        return {name: value for name, value in asdict(self).items() if name != "loads"}


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was inferred, cast, dropped, renamed, repaired or not carried over: every summary shows it.

    ``key``: the one key concerned; ``keys``: all of them if there are many. ``warning``: whether a framework will stop
    because of it, start afresh, or train in another way than before, or something has to be done by hand; then it is
    shown as a warning. ``damage``: whether ``verify`` counts it as a problem; ``for_verify``: whether it repeats it, as
    nothing proves what it says, or it is on an option of that command.
    """

    kind: NoteKind
    message: str
    key: str | None = None
    keys: tuple[str, ...] = ()
    warning: bool = False
    damage: bool = False
    for_verify: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Message(self.message))


class EvidenceKind(StrEnum):
    """What a piece of evidence is about."""

    CONTAINER = "container"
    SECTIONS = "sections"
    LAYOUT = "layout"
    ORDER = "order"
    METADATA = "metadata"
    FLAVOR = "flavor"
    MANIFEST = "manifest"
    UNITS = "units"
    READER = "reader"  # of another package


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason why a checkpoint was read the way it was: ``kind`` is for code, ``message`` for people."""

    kind: EvidenceKind
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Message(self.message))

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Ledger:
    """``evidence``: what was recognised and why. ``account``: what became of every file below the source and of every
    entry in those that were read.
    """

    evidence: tuple[Evidence, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    account: Account = field(default_factory=Account)

    def with_evidence(self, *evidence: Evidence) -> Ledger:
        return Ledger((*self.evidence, *evidence), self.problems, self.notes, self.account)

    def with_problems(self, *problems: Problem) -> Ledger:
        return Ledger(self.evidence, (*self.problems, *problems), self.notes, self.account)

    def with_notes(self, *notes: Note) -> Ledger:
        return Ledger(self.evidence, self.problems, (*self.notes, *notes), self.account)
