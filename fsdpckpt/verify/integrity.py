"""Checks one checkpoint for damage, and lists everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest

import numpy as np

from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceError, SourceIncompleteError
from fsdpckpt.ir import invariants
from fsdpckpt.ir.checkpoint import (
    STRAY,
    Checkpoint,
    NamedTensor,
    OptimState,
    ParamKey,
    Problem,
    ProblemKind,
    Section,
    group_params,
)
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import MANIFEST, require_matches
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of, plural, size_text
from fsdpckpt.transform.selection import unmatched_error
from fsdpckpt.verify.blocks import DEFAULT_THREADS, BlockReader, for_each, in_file_order, threads_for
from fsdpckpt.verify.checksums import (
    TensorsInFiles,
    buffer_keys,
    check_records,
    chunk_ends,
    damaged_files,
    named_text,
    records_of,
)
from fsdpckpt.verify.elements import check_replicas, replica_bytes, replica_sets
from fsdpckpt.verify.measures import count_not_finite, digest

# Kinds of notes on flat slices without names: nothing says whether they are all of a parameter.
_UNPROVED = frozenset({"unnamed", "units-unreadable", "units-ambiguous"})


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """``sha256``: hexadecimal, as ``measures.digest``; None when the tensor cannot be read completely."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """``problems``: all of them. The other fields say what was checked; ``nbytes`` counts tensor data."""

    source: str
    problems: tuple[Problem, ...]
    digests: tuple[TensorDigest, ...]
    tensors: int
    nbytes: int
    records: int
    replicas: int
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        """``checkpoint-500 is whole: 88 tensors, 61.3 KiB, 393 checksums``."""
        verdict = "is whole" if self.whole else f"has {plural(len(self.problems), 'problem')}"
        checked = [plural(self.tensors, "tensor"), size_text(self.nbytes)]
        compared = (("checksum", self.records), ("replica", self.replicas))
        checked += [plural(count, word) for word, count in compared if count]
        return f"{self.source} {verdict}: {', '.join(checked)}"

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: ask .whole")


def unreadable(error: FsdpckptError) -> tuple[Problem, ...]:
    """The problems of a source that cannot be read as a checkpoint because of ``error``."""
    kind: ProblemKind = "incomplete" if isinstance(error, SourceIncompleteError) else "unreadable"
    if not error.details:
        return (Problem(kind, error.what, file=error.file, key=error.key),)
    findings = zip_longest(error.details, error.files)
    return tuple(Problem(kind, text, file=file or error.file) for text, file in findings)


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor, and the rows of its chunks that are replicas of each other."""

    named: NamedTensor
    replicas: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of reading one tensor."""

    problems: list[Problem]
    sha256: str | None = None


_Readers = tuple[BlockReader, BlockReader]


def verify_checkpoint(
    checkpoint: Checkpoint,
    *,
    sources: Sources,
    digests: bool = False,
    finite: Finite | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Verification:
    """Check coverage, files, checksums, replicas and the optimizer, reading data only where a check needs it.

    ``digests`` reads every tensor, ``finite`` those that it takes. Problems of the checkpoint are in the result, never
    raised.
    """
    stages = progress if progress is not None else NoProgress()
    named = list(checkpoint.tensors())
    problems = list(dict.fromkeys((*checkpoint.problems, *invariants.problems(checkpoint))))
    in_files = TensorsInFiles(checkpoint, named)
    truncated, unreadable = _truncated(checkpoint, named, in_files, sources)
    problems += truncated
    unreadable |= {number for number, one in enumerate(named) if flaws(one.tensor)}
    records = records_of(checkpoint, sources)
    problems += check_records(records, sources=sources, tensors=in_files, threads=threads, progress=stages)
    jobs = [_Job(one, replica_sets(one.tensor) if n not in unreadable else []) for n, one in enumerate(named)]
    buffers = buffer_keys(checkpoint) if finite is not None else frozenset()
    taken = frozenset(n for n, one in enumerate(named) if finite is not None and finite.takes(one, buffers))
    outcomes = _read(checkpoint, jobs, unreadable, sources, stages, threads, digests=digests, finite=taken)
    problems += [problem for outcome in outcomes if outcome is not None for problem in outcome.problems]
    if checkpoint.optim is not None:
        skipped = frozenset(named[number].key for number in unreadable)
        problems += _steps(checkpoint, sources, skipped)
    problems += _stray_problems(checkpoint)
    sums = tuple(_digest(*pair) for pair in zip(named, outcomes, strict=True)) if digests else ()
    problems += _changed_tensors(checkpoint, sums)
    return Verification(
        source=checkpoint.source,
        problems=tuple(dict.fromkeys(problems)),
        digests=sums,
        tensors=len(named),
        nbytes=sum(one.tensor.nbytes for one in named),
        records=len(records),
        replicas=sum(len(rows) - 1 for job in jobs for rows in job.replicas),
        notes=(*_notes(checkpoint, len(records)), *(_left_out(finite, buffers) if finite is not None else ())),
    )


@dataclass(frozen=True, slots=True)
class Finite:
    """Which tensors are searched for NaN and Inf: parameters and states. Globs match keys and parameter names.

    ``include``: only what matches, including buffers; ``exclude``: not what matches.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def require_matches(self, checkpoint: Checkpoint) -> None:
        """Raises UsageError for a glob that matches nothing: the intended tensors would not be searched."""
        named = list(checkpoint.tensors())
        for option, globs in (("--include", self.include), ("--exclude", self.exclude)):
            for glob in globs:
                if not any(self._matches(one, glob) for one in named):
                    raise unmatched_error(
                        f"{option} {glob!r} matches", glob, checkpoint.source, [one.key for one in named]
                    )

    def takes(self, named: NamedTensor, buffers: frozenset[str]) -> bool:
        if any(self._matches(named, glob) for glob in self.exclude):
            return False
        if self.include:
            return any(self._matches(named, glob) for glob in self.include)
        return named.section is not Section.MODEL or named.key not in buffers

    @staticmethod
    def _matches(named: NamedTensor, glob: str) -> bool:
        return fnmatchcase(named.key, glob) or fnmatchcase(named.param, glob)


