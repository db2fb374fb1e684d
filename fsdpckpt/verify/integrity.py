"""Proves one checkpoint whole, or lists everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import STRAY, Checkpoint, NamedTensor, OptimState, ParamKey, Problem, Section, group_params
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.checksums import bytes_to_read, check_records, damaged_files, records, stated_records
from fsdpckpt.verify.elements import check_replicas, replica_bytes, replica_sets
from fsdpckpt.verify.measures import count_not_finite, digest
from fsdpckpt.verify.parallel import DEFAULT_THREADS, for_each, in_file_order, threads_for

__all__ = ["TensorDigest", "Verification", "check_steps", "verify", "verify_checkpoint"]

# Notes on slices that were only looked at as slices: nothing says whether they are all of a parameter.
_UNPROVED = frozenset({"unnamed", "units-unreadable", "units-ambiguous"})


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """``sha256``: hexadecimal, of the tensor's row-major bytes; None where the tensor cannot be read whole."""

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Verification:
    """``problems``: all of them. The counts say what was looked at: bytes are those of tensor data."""

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


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor and what has to be read of it."""

    named: NamedTensor
    replicas: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Found:
    problems: list[Problem]
    sha256: str | None = None


_Readers = tuple[BlockReader, BlockReader]


def verify_checkpoint(
    checkpoint: Checkpoint,
    *,
    sources: Sources,
    digests: bool = False,
    finite: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Verification:
    """Check coverage, files, checksums, replicas and the optimizer; read data only where that needs it.

    ``digests`` and ``finite`` read every tensor. What is wrong with the checkpoint is in the result, never raised.
    """
    stages = progress if progress is not None else NoProgress()
    named = list(checkpoint.tensors())
    found = list(dict.fromkeys((*checkpoint.problems, *problems(checkpoint))))
    short, unreadable = _truncated(checkpoint, named, sources)
    found += short
    unreadable |= {number for number, one in enumerate(named) if flaws(one.tensor)}
    wanted = records(checkpoint)
    if checkpoint.manifest is not None:
        wanted += stated_records(checkpoint.manifest, sources)
    stages.begin("checksums", bytes_to_read(wanted))
    found += check_records(wanted, sources=sources, threads=threads, advance=stages.advance)
    stages.end()
    jobs = [_Job(one, replica_sets(one.tensor) if n not in unreadable else []) for n, one in enumerate(named)]
    outcome = _read(checkpoint, jobs, unreadable, sources, stages, threads, digests=digests, finite=finite)
    found += [problem for one in outcome if one is not None for problem in one.problems]
    if checkpoint.optim is not None:
        skipped = frozenset(named[number].key for number in unreadable)
        found += _steps(checkpoint, sources, skipped)
    found += _strays(checkpoint)
    summed = tuple(_digest(one, result) for one, result in zip(named, outcome, strict=True)) if digests else ()
    found += _changed(checkpoint, summed)
    return Verification(
        source=checkpoint.source,
        problems=tuple(dict.fromkeys(found)),
        digests=summed,
        tensors=len(named),
        nbytes=sum(one.tensor.nbytes for one in named),
        records=len(wanted),
        replicas=sum(len(rows) - 1 for job in jobs for rows in job.replicas),
        notes=_notes(checkpoint, len(wanted)),
    )


def _notes(checkpoint: Checkpoint, wanted: int) -> tuple[str, ...]:
    """What could not be proved, and why."""
    unproved = tuple(note.message for note in checkpoint.notes if note.kind in _UNPROVED)
    if wanted:
        return unproved
    why = "were saved without" if len(checkpoint.checksums.crc) else "carry no"
    return (*unproved, f"the files {why} checksums, so their bytes cannot be proved unchanged")


def _truncated(
    checkpoint: Checkpoint, named: Sequence[NamedTensor], sources: Sources
) -> tuple[list[Problem], set[int]]:
    """Problems of files that are absent or too short, and the numbers of the tensors that lie in them."""
    lengths: list[int] = []
    found: list[Problem] = []
    for file in checkpoint.files:
        try:
            lengths.append(sources.open(file.path).nbytes)
        except SourceError as error:
            lengths.append(-1)
            found.append(Problem("missing-file", error.what, file=file.path))
    unreadable: set[int] = set()
    for number, one in enumerate(named):
        chunks, itemsize = one.tensor.chunks, one.tensor.dtype.itemsize
        ends = chunks.offset + (((chunks.size - 1).clip(0) * chunks.stride).sum(axis=1) + 1) * itemsize
        filled: list[bool] = (chunks.size != 0).all(axis=1).tolist()
        for row, (end, file_number) in enumerate(zip(ends.tolist(), chunks.file.tolist(), strict=True)):
            if not filled[row]:
                continue
            if not 0 <= file_number < len(lengths) or chunks.offset[row] < 0:
                unreadable.add(number)
            elif end > lengths[file_number]:
                unreadable.add(number)
                if lengths[file_number] >= 0:
                    found.append(_short(one, checkpoint.files[file_number].path, end, lengths[file_number]))
    return found, unreadable


def _short(named: NamedTensor, path: str, end: int, length: int) -> Problem:
    message = f"{named.section} {named.key}: lies up to byte {end} of {path}, which has {length}"
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
    finite: bool,
) -> list[_Found | None]:
    """What reading each tensor shows; None where nothing had to be read or nothing can be."""
    passes = int(digests) + int(finite)
    chosen = [n for n, job in enumerate(jobs) if n not in unreadable and (passes or job.replicas)]
    total = sum(
        jobs[n].named.tensor.nbytes * passes + replica_bytes(jobs[n].named.tensor, jobs[n].replicas) for n in chosen
    )

    def readers() -> _Readers:
        return BlockReader(checkpoint.files, sources), BlockReader(checkpoint.files, sources)

    def work(own: _Readers, job: _Job) -> _Found:
        try:
            wrong = check_replicas(own, job.named, job.replicas, stages.advance)
            if finite:
                wrong += _not_finite(own[0], job.named, stages)
            return _Found(wrong, digest(own[0], job.named.tensor, stages.advance) if digests else None)
        except SourceError as error:
            problem = Problem(
                "unreadable", f"{job.named.section} {job.named.key}: {error.what}", key=job.named.key, file=error.file
            )
            return _Found([problem])

    stages.begin("tensors", total)
    order = in_file_order([jobs[n].named.tensor for n in chosen])
    results = for_each([jobs[n] for n in chosen], work, reader=readers, threads=threads, order=order)
    stages.end()
    outcome: list[_Found | None] = [None] * len(jobs)
    for number, result in zip(chosen, results, strict=True):
        outcome[number] = result
    return outcome


def _not_finite(reader: BlockReader, named: NamedTensor, stages: Progress) -> list[Problem]:
    nan, inf = count_not_finite(reader, named.tensor, stages.advance)
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


def _strays(checkpoint: Checkpoint) -> list[Problem]:
    """Files of another save: no loss to a conversion, which leaves them alone, but nobody's whole checkpoint."""
    return [Problem("stray", note.message, fatal=False) for note in checkpoint.notes if note.kind == STRAY]


