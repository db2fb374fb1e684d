"""Parses torchao's optimizer states in a pickle: one tensor subclass that wraps codes, scales and a map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from fsdpckpt.errors import SourceUnsupportedError, damaged
from fsdpckpt.formats.torch.tensors import StoredTensor, Wrapped, size_of
from fsdpckpt.ir.blockwise import CODES, QMAP, SCALE, Blocks
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Box, contiguous_stride

_CODES = {"OptimStateFp8": DTYPES["float8_e4m3fn"]}  # all others have bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """What one file holds of a state: that of a parameter's shard. ``blocks``: its form, with the shard's shape."""

    blocks: Blocks
    parts: Mapping[str, StoredTensor]

    def whole(self) -> dict[str, StoredTensor]:
        """The parts of a state that is all here, in the shapes of the IR."""
        made = {part: self.shaped(part, self.blocks) for part in (CODES, SCALE)}
        if QMAP in self.parts:
            made[QMAP] = replace(self.parts[QMAP], sharded=False)
        return made

    def shaped(self, part: str, blocks: Blocks) -> StoredTensor:
        """The codes or the scale with the shape that they have in ``blocks``, whose rows these are."""
        shape = blocks.shape_of(part)
        rows = prod(self.blocks.shape) // max(prod(blocks.shape[1:]), 1)
        box = blocks.box_of(part, Box((0,) * len(blocks.shape), (rows, *blocks.shape[1:])))
        size = box.sizes if box is not None else shape
        return replace(self.parts[part], shape=size, stride=contiguous_stride(size))


def stored_blocks(wrapped: Wrapped, file: str, key: str) -> StoredBlocks:
    """The state that ``wrapped``, of one of ``CLASSES``, holds.

    Raises SourceCorruptError where its parts do not fit, SourceUnsupportedError where a block ends outside of whole
    rows of bytes.
    """
    state = wrapped.state if isinstance(wrapped.state, dict) else {}
    block, signed = state.get("block_size"), state.get("signed")
    if type(block) is not int or block < 1 or type(signed) not in (bool, type(None)) or not wrapped.shape:
        _corrupt(file, key, wrapped, "a block size", f"{block!r:.40}")
    blocks = Blocks(wrapped.kind, wrapped.dtype, wrapped.shape, block, signed)
    parts = {part: _waited(state.get(part)) for part in blocks.parts}
    numel = prod(wrapped.shape)
    if numel % block or (blocks.packed and block % 2):  # whole blocks are whole groups
        _corrupt(file, key, wrapped, f"elements in whole blocks of {block}", f"shape {wrapped.shape}")
    codes = _CODES.get(wrapped.kind.name, DTYPES["uint8"])
    shapes = {CODES: (numel // 2,) if blocks.packed else wrapped.shape, SCALE: (numel // block,)}
    stored: dict[str, StoredTensor] = {}
    for part, tensor in parts.items():
        wanted = codes if part == CODES else DTYPES["float32"]
        if not isinstance(tensor, StoredTensor) or tensor.dtype is not wanted:
            _corrupt(file, key, wrapped, f"{part} of type {wanted.name}", _described(tensor))
        if part in shapes and tensor.shape != shapes[part]:
            _corrupt(file, key, wrapped, f"{part} of shape {shapes[part]}", _described(tensor))
        if tensor.stride != contiguous_stride(tensor.shape):
            raise SourceUnsupportedError(
                f"{key}: the {part} of {blocks} are not in row-major order", key=key, file=file
            )
        stored[part] = tensor
    if "_shape" in state and size_of(state["_shape"]) != wrapped.shape:
        _corrupt(file, key, wrapped, f"the shape {wrapped.shape}", f"{state['_shape']!s:.40}")
    return StoredBlocks(blocks, stored)


def _waited(value: object) -> object:
    """What a collective gave: torchao's full states on CPU hold it still wrapped."""
    if isinstance(value, Wrapped) and value.kind.name == "AsyncCollectiveTensor":
        state = value.state[1] if isinstance(value.state, tuple) and len(value.state) == 2 else value.state
        return state.get("elem") if isinstance(state, dict) else None
    return value


def _described(tensor: object) -> str:
    if isinstance(tensor, StoredTensor):
        return f"{tensor.dtype.name} of shape {tensor.shape}"
    return type(tensor).__name__


def _corrupt(file: str, key: str, wrapped: Wrapped, expected: str, found: str) -> NoReturn:
    why = "the file is damaged, or was written by a torchao version that fsdpckpt does not know"
    raise damaged(file, f"{key}: the parts of a {wrapped.kind} do not fit", expected, found, key=key, why=why)