def _left_out(finite: Finite, buffers: frozenset[str]) -> tuple[str, ...]:
    """What ``finite`` skipped because it seems to be a buffer."""
    if finite.include or not buffers:
        return ()
    names = sorted(buffers)
    count = plural(len(names), "model tensor") + (" seems to be a buffer" if len(names) == 1 else " seem to be buffers")
    return (f"{count}, not searched for NaN and Inf: {first_of(names, 3)}; --include GLOB searches what it matches",)


def _notes(checkpoint: Checkpoint, records: int) -> tuple[str, ...]:
    """What could not be checked, and why."""
    unproved = tuple(note.message for note in checkpoint.notes if note.kind in _UNPROVED)
    if records:
        return unproved
    why = "were saved without" if len(checkpoint.checksums.crc) else "carry no"
    return (*unproved, f"the files {why} checksums, so their bytes cannot be proved unchanged")


def _truncated(
    checkpoint: Checkpoint, named: Sequence[NamedTensor], in_files: TensorsInFiles, sources: Sources
) -> tuple[list[Problem], set[int]]:
    """Problems of files that are missing or too short, and the numbers of the tensors in them."""
    lengths = np.full(len(checkpoint.files), -1, np.int64)
    problems: list[Problem] = []
    for number, file in enumerate(checkpoint.files):
        try:
            lengths[number] = sources.open(file.path).nbytes
        except SourceError as error:
            hit = in_files.within(file.path, 0, file.nbytes)
            message = f"{named_text(hit)}: {error.what}" if hit else error.what
            key, section = (hit[0].key, hit[0].section) if hit else (None, None)
            problems.append(Problem("missing-file", message, file=file.path, key=key, section=section))
    unreadable: set[int] = set()
    for number, one in enumerate(named):
        chunks, ends = one.tensor.chunks, chunk_ends(one.tensor)
        filled = (chunks.size != 0).all(axis=1)
        known = (chunks.file >= 0) & (chunks.file < len(lengths)) & (chunks.offset >= 0)
        short = filled & known
        short[short] = ends[short] > lengths[chunks.file[short]]
        if (filled & ~known).any() or short.any():
            unreadable.add(number)
        for row in np.flatnonzero(short).tolist():
            file_number = int(chunks.file[row])
            if lengths[file_number] >= 0:
                path, length = checkpoint.files[file_number].path, int(lengths[file_number])
                problems.append(_short_files(one, path, int(ends[row]), length))
    return problems, unreadable


