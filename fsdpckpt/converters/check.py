"""Checks the finished output: opens it again through the readers and compares it with what was to be written.

All ranks take part. 1. Rank 0 opens the output and matches its tensors with the source's; the other ranks serve it the
files that only they see. With ``--verify full``: 2. Every rank gets the pairs and compares a share of those whose files
it sees. 3. Rank 0 compares the rest, again served by the others.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.linking import require_recorded
from fsdpckpt.converters.output.places import OutputPlaces
from fsdpckpt.converters.read_back import Pair, not_as_planned, read_back
from fsdpckpt.converters.steps.draft import TransformedCheckpoint
from fsdpckpt.converters.union_sources import UnionSources, serve_sources
from fsdpckpt.errors import FsdpckptError, InternalError, SourceError, TargetUnwritableError
from fsdpckpt.execute.checks import sum_of
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored, pack_files, stored_by_number, unpack_files
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array, Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.plan.transfer import SeenBy
from fsdpckpt.process import gc_paused
from fsdpckpt.progress import Progress
from fsdpckpt.storage import is_url
from fsdpckpt.storage.places import is_within
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.upload import UPLOADED_LAST
from fsdpckpt.verify.elements import first_difference

Compared: TypeAlias = "dict[str, tuple[str, int | None]]"
"""By ``Pair.name``: the SHA-256 of a tensor, and the number of its first element that differs; None if it is equal."""


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """One rank's part of the check. ``transformed``: what was to be written, on rank 0; None on the others.

    ``files``: the source's files; ``seen_by``: which rank sees which of them. ``holders``: for each target file the
    ranks that see it. ``crcs``: the CRC-32 of each file as it was written. ``path``: where rank 0 finds the output, a
    directory or one file. ``require_unchanged`` raises SourceError if a source file changed after it was copied:
    differing bytes are then not the output's fault. ``open_output``: what rank 0 opens the output with. ``lost``: as in
    ``Target``.
    """

    group: Group
    transformed: TransformedCheckpoint | None
    options: ConvertOptions
    progress: Progress
    places: OutputPlaces
    files: Sequence[SourceFile]
    seen_by: SeenBy
    holders: Mapping[str, Sequence[int]]
    crcs: Mapping[str, int]
    path: str
    require_unchanged: Callable[[], None]
    open_output: Callable[[], Sources]
    lost: tuple[LostDict, ...] = ()

    def run(self) -> dict[str, str]:
        """Check that every tensor is in the output with its shape and dtype, and that its bytes are in the file.
        Collective.

        With ``--verify full`` read every element from both sides and compare, with casts applied; rank 0 gets the
        SHA-256 of each tensor by ``<section> <key>``, otherwise the result is empty. Raises InternalError, or
        TargetUnwritableError if the output is not what was written: one that fails is discarded, never published.
        """
        group = self.group
        pairs, written = self._read_back()
        if self.options.verify is not VerifyLevel.FULL:
            return {}
        named = [self._named(file) for file in written]
        divided = [pairs, []]
        if group.world_size > 1:
            message = [pack_pairs(pairs), pack_files(named)]
            packed, packed_files = cast(
                "tuple[object, list[list[object]]]", group.broadcast_object(message, name="what is to be compared")
            )
            named = unpack_files(packed_files)
            pairs = pairs if group.rank == 0 else unpack_pairs(packed)
            divided = divide_pairs(pairs, self.seen_by, self._visible_output(named), group.world_size)
        compared = self._compare(divided[group.rank], named) | self._compare_rest(divided[-1], written)
        with group.step("check that the sources did not change"), group.heartbeat():
            self.require_unchanged()
        with group.step("require equal tensors"):
            if group.rank:
                return {}
            with group.heartbeat(), self._blamed():
                return _digests(pairs, compared, self.path)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Decide whose fault it is that the output cannot be read, or is not as it was planned.

        If this rank sees a file that does not have the bytes that were written, it is the disk's, or another program's:
        TargetUnwritableError. If the source's bytes do not fit its checksums any more, SourceCorruptError.
        """
        try:
            yield
        except SourceError as error:
            if type(error) is SourceError and error.file is not None and self._is_output(error.file):
                raise _unreadable(error) from None
            raise
        except InternalError as error:
            if isinstance(error.__cause__, FsdpckptError) and type(error.__cause__) is SourceError:
                raise _unreadable(error.__cause__) from None
            self._require_as_written()
            if self.transformed is not None and self.options.verify is VerifyLevel.FULL:
                checkpoint = self.transformed.checkpoint
                with Sources() as sources:
                    require_recorded(checkpoint, np.ones(len(checkpoint.checksums.file), np.bool_), sources)
            raise

    def _is_output(self, path: str) -> bool:
        if is_url(self.path):
            return path == self.path or path.startswith(f"{self.path}/")
        return is_within(path, self.path)

    def _require_as_written(self) -> None:
        for name, crc in self.crcs.items():
            path = self.places.locate(self.group.rank, name)
            if not is_url(path) and not os.path.isfile(path):  # on another node
                continue
            if is_url(path) and name.endswith(UPLOADED_LAST):  # sent once the output has passed
                continue
            try:
                with Sources() as sources:
                    file = sources.open(path)
                    found = sum_of(file, 0, file.nbytes)
            except SourceError as error:
                raise _unreadable(error) from None
            if found != crc:
                raise TargetUnwritableError(
                    f"{path} is not what was written to it",
                    file=path,
                    expected=f"CRC-32 {crc:08x}",
                    found=f"{found:08x}",
                    why=f"the {_where(path)} returns other bytes than it was given, or another program writes there",
                    next_step=f"check that {_where(path)}, or choose another DST",
                    run_again=True,
                    resumable=False,
                )

    def _read_back(self) -> tuple[list[Pair], Sequence[SourceFile]]:
        with self.group.step("check the output"):
            if self.transformed is None:
                self._serve()
                return [], []
            with self.group.heartbeat(), self.open_output() as opener, gc_paused(), self._blamed():
                return read_back(self.transformed, self.path, self.options, opener, self.lost)

    def _serve(self) -> None:
        here = self.places.seen_from(self.group.rank)
        serve_sources(self.group, roots={self.places.places[0].path: here.path})

    def _named(self, file: SourceFile) -> SourceFile:
        """``file`` of the output under its name in that, "" if it is the output."""
        if not isinstance(file, Stored):
            return file
        return Stored("" if file.path == self.path else os.path.relpath(file.path, self.path), file.nbytes)

    def _here(self, file: SourceFile) -> SourceFile:
        """A file of the output, which has its name there, where this rank finds it."""
        if not isinstance(file, Stored):
            return file
        return Stored(self.places.locate(self.group.rank, file.path), file.nbytes)

    def _visible_output(self, named: Sequence[SourceFile]) -> SeenBy:
        seen_by = np.ones((len(named), self.group.world_size), bool)
        for number, file in stored_by_number(named).items():
            seen_by[number] = False
            seen_by[number, list(self.holders.get(file.path, ()))] = True
        return seen_by

    def _compare(self, pairs: Sequence[Pair], named: Sequence[SourceFile]) -> Compared:
        """Compare this rank's share; return the results of all ranks. ``named``: the files of the output."""
        written = list(map(self._here, named))
        with self.group.step("compare the output"), self.group.heartbeat(), Sources() as sources, self._blamed():
            share = self._read(pairs, sources, written)
        compared: Compared = {}
        for each in self.group.all_gather_objects(share, name="what was compared"):
            compared.update(cast("Compared", each))
        return compared

    def _compare_rest(self, pairs: Sequence[Pair], written: Sequence[SourceFile]) -> Compared:
        """On rank 0, compare the ``pairs`` of which no rank sees all files."""
        if not pairs:  # the same on all ranks
            return {}
        with self.group.step("compare the rest"):
            if self.group.rank:
                self._serve()
                return {}
            with self.group.heartbeat(), UnionSources(self.group) as sources, self._blamed():
                return self._read(pairs, sources, written)

    def _read(self, pairs: Sequence[Pair], sources: Sources, written: Sequence[SourceFile]) -> Compared:
        """Read each of ``pairs`` from both sides, with ``--max-memory`` bytes of buffers, and compare them."""
        self.progress.begin("verify", sum(pair.written.nbytes for pair in pairs))
        compared: Compared = {}
        for pair in pairs:
            total = hashlib.sha256()
            difference = first_difference(
                (pair.source, self.files, sources),
                (pair.written, written, sources),
                total,
                max_memory=self.options.max_memory,
            )
            compared[pair.name] = (total.hexdigest(), difference)
            self.progress.advance(pair.written.nbytes)
        self.progress.end()
        return compared


