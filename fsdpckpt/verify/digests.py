"""A SHA-256 per tensor that does not depend on layout.

The digest of a tensor is SHA-256 over the little-endian bytes of all its elements in row-major order, nothing else:
no name, no shape, no dtype. Equal tensors have equal digests whatever the layout, container and world size; it equals
``hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes())``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.parallel import DEFAULT_THREADS, Advance, for_each, in_file_order

__all__ = ["digest", "digests"]


def digest(reader: BlockReader, tensor: Tensor, advance: Advance | None = None) -> str:
    """The hexadecimal SHA-256 of ``tensor``. Raises SourceIncompleteError when elements are missing."""
    total = hashlib.sha256()
    for block in reader.blocks(tensor):
        total.update(block.data)
        if advance is not None:
            advance(len(block))
    return total.hexdigest()


def digests(
    checkpoint: Checkpoint,
    tensors: Sequence[NamedTensor],
    *,
    sources: Sources,
    threads: int = DEFAULT_THREADS,
    advance: Advance | None = None,
) -> list[str]:
    """The digest of each of ``tensors``, in their order."""

    def work(reader: BlockReader, named: NamedTensor) -> str:
        return digest(reader, named.tensor, advance)

    def reader() -> BlockReader:
        return BlockReader(checkpoint.files, sources)

    order = in_file_order([named.tensor for named in tensors])
    return for_each(tensors, work, reader=reader, threads=threads, order=order)