def _short_files(named: NamedTensor, path: str, end: int, length: int) -> Problem:
    message = f"{named.section} {named.key}: extends to byte {end} of {path}, which has {length}"
    return Problem("truncated", message, file=path, key=named.key, section=named.section)


def _read(
    checkpoint: Checkpoint,
    jobs: list[_Job],
    unreadable: set[int],
    sources: Sources,
    stages: Progress,
    threads: int,
    *,
    digests: bool,
    finite: frozenset[int],
) -> list[_Outcome | None]:
    """The result of reading each tensor; None if nothing had to be read or it cannot be read.

    ``finite``: the numbers of those to search for NaN and Inf.
    """
    chosen = [n for n, job in enumerate(jobs) if n not in unreadable and (digests or n in finite or job.replicas)]
    total = sum(
        jobs[n].named.tensor.nbytes * (int(digests) + int(n in finite))
        + replica_bytes(jobs[n].named.tensor, jobs[n].replicas)
        for n in chosen
    )

    def readers() -> _Readers:
        return BlockReader(checkpoint.files, sources), BlockReader(checkpoint.files, sources)

    def work(pair: _Readers, number: int) -> _Outcome:
        job = jobs[number]
        try:
            problems = check_replicas(pair, job.named, job.replicas, stages)
            if number in finite:
                problems += _not_finite(pair[0], job.named, stages)
            return _Outcome(problems, digest(pair[0], job.named.tensor, stages) if digests else None)
        except SourceError as error:
            problem = Problem(
                "unreadable", f"{job.named.section} {job.named.key}: {error.what}", key=job.named.key, file=error.file
            )
            return _Outcome([problem])

    stages.begin("tensors", total)
    order = in_file_order([jobs[n].named.tensor for n in chosen])
    results = for_each(chosen, work, make_reader=readers, threads=threads, order=order)
    stages.end()
    outcomes: list[_Outcome | None] = [None] * len(jobs)
    for number, result in zip(chosen, results, strict=True):
        outcomes[number] = result
    return outcomes


def _not_finite(reader: BlockReader, named: NamedTensor, stages: Progress) -> list[Problem]:
    nan, inf = count_not_finite(reader, named.tensor, stages)
    if not nan and not inf:
        return []
    message = f"{named.section} {named.key}: {nan} NaN and {inf} Inf of {named.tensor.numel} elements"
    return [Problem("not-finite", message, fatal=False, key=named.key, section=named.section)]


def _steps(checkpoint: Checkpoint, sources: Sources, unreadable: frozenset[str]) -> list[Problem]:
    if checkpoint.optim is None:
        return []
    try:
        return check_steps(BlockReader(checkpoint.files, sources), checkpoint.optim, unreadable)
    except SourceError as error:
        return [Problem("unreadable", f"optim steps: {error.what}", file=error.file)]