def _digests(pairs: Sequence[Pair], compared: Compared, path: str) -> dict[str, str]:
    """The SHA-256 of each of ``pairs``, in order. Raises InternalError for pairs that differ."""
    ordered = [(pair.name, *compared[pair.name]) for pair in pairs]
    wrong = [f"{name} differs from the source at element {number}" for name, _, number in ordered if number is not None]
    if wrong:
        raise not_as_planned(path, wrong)
    return {pair.name: compared[pair.name][0] for pair in pairs if pair.unique}


def _unreadable(error: SourceError) -> TargetUnwritableError:
    return TargetUnwritableError(
        f"the output cannot be read back: {error.what}",
        file=error.file,
        why=error.why,
        next_step=f"check that {_where(error.file or '')}, or choose another DST",
        run_again=True,
    )


def _where(path: str) -> str:
    return "store" if is_url(path) else "disk"


def divide_pairs(pairs: Sequence[Pair], source: SeenBy, written: SeenBy, workers: int) -> list[list[Pair]]:
    """Give each worker a share of the ``pairs`` whose files it sees, of about the same number of bytes; the last share
    is the rest.

    ``source``, ``written``: ``[file, worker]``, which worker sees which file.
    """
    divided: list[list[Pair]] = [[] for _ in range(workers + 1)]
    load = np.zeros(workers, np.int64)
    for pair in pairs:
        sees = source[pair.source.chunks.file].all(axis=0) & written[pair.written.chunks.file].all(axis=0)
        able_workers = np.flatnonzero(sees)
        worker = int(able_workers[np.argmin(load[able_workers])]) if len(able_workers) else workers
        divided[worker].append(pair)
        if len(able_workers):
            load[worker] += pair.written.nbytes
    return divided


