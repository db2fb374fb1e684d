"""What every way to write and publish an output does, and what one run asks of it.

A conversion calls these methods in this order, on all ranks. ``Rename`` writes beside DST and renames; ``Spooled``
writes to a local disk in the same way and uploads the result; ``Streamed`` sends parts of the target files to a store
as they are assembled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

from fsdpckpt.comm.liveness import ProcessIdentity
from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.linking import Linking
from fsdpckpt.converters.output.places import OutputPlaces
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.report import PlannedFile, Report
from fsdpckpt.execute.job import Budget, Job
from fsdpckpt.execute.journal import JournaledWindows, Recording, RunIdentity
from fsdpckpt.execute.output import Output
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.targets import Target
from fsdpckpt.options import ConvertOptions, OutputScope
from fsdpckpt.plan import Plan
from fsdpckpt.progress import Progress
from fsdpckpt.storage.sources import Sources

Holders: TypeAlias = "Mapping[str, Sequence[int]]"
"""By target file the ranks that see it where it was written."""


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's view of what is to be written where. ``peers``: the processes of all ranks."""

    group: Group
    source: str
    target: str
    options: ConvertOptions
    progress: Progress
    scope: OutputScope
    peers: Sequence[ProcessIdentity]


@dataclass(frozen=True, slots=True)
class InterruptedWork:
    """What an interrupted run has written, by number of the place, and how the sources of one that cannot be resumed
    have changed.

    ``complete``: the target files of which nothing is to be written again, each with its CRC-32. ``parts``: what was
    read for them, as in ``JournaledWindows``. ``received``: those of them in which there are bytes that other workers
    read, and may not have journaled.
    """

    windows: Mapping[int, JournaledWindows]
    changed_sources: Sequence[str]
    complete: Mapping[str, int] = field(default_factory=dict)
    parts: JournaledWindows = field(default_factory=JournaledWindows)
    received: frozenset[str] = frozenset()


class StagingNeededError(Exception):
    """This output has to be staged on a local disk: nothing was written, and ``Spooled`` can write it."""


class Publisher(Protocol):
    """Owns the locks, the staging and the leftovers of one run. As a context manager, holds the locks.

    ``target``: where the conversion writes, which is a local path. ``options``: those that apply there. ``warnings``:
    what DST does not need and could not be done. ``recorder``: this rank's journal, if it writes.
    """

    target: str
    options: ConvertOptions
    warnings: list[Note]
    recorder: Recording | None

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def restore(self) -> None:
        """On rank 0: bring back what an interrupted run had moved aside, before anything is decided."""

    def look(self) -> None:
        """Look at DST, on rank 0. Raises UsageError and TargetError for one that may not be written; writes nothing."""

    def look_again(self, opened: Sequence[str]) -> None:
        """On rank 0: the same for what only the plan shows. ``opened``: every file that was read."""

    def find_work(self, prepared: Prepared, budget: Budget, sources: Sources) -> Note | None:
        """For a dry run: the note on what a run would do with what an interrupted one left."""

    def open(self, *, directory: bool) -> OutputPlaces:
        """Lock DST's name, and make or open the places to write to. ``directory``: whether DST is one. Collective."""

    def interrupted(self, identity: Callable[[], RunIdentity]) -> InterruptedWork:
        """On rank 0, after ``gather_journals``: the windows that are written already. ``identity``: this run's."""

    def gather_journals(self) -> None:
        """Collect what all ranks found in their places. Collective."""

    def resume_note(self, job: Job, changed_sources: Sequence[str]) -> Note | None:
        """The note on what an interrupted run left, on rank 0."""

    def budget_for(self, budget: Budget, plan: Plan | None) -> Budget:
        """What is left of ``budget`` for copying ``plan``, which only rank 0 knows. Collective. Raises UsageError if it
        is not enough.
        """

    @property
    def copy_memory(self) -> int:
        """How many bytes each rank has for windows, and for what it exchanges with others."""

    def make_output(self) -> Callable[..., Output]:
        """What makes the target files of this rank, with the arguments of ``Output``."""

    def output_sources(self) -> Sources:
        """What the check opens the output with, on rank 0."""

    def prepare(
        self, job: Job, identity: Callable[[], RunIdentity], journaled: JournaledWindows, *, links: int
    ) -> None:
        """Remove what is not resumed, check the free space, and open this rank's journal. Collective."""

    def link(self, output: Target, linking: Linking, files: Sequence[SourceFile], sources: Sources) -> None:
        """On rank 0: make the links of ``output``, or require those that a complete DST has."""

    def require_files(self, paths: Iterable[str]) -> None:
        """Raises TargetUnwritableError if a target file that was written no longer exists."""

    def put_manifest(self, data: bytes) -> None: ...

    def manifest(self) -> bytes | None:
        """``fsdpckpt.json`` of a DST that exists and is compared; None if this run writes one."""

    @property
    def final_path(self) -> str:
        """What becomes DST, where the check finds it: a directory or one file."""

    def commit(self, job: Job, *, linked: bool) -> None:
        """Make the output visible under ``target``, or drop a place without files; release the locks. Collective."""

    def finish(self, report: Report, holders: Holders) -> Report:
        """What remains once the local output is complete. Collective. Returns the report of the whole run."""

    def discard_useless(self, error: BaseException, *, several_journals: bool) -> None:
        """Remove what was written, after ``error``, unless the same command may finish it."""

    def close(self) -> None:
        """Release the locks."""

    def differs(self) -> BaseException | None:
        """What a single process raises for a target file that is not what would be written; None for its own words."""

    @property
    def replaced(self) -> tuple[PlannedFile, ...]:
        """What is deleted at ``target`` when the output is published."""