def _stray_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Files of another save in the directory: conversions ignore them, but the checkpoint is not in order."""
    return [Problem("stray", note.message, fatal=False) for note in checkpoint.notes if note.kind == STRAY]


def _changed_tensors(checkpoint: Checkpoint, sums: Sequence[TensorDigest]) -> list[Problem]:
    """Tensors whose digests are not those that ``fsdpckpt.json`` recorded."""
    digests = checkpoint.manifest.digests if checkpoint.manifest is not None else {}
    problems = []
    for one in sums:
        expected = digests.get(f"{one.section} {one.key}")
        if expected is not None and one.sha256 is not None and expected != one.sha256:
            message = f"{one.section} {one.key} has SHA-256 {one.sha256}, and {MANIFEST} recorded {expected}"
            problems.append(Problem("digest", message, key=one.key))
    return problems


def _digest(named: NamedTensor, outcome: _Outcome | None) -> TensorDigest:
    sha256 = outcome.sha256 if outcome is not None else None
    return TensorDigest(named.section, named.key, named.tensor.dtype.name, named.tensor.shape, sha256)


def verify(
    source: str,
    *,
    name: Callable[[Checkpoint, Sources], Checkpoint] | None = None,
    units: Units | None = None,
    ignore_file: tuple[str, ...] = (),
    digests: bool = False,
    finite: Finite | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check the checkpoint at ``source`` for damage: ``.problems`` lists everything wrong, ``.whole`` is True for none.

    ``digests`` adds a layout-independent SHA-256 of each tensor, ``finite`` reports NaN and Inf. ``name`` turns the
    slices of a flattened checkpoint into named tensors. ``units``: as in ``open_checkpoint``. ``ignore_file``: globs of
    files that are left out. Raises SourceError (exit code 3) when the source cannot be read as a checkpoint at all.
    """
    with Sources() as sources:
        try:
            checkpoint = open_checkpoint(source, sources=sources, units=units, ignore_file=ignore_file)
        except (SourceIncompleteError, SourceCorruptError) as error:
            _add_damage(error, source, sources)
            raise
        require_matches(ignore_file, checkpoint)
        if name is not None:
            checkpoint = name(checkpoint, sources)
        if finite is not None:
            finite.require_matches(checkpoint)
        count = threads if threads is not None else threads_for(checkpoint)
        return verify_checkpoint(
            checkpoint, sources=sources, digests=digests, finite=finite, threads=count, progress=progress
        )


def _add_damage(error: SourceError, source: str, sources: Sources) -> None:
    """Add to ``error``, the first problem of ``source``, what else is wrong with the files beside that one."""
    place = error.file or source
    entry = sources.stat(place)
    if entry is None or not entry.directory:
        place = os.path.dirname(place) or "."
    damages = damaged_files(place, sources)
    damaged = {os.path.normpath(one.file) for one in damages if one.file is not None}
    listed = list(zip_longest(error.details, error.files)) or [(error.what, error.file)]
    rest = [(text, file) for text, file in listed if os.path.normpath(file or "") not in damaged]
    others = damaged - {os.path.normpath(file or "") for file in (error.file, *(file for _, file in listed))}
    findings = dict.fromkeys((*rest, *((one.message, one.file) for one in damages)))
    if list(findings) != [(error.what, error.file)]:
        error.details, error.files = zip(*findings, strict=True)
    if others:
        count = plural(len(others), "other file")
        error.what += f"; {count} {'is' if len(others) == 1 else 'are'} damaged"


def check_steps(reader: BlockReader, optim: OptimState, unreadable: frozenset[str]) -> list[Problem]:
    """A problem for each param group whose parameters have different steps: the sign of two mixed saves.

    ``unreadable``: keys (``<param>.step``) to leave out, because they have a problem already.
    """
    groups = [group_params(group) for group in optim.param_groups] if optim.param_groups else [list(optim.state)]
    problems: list[Problem] = []
    for number, keys in enumerate(groups):
        steps: dict[float, list[ParamKey]] = {}
        for key in keys or ():
            states = optim.state.get(key)
            value = states.get("step") if states else None
            step = _number(reader, value) if f"{key}.step" not in unreadable else None
            if step is not None:
                steps.setdefault(step, []).append(key)
        if len(steps) > 1:
            problems.append(_disagreement(number, steps))
    return problems


def _number(reader: BlockReader, value: Tensor | Value) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel != 1 or value.dtype.numpy is None or value.dtype.kind == "complex":
        return None
    block = next(reader.blocks(value))
    return float(block.view(numpy_dtype(value.dtype)).astype(np.float64)[0])


def _disagreement(number: int, steps: dict[float, list[ParamKey]]) -> Problem:
    """The problem's key is that of a parameter in the minority."""
    by_size = sorted(steps.items(), key=lambda item: -len(item[1]))
    parts = []
    for step, keys in by_size:
        names = ", ".join(map(str, keys[:3])) + (", ..." if len(keys) > 3 else "")
        parts.append(f"{step:g} for {len(keys)} ({names})")
    message = f"optim param group {number}: the steps disagree: {'; '.join(parts)}"
    return Problem("step", message, fatal=False, key=f"{by_size[-1][1][0]}.step", section=Section.OPTIM)