def pack_pairs(pairs: Sequence[Pair]) -> list[object]:
    """Encode ``pairs`` as lists and two arrays; arrays of each tensor's own would take twice as long to send."""
    tensors = [tensor for pair in pairs for tensor in (pair.source, pair.written)]
    chunks = [tensor.chunks for tensor in tensors]
    columns = [np.stack([each.rank, each.file, each.offset]) for each in chunks]
    boxes = [np.stack([each.start, each.size, each.stride]).ravel() for each in chunks]
    return [
        [pair.name for pair in pairs],
        [[tensor.dtype.name, list(tensor.shape), len(tensor.chunks)] for tensor in tensors],
        np.concatenate([np.zeros((3, 0), np.int64), *columns], axis=1),
        np.concatenate([np.zeros(0, np.int64), *boxes]),
    ]


def unpack_pairs(value: object) -> list[Pair]:
    """The inverse of ``pack_pairs``: the tensors have only what is needed to read them."""
    names, forms, columns, boxes = cast(
        "tuple[list[str], list[tuple[str, list[int], int]], Int64Array, Int64Array]", value
    )
    tensors, chunk, number = [], 0, 0  # the next of columns and of boxes
    for dtype, shape, count in forms:
        rank, file, offset = columns[:, chunk : chunk + count]
        box = boxes[number : number + 3 * count * len(shape)].reshape(3, count, len(shape))
        tensors.append(Tensor(DTYPES[dtype], tuple(shape), Chunks(rank, file, offset, Boxes(*box))))
        chunk, number = chunk + count, number + box.size
    return [Pair(*each) for each in zip(names, tensors[::2], tensors[1::2], strict=True)]
