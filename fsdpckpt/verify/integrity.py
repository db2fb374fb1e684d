"""Checks one checkpoint for damage, and lists everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeGuard

import numpy as np

from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceError, SourceIncompleteError
from fsdpckpt.flags import Message
from fsdpckpt.ir import invariants
from fsdpckpt.ir.buffers import known_buffers, undecided_copies, with_named_buffers
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Problem, ProblemKind, Section, problem_of
from fsdpckpt.ir.copies import contradicting_copies, copies_of_plain_tensors
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.spans import chunk_ends
from fsdpckpt.ir.stored_once import bytes_stored_once
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, as_float
from fsdpckpt.notebook import table
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, plural, size_text, some_of, step_text
from fsdpckpt.verify.blocks import BlockReader, for_each, in_file_order, threads_for
from fsdpckpt.verify.checksums import TensorsInFiles, check_ranges, checksummed_ranges, damaged_files
from fsdpckpt.verify.elements import check_replicas, replica_bytes, replica_sets
from fsdpckpt.verify.job_progress import check_progress
from fsdpckpt.verify.masters import find_unrounded
from fsdpckpt.verify.measures import Finite, buffer_keys, count_not_finite, digest
from fsdpckpt.verify.repeated import is_endless, nbytes_to_read, stored_nbytes
from fsdpckpt.verify.resumption import Resumption


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """``sha256``: hexadecimal, as ``measures.digest``; None when the tensor cannot be read completely, or stands for
    far more bytes than are stored (``repeated.is_endless``).
    """

    section: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """What was checked, and all ``problems``. ``nbytes``: of tensor data; ``records``: ranges with a checksum;
    ``replicas``: copies compared with the first. ``resumption``: whether a framework resumes, if one was named.
    """

    source: str
    problems: tuple[Problem, ...]
    digests: tuple[TensorDigest, ...]
    tensors: int
    nbytes: int
    records: int
    replicas: int
    notes: tuple[str, ...] = ()
    resumption: Resumption | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(map(Message, self.notes)))

    @property
    def whole(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        """``checkpoint-500 is whole: 88 tensors, 61.3 KiB, 393 checksums``."""
        checked = [plural(self.tensors, "tensor"), size_text(self.nbytes)]
        compared = (("checksum", self.records), ("replica", self.replicas))
        checked += [plural(count, word) for word, count in compared if count]
        if self.whole:
            return Message(f"{self.source} is whole: {', '.join(checked)}")
        return Message(f"{self.source}: {plural(len(self.problems), 'problem')} (checked {', '.join(checked)})")

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, and every problem."""
        rows: list[tuple[str, str]] = [(problem.kind, problem.message) for problem in self.problems]
        if self.resumption is not None:
            rows += [("resume", reason) for reason in self.resumption.missing]
        return table(self.summary, ("kind", "problem"), rows, len(rows))

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: use .whole")


def unreadable(error: FsdpckptError) -> tuple[Problem, ...]:
    """The problems of a source that cannot be read as a checkpoint because of ``error``."""
    kind: ProblemKind = "incomplete" if isinstance(error, SourceIncompleteError) else "unreadable"
    if not error.details:
        return (Problem(kind, error.what, file=error.file, key=error.key),)
    findings = zip_longest(error.details, error.files)
    return tuple(Problem(kind, text, file=file or error.file) for text, file in findings)


