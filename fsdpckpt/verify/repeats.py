"""Pieces that lie twice in a directory of safetensors, and say the same bit for bit.

PyTorch's writer of sharded safetensors replaces the files of the ranks that write, and leaves those that an older save
made for other ranks. Where both have an element, it is proved here that they agree; otherwise the overlap stays a
problem, as which of the two is newer is not recorded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Container, ModelState, Note, Section
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.protocol import file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import names_text, plural
from fsdpckpt.verify.blocks import BlockReader, ChunkReader, slabs


def without_repeats(checkpoint: Checkpoint, sources: Sources) -> Checkpoint:
    """``checkpoint`` without pieces that others hold, too, where all that is held twice is equal; else as it is.

    Reads what is held twice, and only where pieces overlap. Raises SourceCorruptError when a file ends too early.
    """
    overlapping = [problem for problem in checkpoint.problems if problem.kind == "overlap"]
    model = checkpoint.model
    if checkpoint.container != Container.SAFETENSORS or not overlapping or model is None:
        return checkpoint
    if any(problem.section is not Section.MODEL for problem in overlapping):
        return checkpoint
    reader = BlockReader(checkpoint.files, sources)
    params: dict[str, Tensor | Value] = {}
    dropped: list[int] = []
    for name, value in model.params.items():
        params[name] = value
        if isinstance(value, Tensor) and len(value.chunks) > 1:
            rows = _rows_apart(value, reader)
            if rows is None:
                return checkpoint
            params[name] = replace(value, chunks=value.chunks.take(np.asarray(rows, np.intp)))
            dropped += (file for row, file in enumerate(value.chunks.file.tolist()) if row not in rows)
    rest = tuple(problem for problem in checkpoint.problems if problem not in overlapping)
    settled = replace(checkpoint, model=ModelState(params, model.metadata), problems=rest)
    names = names_text(sorted({file_name(checkpoint.files[file].path) for file in dropped}), 3)
    message = (
        f"{plural(len(dropped), 'piece')} in {names}: left out, as larger pieces hold the same, bit for bit; a save "
        "into a directory that has one leaves such files"
    )
    return replace(settled, notes=(*settled.notes, Note("repeated", message)))


def _rows_apart(tensor: Tensor, reader: BlockReader) -> list[int] | None:
    """Chunks of ``tensor`` of which no two overlap, and that hold what all others hold; None where there are none."""
    starts, sizes = tensor.chunks.start, tensor.chunks.size
    kept: list[int] = []
    for row in np.argsort(-sizes.prod(axis=1), kind="stable").tolist():
        low = np.maximum(starts[kept], starts[row])
        high = np.minimum(starts[kept] + sizes[kept], starts[row] + sizes[row])
        held = int((high - low).clip(0).prod(axis=1).sum())
        if held == 0:
            kept.append(row)
        elif held < sizes[row].prod() or not _equal(tensor, kept, row, reader):
            return None
    return sorted(kept)


def _equal(tensor: Tensor, kept: list[int], row: int, reader: BlockReader) -> bool:
    """Whether the chunks ``kept`` hold, in the box of the chunk ``row``, the same bytes as that one."""
    one, other = ChunkReader(reader, tensor, kept), ChunkReader(reader, tensor, [row])
    start, itemsize = tensor.chunks.start[row].tolist(), tensor.dtype.itemsize
    for part in slabs(tuple(tensor.chunks.size[row].tolist()), itemsize, reader.limit):
        box = Box(tuple(map(sum, zip(start, part.offsets, strict=True))), part.sizes)
        held, repeated = (np.empty(part.numel * itemsize, np.uint8) for _ in range(2))
        one.read_into(box, held)
        other.read_into(box, repeated)
        if not np.array_equal(held, repeated):
            return False
    return True