def _changed(checkpoint: Checkpoint, summed: Sequence[TensorDigest]) -> list[Problem]:
    """Tensors that are not those whose digests ``fsdpckpt.json`` recorded."""
    recorded = checkpoint.manifest.digests if checkpoint.manifest is not None else {}
    found = []
    for one in summed:
        stated = recorded.get(f"{one.section} {one.key}")
        if stated is not None and one.sha256 is not None and stated != one.sha256:
            message = f"{one.section} {one.key} has SHA-256 {one.sha256}, and {MANIFEST} recorded {stated}"
            found.append(Problem("digest", message, key=one.key))
    return found


def _digest(named: NamedTensor, found: _Found | None) -> TensorDigest:
    sha256 = found.sha256 if found is not None else None
    return TensorDigest(named.section, named.key, named.tensor.dtype.name, named.tensor.shape, sha256)


def verify(
    source: str,
    *,
    name: Callable[[Checkpoint, Sources], Checkpoint] | None = None,
    digests: bool = False,
    finite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Prove the checkpoint at ``source`` whole: ``.problems`` lists all that is wrong, ``.whole`` says if nothing is.

    ``digests`` adds a layout-independent SHA-256 per tensor, ``finite`` reports NaN and Inf. Raises SourceError (exit
    code 3) when the source cannot be read as a checkpoint at all. ``name`` turns the slices of a flattened checkpoint
    into named tensors.
    """
    with Sources() as sources:
        try:
            checkpoint = open_checkpoint(source, sources=sources, locate=True)
        except SourceError as error:  # that is one thing which is wrong: say all that can be known
            error.details = tuple(dict.fromkeys((*error.details, *damaged_files(source, sources))))
            raise
        if name is not None:
            checkpoint = name(checkpoint, sources)
        count = threads if threads is not None else threads_for(checkpoint)
        return verify_checkpoint(
            checkpoint, sources=sources, digests=digests, finite=finite, threads=count, progress=progress
        )


def check_steps(reader: BlockReader, optim: OptimState, unreadable: frozenset[str]) -> list[Problem]:
    """A problem for each param group whose parameters have different steps.

    ``unreadable``: keys (``<param>.step``) to leave out, because they have a problem of their own.
    """
    groups = [group_params(group) for group in optim.param_groups] if optim.param_groups else [list(optim.state)]
    found: list[Problem] = []
    for number, keys in enumerate(groups):
        steps: dict[float, list[ParamKey]] = {}
        for key in keys or ():
            states = optim.state.get(key)
            value = states.get("step") if states else None
            step = _number(reader, value) if f"{key}.step" not in unreadable else None
            if step is not None:
                steps.setdefault(step, []).append(key)
        if len(steps) > 1:
            found.append(_disagreement(number, steps))
    return found


def _number(reader: BlockReader, value: Tensor | Value) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel != 1 or value.dtype.numpy is None or value.dtype.kind == "complex":
        return None
    block = next(reader.blocks(value))
    return float(block.view(numpy_dtype(value.dtype)).astype(np.float64)[0])


def _disagreement(number: int, steps: dict[float, list[ParamKey]]) -> Problem:
    """Named after the parameters in the minority."""
    by_size = sorted(steps.items(), key=lambda item: -len(item[1]))
    told = []
    for step, keys in by_size:
        names = ", ".join(map(str, keys[:3])) + (", ..." if len(keys) > 3 else "")
        told.append(f"{step:g} for {len(keys)} ({names})")
    message = f"optim param group {number}: the steps disagree: {'; '.join(told)}"
    return Problem("step", message, fatal=False, key=f"{by_size[-1][1][0]}.step", section=Section.OPTIM)
