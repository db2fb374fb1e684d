"""Compares an optimizer's own weights with the copies in another dtype that the model computed with.

Mixed precision rounds each master weight to the model's copy after every step, so the two say the same twice. The model
section of a checkpoint has the masters; ``Checkpoint.copies`` has the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Problem, Section, SourceFile
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import cast, numpy_dtype
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Bytes, ChunkReader, for_each, slabs, threads_for

_WHOLE = 1 << 16  # elements: up to so many are compared completely before a conversion
_SAMPLE = 1 << 14  # elements of larger tensors, at the beginning, in the middle and at the end

_Boxes = Callable[[tuple[int, ...]], Iterator[Box]]


def find_unrounded(
    checkpoint: Checkpoint,
    sources: Sources,
    *,
    samples: bool = False,
    threads: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> list[Problem]:
    """A problem for each master weight that has another shape than its copy, or does not round to it.

    ``samples``: reads only some elements of large tensors, which two parameters never have in common. A tensor that is
    not whole is left to other checks.
    """
    params = checkpoint.params
    boxes: _Boxes = _sampled if samples else _all
    found: list[Problem] = []
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for name, copy in checkpoint.copies.items():
        master = params.get(name)
        if not isinstance(master, Tensor):
            continue
        if master.shape != copy.shape:
            shapes = f"{list(master.shape)}, and the model's copy {list(copy.shape)}"
            found.append(_problem(name, f"the optimizer's weight is {shapes}"))
        elif _can_be_read(master) and _can_be_read(copy) and master.numel:
            pairs.append((name, master, copy))

    if not pairs:
        return found

    def work(readers: tuple[BlockReader, BlockReader], pair: tuple[str, Tensor, Tensor]) -> Problem | None:
        name, master, copy = pair
        try:
            return _compare(readers, name, master, copy, boxes, progress)
        except SourceError:  # of a file that is too short: other checks say so
            return None

    def make_readers() -> tuple[BlockReader, BlockReader]:
        files: Sequence[SourceFile] = checkpoint.files
        return BlockReader(files, sources), BlockReader(files, sources)

    progress.begin("masters", 0 if samples else sum(copy.numel for _, _, copy in pairs))
    results = for_each(
        pairs, work, make_reader=make_readers, threads=threads if threads is not None else threads_for(checkpoint)
    )
    progress.end()
    return [*found, *(problem for problem in results if problem is not None)]


def require_rounded(checkpoint: Checkpoint, sources: Sources) -> None:
    """Raises SourceCorruptError if samples show master weights that do not round to the model's copies."""
    problems = find_unrounded(checkpoint, sources, samples=True)
    if not problems:
        return
    raise SourceCorruptError(
        f"the model and the optimizer of {checkpoint.source} contradict each other",
        details=[problem.message for problem in problems],
        most_shown=5,
        key=problems[0].key,
        why="the optimizer's weights are rounded to the model's after every step: files of different steps are mixed, "
        "or the weights of one of them were changed alone",
        next_step=f"give the files of one save; {flags.command('verify', checkpoint.source)} lists every weight that "
        f"differs, and {flags.only('optim')} takes the optimizer's states without weights",
    )


def _can_be_read(tensor: Tensor) -> bool:
    located = bool((tensor.chunks.offset >= 0).all()) and tensor.dtype.numpy is not None
    return located and not flaws(tensor)


def _problem(name: str, what: str) -> Problem:
    return Problem("master", f"model {name}: {what}", key=name, section=Section.MODEL)


def _compare(
    readers: tuple[BlockReader, BlockReader],
    name: str,
    master: Tensor,
    copy: Tensor,
    boxes: _Boxes,
    progress: Progress,
) -> Problem | None:
    from_dtype, to_dtype = numpy_dtype(master.dtype), numpy_dtype(copy.dtype)
    chunks = ChunkReader(readers[0], master), ChunkReader(readers[1], copy)
    for box in boxes(master.shape):
        held: Bytes = np.empty(box.numel * master.dtype.itemsize, np.uint8)
        computed: Bytes = np.empty(box.numel * copy.dtype.itemsize, np.uint8)
        chunks[0].read_into(box, held)
        chunks[1].read_into(box, computed)
        full, low = held.view(from_dtype), computed.view(to_dtype)
        rounded = cast(full, to_dtype) if from_dtype != to_dtype else full
        same = (rounded == low) | (np.isnan(rounded) & np.isnan(low))
        progress.advance(box.numel)
        if same.all():
            continue
        first = int(np.flatnonzero(~same)[0])
        index = np.unravel_index(first, box.sizes) if box.sizes else ()
        place = [int(offset + at) for offset, at in zip(box.offsets, index, strict=True)]
        values = f"{float(full[first]):.9g} and {float(low[first]):.9g}"
        what = f"the optimizer's {master.dtype.name} weight does not round to the model's {copy.dtype.name} copy"
        return _problem(name, f"{what}, first at {place}: {values}")
    return None


def _all(shape: tuple[int, ...]) -> Iterator[Box]:
    return slabs(shape, 1, BLOCK_BYTES // 8)


def _sampled(shape: tuple[int, ...]) -> Iterator[Box]:
    """All of a small tensor; of a large one consecutive elements at the beginning, in the middle and at the end."""
    numel = prod(shape)
    if numel <= _WHOLE:
        yield Box.whole(shape)
        return
    cut = 0  # the dimension along which a box has several rows; it has one of each before it
    while prod(shape[cut + 1 :]) > _SAMPLE:
        cut += 1
    rows = min(max(_SAMPLE // prod(shape[cut + 1 :]), 1), shape[cut])
    for element in (0, (numel - _SAMPLE) // 2, numel - 1):
        index = [int(at) for at in np.unravel_index(element, shape)]
        begin = min(index[cut], shape[cut] - rows)
        rest = shape[cut + 1 :]
        yield Box((*index[:cut], begin, *(0 for _ in rest)), (*(1 for _ in index[:cut]), rows, *rest))