def verify_checkpoint(
    checkpoint: Checkpoint,
    *,
    sources: Sources,
    digests: bool = False,
    finite: Finite | None = None,
    buffers: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> Verification:
    """Check coverage, files, checksums, replicas and the optimizer, reading data only where a check needs it.

    ``digests`` reads every tensor, ``finite`` those that it selects. ``buffers``: globs of model keys of which ranks
    may hold different copies. Problems of the checkpoint are in the result, never raised.
    """
    threads = threads if threads is not None else threads_for(checkpoint)
    tensors = list(checkpoint.tensors())
    in_files = TensorsInFiles(checkpoint, tensors)
    # What headers and metadata show.
    truncated, incomplete = _truncated(checkpoint, tensors, in_files, sources)
    incomplete |= {number for number, named in enumerate(tensors) if flaws(named.tensor)}
    all_read = checkpoint.with_problems(*invariants.problems(checkpoint))
    problems = [*with_named_buffers(all_read, buffers).problems, *truncated]
    # Bytes that carry checksums, whatever they hold.
    ranges = checksummed_ranges(checkpoint, sources)
    problems += check_ranges(ranges, sources=sources, in_files=in_files, threads=threads, progress=progress)
    # Values: replicas are compared, NaN and Inf are counted, digests are computed. Each tensor is read once.
    not_searched = buffer_keys(checkpoint) if finite is not None else frozenset()
    readable = [number for number in range(len(tensors)) if number not in incomplete]
    searched = [number for number in readable if finite is not None and finite.selects(tensors[number], not_searched)]
    values = _Values(
        checkpoint,
        tensors,
        replicas={number: replica_sets(tensors[number].tensor) for number in readable},
        searched=frozenset(searched),
        hashed=frozenset(number for number in readable if digests and not is_endless(tensors[number].tensor)),
    )
    results = values.read(sources, threads, progress)
    differing = _differing_buffers(checkpoint, results.values(), buffers)
    # The bytes have been compared: what checksums showed of the same tensors is not said twice.
    compared = {each.named.key for each in results.values() if each.different}
    of_copies = {*undecided_copies(checkpoint), *contradicting_copies(copies_of_plain_tensors(checkpoint))}
    problems = [each for each in problems if each not in of_copies or each.key not in compared]
    for each in results.values():
        problems += [*([] if each.named.key in differing else each.different), *each.others]
    # Steps and master weights: values that several tensors must agree on.
    skipped = {tensors[number].tensor for number in incomplete}
    problems += check_steps(checkpoint, skipped, sources=sources, threads=threads, progress=progress)
    for section in checkpoint.named:
        found = check_steps(alone(checkpoint, section), skipped, sources=sources, threads=threads, progress=progress)
        problems += map(section.problem, found)
    problems += find_unrounded(checkpoint, sources, threads=threads, progress=progress)
    problems += _stray_problems(checkpoint)
    of_job, notes_on_job = check_progress(checkpoint, sources)
    problems += of_job
    tensor_digests = []
    for number, named in enumerate(tensors if digests else ()):
        sha256 = results[number].sha256 if number in results else None
        dtype, shape = named.tensor.dtype.name, named.tensor.shape
        tensor_digests.append(TensorDigest(named.section, named.key, dtype, shape, sha256))
    problems += _changed_tensors(checkpoint, tensors, tensor_digests)
    return Verification(
        source=checkpoint.source,
        problems=tuple(dict.fromkeys(problems)),
        digests=tuple(tensor_digests),
        tensors=len(tensors),
        nbytes=bytes_stored_once([named.tensor for named in tensors]),
        records=len(ranges),
        replicas=sum(len(rows) - 1 for sets in values.replicas.values() for rows in sets),
        notes=(
            *_notes(checkpoint, len(ranges)),
            *notes_on_job,
            *_buffer_notes(differing),
            *(finite.note(not_searched) if finite is not None else ()),
            *_without_digest([tensors[number] for number in readable] if digests else []),
        ),
    )


class _ReadTensor(NamedTuple):
    """What reading one tensor found: copies that are ``different``, ``others`` of its problems, and its digest."""

    named: NamedTensor
    different: list[Problem]
    others: list[Problem]
    sha256: str | None


@dataclass(frozen=True, slots=True)
class _Values:
    """What is done with the values of ``tensors``, by their numbers."""

    checkpoint: Checkpoint
    tensors: Sequence[NamedTensor]
    replicas: Mapping[int, list[list[int]]]  # the copies to compare: sets of rows of chunks
    searched: frozenset[int]  # in which NaN and Inf are counted
    hashed: frozenset[int]  # of which digests are computed

    def read(self, sources: Sources, threads: int, progress: Progress) -> dict[int, _ReadTensor]:
        """Read every tensor with which something is done, and say what was found."""
        other_work = self.searched | self.hashed
        to_read = [number for number, sets in self.replicas.items() if sets or number in other_work]

        def make_readers() -> tuple[BlockReader, BlockReader]:
            files = self.checkpoint.files
            return BlockReader(files, sources), BlockReader(files, sources)

        def read(readers: tuple[BlockReader, BlockReader], number: int) -> _ReadTensor:
            return self._read_one(readers, number, progress)

        progress.begin("tensors", sum(map(self._nbytes, to_read)))
        order = in_file_order([self.tensors[number].tensor for number in to_read])
        found = for_each(to_read, read, make_reader=make_readers, threads=threads, order=order)
        progress.end()
        return dict(zip(to_read, found, strict=True))

    def _read_one(self, readers: tuple[BlockReader, BlockReader], number: int, progress: Progress) -> _ReadTensor:
        named = self.tensors[number]
        try:
            different = check_replicas(readers, named, self.replicas[number], progress)
            others = _not_finite(readers[0], named, progress) if number in self.searched else []
            sha256 = digest(readers[0], named.tensor, progress) if number in self.hashed else None
            return _ReadTensor(named, different, others, sha256)
        except SourceError as error:
            problem = problem_of("unreadable", [named], error.what, file=error.file)
            return _ReadTensor(named, [], [problem], None)

    def _nbytes(self, number: int) -> int:
        """How many bytes are read of one tensor, once for each thing that is done."""
        tensor = self.tensors[number].tensor
        nbytes = replica_bytes(tensor, self.replicas[number])
        nbytes += tensor.nbytes if number in self.hashed else 0
        nbytes += nbytes_to_read(tensor) if number in self.searched else 0
        return nbytes


def _differing_buffers(checkpoint: Checkpoint, read: Iterable[_ReadTensor], globs: Sequence[str]) -> list[str]:
    """The keys of known buffers that differ between ranks, as FSDP's buffers may. ``globs``: those of ``--buffers``."""
    different = [each.named for each in read if each.different and each.named.section is Section.MODEL]
    if not different:
        return []
    buffers = set(known_buffers(checkpoint, globs))
    for named in checkpoint.named:
        if named.section is Section.MODEL:
            buffers.update(f"{named.dotted}.{key}" for key in known_buffers(alone(checkpoint, named), globs))
    return list(dict.fromkeys(named.key for named in different if named.key in buffers))


def _buffer_notes(keys: Sequence[str]) -> list[str]:
    """``keys``: of the buffers that differ between ranks."""
    count = plural(len(keys), "buffer", "differ")
    return [f"{count} between ranks, and a conversion takes the lowest rank's copy: {some_of(keys, 5)}"] if keys else []


def _notes(checkpoint: Checkpoint, checksums: int) -> tuple[str, ...]:
    """What could not be checked, and why."""
    notes = tuple(note.message for note in checkpoint.notes if note.for_verify)
    if checksums:
        return notes
    why = "were saved without" if len(checkpoint.checksums.crc) else "carry no"
    return (*notes, f"the files {why} checksums, so changed bytes cannot be detected")


def _without_digest(tensors: Sequence[NamedTensor]) -> tuple[str, ...]:
    """A note on those of ``tensors`` of which no digest is computed because it would take too long."""
    endless = [named for named in tensors if is_endless(named.tensor)]
    if not endless:
        return ()
    first = endless[0]
    sizes = f"{size_text(first.tensor.nbytes)} from {size_text(stored_nbytes(first.tensor))}"
    names = some_of([f"{named.section} {named.key}" for named in endless], 3)
    return (f"no digest of {names}: it would be made of {sizes} that are stored",)


def _truncated(
    checkpoint: Checkpoint, tensors: Sequence[NamedTensor], in_files: TensorsInFiles, sources: Sources
) -> tuple[list[Problem], set[int]]:
    """Problems of files that are missing or too short, and the numbers of the tensors that are not all there."""
    lengths = np.full(len(checkpoint.files), -1, np.int64)
    problems: list[Problem] = []
    for number, file in enumerate(checkpoint.files):
        try:
            lengths[number] = sources.open_file(file).nbytes
        except SourceError as error:
            in_file = in_files.overlapping(f"{file}", 0, file.nbytes)
            problems.append(problem_of("missing-file", in_file, error.what, file=f"{file}"))
    incomplete: set[int] = set()
    for number, named in enumerate(tensors):
        chunks, ends = named.tensor.chunks, chunk_ends(named.tensor)
        filled = (chunks.size != 0).all(axis=1)
        located = (chunks.file >= 0) & (chunks.file < len(lengths)) & (chunks.offset >= 0)
        short = filled & located
        short[short] = ends[short] > lengths[chunks.file[short]]
        if (filled & ~located).any() or short.any():
            incomplete.add(number)
        for row in np.flatnonzero(short).tolist():
            path, length = checkpoint.files[chunks.file[row]].path, int(lengths[chunks.file[row]])
            if length >= 0:
                what = f"extends to byte {int(ends[row])} of {path}, which has {length}"
                problems.append(problem_of("truncated", [named], what, file=path))
    return problems, incomplete


def _not_finite(reader: BlockReader, named: NamedTensor, progress: Progress) -> list[Problem]:
    nan, inf = count_not_finite(reader, named.tensor, progress)
    if not nan and not inf:
        return []
    what = f"{nan} NaN and {inf} Inf of {named.tensor.numel} elements"
    return [problem_of("not-finite", [named], what, fatal=False)]


def _stray_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Files of a different save in the directory: conversions ignore them, but the directory is not in order."""
    return [Problem("stray", note.message, fatal=False) for note in checkpoint.notes if note.damage]


def _changed_tensors(
    checkpoint: Checkpoint, tensors: Sequence[NamedTensor], digests: Sequence[TensorDigest]
) -> list[Problem]:
    """Tensors whose digests are not those that ``fsdpckpt.json`` recorded."""
    recorded = checkpoint.origin.manifest.digests if checkpoint.origin.manifest is not None else {}
    problems = []
    for named, computed in zip(tensors if digests else (), digests, strict=True):
        expected = recorded.get(f"{named.section} {named.key}")
        if expected is not None and computed.sha256 is not None and expected != computed.sha256:
            what = f"has SHA-256 {computed.sha256}; {MANIFEST} recorded {expected}"
            problems.append(problem_of("digest", [named], what))
    return problems


@contextmanager
def listing_all_damage(source: str, sources: Sources) -> Iterator[None]:
    """While ``source`` is opened: an error that stops this also lists all other damage in the directory or file."""
    try:
        yield
    except (SourceIncompleteError, SourceCorruptError) as error:
        top = sources.stat(source)
        if top is not None:
            _add_damage(error, source, sources, single=not top.directory)
        raise


def _add_damage(error: SourceError, source: str, sources: Sources, *, single: bool) -> None:
    """Add to ``error``, the first problem of ``source``, all other damage in the directory.

    ``single``: ``source`` is a file. The files beside it do not belong to it.
    """
    place = source if single else error.file or source
    entry = sources.stat(place)
    if not single and (entry is None or not entry.directory):
        place = os.path.dirname(place) or "."
    problems = damaged_files(place, sources)
    damaged = {os.path.normpath(problem.file) for problem in problems if problem.file is not None}
    findings = list(zip_longest(error.details, error.files)) or [(error.what, error.file)]
    in_no_damaged_file = [(text, file) for text, file in findings if os.path.normpath(file or "") not in damaged]
    named_files = [error.file, *(file for _, file in findings)]
    others = damaged - {os.path.normpath(file or "") for file in named_files}
    of_problems = [(problem.message, problem.file) for problem in problems]
    all_findings = dict.fromkeys((*in_no_damaged_file, *of_problems))
    if list(all_findings) != [(error.what, error.file)]:
        error.details, error.files = zip(*all_findings, strict=True)
    if others:
        count = plural(len(others), "other file")
        error.what = f"{error.what}; {count} {is_or_are(len(others))} damaged"


def check_steps(
    checkpoint: Checkpoint,
    unreadable: Collection[Tensor],
    *,
    sources: Sources,
    threads: int,
    progress: Progress = NO_PROGRESS,
) -> list[Problem]:
    """A problem for each param group whose parameters have different steps, which shows that two saves were mixed.

    ``unreadable``: steps to leave out, because they have a problem already.
    """
    optim = checkpoint.optim
    if optim is None:
        return []
    groups = optim.in_groups() if optim.groups else [list(optim.state)]
    values: list[tuple[int, ParamKey, Tensor | Value]] = []
    for number, keys in enumerate(groups):
        for key in keys:
            states = optim.state.get(key)
            step = states.get(STEP) if states else None
            if step is not None and not (isinstance(step, Tensor) and step in unreadable):
                values.append((number, key, step))

    def make_reader() -> BlockReader:
        return BlockReader(checkpoint.files, sources)

    def read(reader: BlockReader, value: tuple[int, ParamKey, Tensor | Value]) -> float | None:
        return _number(reader, value[2], progress)

    progress.begin("steps", sum(value.nbytes for _, _, value in values if _is_number(value)))
    order = in_file_order([value for _, _, value in values])
    try:
        numbers = for_each(values, read, make_reader=make_reader, threads=threads, order=order)
    except SourceError as error:
        return [Problem("unreadable", f"optim steps: {error.what}", file=error.file)]
    finally:
        progress.end()
    steps: list[dict[float, list[ParamKey]]] = [{} for _ in groups]
    for (group, key, _), step in zip(values, numbers, strict=True):
        if step is not None:
            steps[group].setdefault(step, []).append(key)
    return [_disagreement(number, keys_by_step) for number, keys_by_step in enumerate(steps) if len(keys_by_step) > 1]


def _is_number(value: Tensor | Value) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.numel == 1
        and value.dtype.numpy is not None
        and value.dtype.kind != "complex"
    )


def _number(reader: BlockReader, value: Tensor | Value, progress: Progress) -> float | None:
    if isinstance(value, (int, float)):
        return as_float(value)
    if not _is_number(value):
        return None
    block = next(reader.blocks(value))
    progress.advance(len(block))
    return float(block.view(numpy_dtype(value.dtype)).astype(np.float64)[0])


def _disagreement(group: int, keys_by_step: dict[float, list[ParamKey]]) -> Problem:
    """The problem of a group with several steps. Its key is that of a parameter in the minority."""
    by_count = sorted(keys_by_step.items(), key=lambda item: -len(item[1]))
    parts = [f"{step_text(step)} for {len(keys)} ({some_of(keys, 3)})" for step, keys in by_count]
    message = f"optim param group {group}: the steps disagree: {'; '.join(parts)}: two saves are mixed, or those with "
    message += "fewer steps had no gradient in some (an expert without tokens, a layer that was frozen)"
    return Problem("step", message, fatal=False, key=f"{by_count[-1][1][0]}.step", section=Section.OPTIM)
