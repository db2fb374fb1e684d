"""Which tensors of a checkpoint are stored, and which are another name of bytes that one of these has.

In files of ``torch.save`` names may share a storage: tied weights, and FSDP1's flat parameters with the slices of
``use_orig_params=True``. Counting each of them would count the model twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpckpt.ir.tensors import Tensor, ranges_of


def have_own_bytes(tensors: Sequence[Tensor]) -> list[bool]:
    """For each of ``tensors`` whether it has bytes of its own: False if the bytes of others hold all of it.

    Of tensors with the same bytes the first is stored. One whose bytes are not located counts as stored.
    """
    counts = [len(tensor.chunks) for tensor in tensors]
    if not sum(counts):
        return [True] * len(tensors)
    owner = np.repeat(np.arange(len(tensors)), counts)
    file, begin, end = ranges_of(tensors)
    filled = end > begin
    numel = np.asarray([tensor.numel for tensor in tensors], np.int64)
    # What holds others comes before them: of equal ranges the one of the largest tensor, a flat parameter.
    order = np.lexsort((owner, -numel[owner], -end, begin, file))
    order = order[filled[order]]
    owner, file, begin, end = owner[order], file[order], begin[order], end[order]
    # No two files have ends in common: the highest end so far is that of an earlier chunk of the same file.
    base = file * (int(end.max(initial=0)) + 1)
    highest = np.maximum.accumulate(base + end)
    held = np.zeros(len(order), np.bool_)
    held[1:] = highest[:-1] >= (base + end)[1:]
    own = np.bincount(owner[~held | (begin < 0)], minlength=len(tensors)) > 0
    any_bytes = np.bincount(owner, minlength=len(tensors)) > 0
    result: list[bool] = (own | ~any_bytes).tolist()
    return result


def bytes_stored_once(tensors: Sequence[Tensor]) -> int:
    """The bytes of ``tensors``, those that several names share once."""
    return sum(tensor.nbytes for tensor, own in zip(tensors, have_own_bytes(tensors), strict=True) if own)
