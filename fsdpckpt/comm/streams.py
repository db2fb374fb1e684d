"""Tensors as one stream of bytes, of which any part can be read or written: what crosses between workers.

Each tensor (a view, of any strides) contributes its elements in row-major order, from a multiple of 16 bytes on, so
that a chunk whose bounds are multiples of 16 cuts no element. Elements are copied as bits: no value is interpreted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod

import torch

from fsdpckpt.comm.boxes import view_of
from fsdpckpt.layouts.flattened import flat_boxes

__all__ = ["Stream", "stream_bytes"]

ALIGNMENT = 16  # bytes: the largest element there is, complex128

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def stream_bytes(sizes: Sequence[tuple[Sequence[int], int]]) -> int:
    """Bytes of the stream of tensors of these (shape, bytes an element)."""
    return sum(_aligned(prod(shape) * itemsize) for shape, itemsize in sizes)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class Stream:
    """The stream of ``tensors``. Reading and writing move between them and buffers, on whatever devices each lies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [_bits(tensor) for tensor in tensors]
        self._starts: list[int] = []
        self.size = 0
        for tensor in tensors:
            self._starts.append(self.size)
            self.size += _aligned(tensor.numel() * tensor.element_size())

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on."""
        self._move(offset, buffer, write=False)

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Put the bytes in ``buffer`` where they belong from ``offset`` on."""
        self._move(offset, buffer, write=True)

    def _move(self, offset: int, buffer: torch.Tensor, *, write: bool) -> None:
        end = offset + len(buffer)
        index = max(bisect_right(self._starts, offset) - 1, 0)
        while index < len(self._tensors) and self._starts[index] < end:
            tensor, start = self._tensors[index], self._starts[index]
            first = max(offset - start, 0)
            last = min(end - start, tensor.numel() * tensor.element_size())
            if first < last:
                _copy(tensor, first, buffer[start + first - offset : start + last - offset], write=write)
            index += 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.dtype is _BITS[plain.element_size()] else plain.view(_BITS[plain.element_size()])


def _copy(tensor: torch.Tensor, first: int, part: torch.Tensor, *, write: bool) -> None:
    """Between the bytes of ``tensor`` from ``first`` on, in row-major order, and all of ``part``."""
    itemsize = tensor.element_size()
    elements = part.view(tensor.dtype)
    if tensor.is_contiguous():
        flat = tensor.view(-1)[first // itemsize : first // itemsize + len(elements)]
        _assign(flat, elements, write=write)
        return
    at = 0
    for box in flat_boxes(tuple(tensor.shape), first // itemsize, len(elements)):
        count = box.numel
        _assign(view_of(tensor, box), elements[at : at + count].view(box.sizes), write=write)
        at += count


def _assign(tensor: torch.Tensor, elements: torch.Tensor, *, write: bool) -> None:
    if write:
        tensor.copy_(elements)
    else:
        elements.copy_(tensor)
