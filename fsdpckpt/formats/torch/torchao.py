"""Reads torchao's optimizer states from a pickle: a tensor subclass that wraps codes, scales and a map.

``ir.torchao`` says how they are stored; ``PickleWriter.whole_blocks`` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

from fsdpckpt.errors import SourceUnsupportedError, damaged
from fsdpckpt.formats.torch.tensors import StoredTensor, Wrapped, size_of
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.ir.torchao import BLOCK_SIZE, QMAP, SHAPE, SIGNED, Blocks


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """What one file holds of a state in blocks: that of a parameter's shard. ``blocks``: its form, with the shard's
    shape.
    """

    blocks: Blocks
    parts: Mapping[str, StoredTensor]

    def whole(self) -> dict[str, StoredTensor]:
        """The parts of a state that is entirely in this file, in the shapes of the IR."""
        made: dict[str, StoredTensor] = {}
        for part, stored in self.parts.items():
            shape = stored.shape if part == QMAP else self.blocks.shape_of(part)
            sharded = False if part == QMAP else stored.sharded
            made[part] = replace(stored, shape=shape, stride=contiguous_stride(shape), sharded=sharded)
        return made


def stored_blocks(wrapped: Wrapped, file: str, key: str) -> StoredBlocks:
    """The state in ``wrapped``, of one of ``CLASSES``.

    Raises SourceCorruptError if its parts contradict each other, SourceUnsupportedError if a block does not end at a
    whole byte of a row.
    """
    state = wrapped.state if isinstance(wrapped.state, dict) else {}
    block, signed = state.get(BLOCK_SIZE), state.get(SIGNED)
    if type(block) is not int or block < 1 or type(signed) not in (bool, type(None)) or not wrapped.shape:
        _corrupt(file, key, wrapped, "a block size", f"{block!r:.40}")
    blocks = Blocks(wrapped.kind, wrapped.dtype, wrapped.shape, block, signed)
    parts = {part: _wait_result(state.get(part)) for part in blocks.parts}
    numel = prod(wrapped.shape)
    if numel % block or (blocks.packed and block % 2):  # whole blocks are whole groups
        _corrupt(file, key, wrapped, f"elements in whole blocks of {block}", f"shape {wrapped.shape}")
    shapes = blocks.stored_shapes(wrapped.shape)
    stored: dict[str, StoredTensor] = {}
    for part, tensor in parts.items():
        wanted = blocks.dtype_of(part)
        if not isinstance(tensor, StoredTensor) or tensor.dtype is not wanted:
            _corrupt(file, key, wrapped, f"{part} of type {wanted.name}", _describe(tensor))
        if part in shapes and tensor.shape != shapes[part]:
            _corrupt(file, key, wrapped, f"{part} of shape {shapes[part]}", _describe(tensor))
        if tensor.stride != contiguous_stride(tensor.shape):
            raise SourceUnsupportedError(
                f"{key}: the {part} of {blocks} are not in row-major order", key=key, file=file
            )
        stored[part] = tensor
    if SHAPE in state and size_of(state[SHAPE]) != wrapped.shape:
        _corrupt(file, key, wrapped, f"the shape {wrapped.shape}", f"{state[SHAPE]!s:.40}")
    return StoredBlocks(blocks, stored)


def _wait_result(value: object) -> object:
    """The result of a collective: torchao's full states on CPU still hold it wrapped."""
    if isinstance(value, Wrapped) and value.kind.name == "AsyncCollectiveTensor":
        state = value.state[1] if isinstance(value.state, tuple) and len(value.state) == 2 else value.state
        return state.get("elem") if isinstance(state, dict) else None
    return value


def _describe(tensor: object) -> str:
    if isinstance(tensor, StoredTensor):
        return f"{tensor.dtype.name} of shape {tensor.shape}"
    return type(tensor).__name__


def _corrupt(file: str, key: str, wrapped: Wrapped, expected: str, found: str) -> NoReturn:
    why = "the file is damaged, or was written by a torchao version that fsdpckpt does not know"
    raise damaged(file, f"{key}: the parts of a {wrapped.kind} do not fit", expected, found, key=key, why=why)
