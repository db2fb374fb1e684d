"""Refuses casts and targets for which quantized optimizer states would have to be quantized again.

That would change values. A state is one code for each element and one scale for each block of a rank's elements, so a
target must not cut a block, and neither codes nor scales can be cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.bitsandbytes import BITSANDBYTES
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.placements import Shard, Sharding
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.torchao import CODES, SCALE, TORCHAO, Blocks, blocks_of, part_name
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts import mesh_box, row_sharding
from fsdpckpt.text import listed

_MAX_RANKS_TRIED = 256  # when a message proposes world sizes
_ONLY_MODEL = f"{flags.only('model')} converts the model alone"


def refuse_in_blocks(checkpoint: Checkpoint, why: str, next_step: str = _ONLY_MODEL) -> None:
    """Raises SourceUnsupportedError if ``checkpoint`` has a state quantized in blocks."""
    for key, blocks, _ in _states_with_blocks(checkpoint):
        raise SourceUnsupportedError(
            f"{key} is {blocks}, which cannot be converted to this target",
            key=key,
            file=checkpoint.source,
            why=why,
            next_step=next_step,
        )


def refuse_casts(checkpoint: Checkpoint) -> None:
    """Raises UsageError if ``--optim-dtype`` would cast a state quantized in blocks."""
    for key, blocks, _ in _states_with_blocks(checkpoint):
        raise UsageError(
            f"{flags.optim_dtype} cannot cast {key}: it is {blocks}", key=key, next_step=f"drop {flags.optim_dtype}"
        )
    for param, states in checkpoint.states.items():
        for scale in state_parts(states).scales:
            raise UsageError(
                f"{flags.optim_dtype} cannot cast {param}.{scale}: it scales {BITSANDBYTES}' 8-bit states",
                key=str(param),
                next_step=f"drop {flags.optim_dtype}",
            )


def refuse_cut_codes(checkpoint: Checkpoint) -> None:
    """Raises SourceUnsupportedError for a sharded state of bitsandbytes with a scale for each block of its codes."""
    for key, states in checkpoint.states.items():
        for scale, name in state_parts(states).scales.items():
            codes = states.get(name)
            if not isinstance(codes, Tensor) or not codes.sharded:
                continue
            raise SourceUnsupportedError(
                f"{key}.{name} is one of {BITSANDBYTES}' 8-bit states: shards would not hold whole blocks of it",
                key=f"{key}.{name}",
                file=checkpoint.source,
                why=f"{scale} has one scale for each block of a rank's elements: other blocks would have to be "
                f"quantized again, which changes values; and {BITSANDBYTES} does not run on DTensors",
                next_step=f"convert to another layout ({flags.to('full')}, {flags.to('flattened')}), or only the "
                f"model ({flags.only('model')})",
            )


def require_whole_blocks(checkpoint: Checkpoint, world_size: int, *, placed: bool) -> None:
    """Raises NeedsInformationError if a rank's shard would begin or end inside a block.

    ``placed``: tensors have their own sharding; otherwise they are cut along dimension 0 over ``world_size`` ranks.
    """
    first_keys: dict[tuple[Blocks, Sharding | None], str] = {}
    for key, blocks, codes in _states_with_blocks(checkpoint):
        if isinstance(codes, Tensor) and codes.sharded:
            first_keys.setdefault((blocks, codes.sharding if placed else row_sharding(world_size)), key)
    for (blocks, sharding), key in first_keys.items():
        if sharding is not None and not _has_whole_blocks(blocks, sharding):
            works = _ranks_with_whole_blocks([other for other, _ in first_keys])
            raise NeedsInformationError(
                f"{key} of shape {blocks.shape} is {blocks}, and {sharding} over {sharding.mesh.world_size} ranks "
                "cuts blocks apart",
                key=key,
                file=checkpoint.source,
                expected=f"shards of whole rows, {blocks.group} or a multiple of it"
                if blocks.group > 1
                else "shards of whole rows",
                why=f"{TORCHAO} keeps one scale for each block of a rank's shard: other blocks would have to be "
                "quantized again, which changes values",
                next_step=f"{flags.world_size} with a number that works for all states: {listed(works)}",
            )


def _ranks_with_whole_blocks(all_blocks: Sequence[Blocks]) -> list[int]:
    """The numbers of ranks over which each of ``all_blocks`` can be cut by rows, as far as they were tried."""
    works: list[int] = []
    for ranks in range(1, _MAX_RANKS_TRIED + 1):
        sharding = row_sharding(ranks)
        if all(_has_whole_blocks(blocks, sharding) for blocks in all_blocks):
            works.append(ranks)
    return works


def _has_whole_blocks(blocks: Blocks, sharding: Sharding) -> bool:
    """Whether each rank holds whole blocks: the same rows of the codes and of the scale."""
    if sharding.placements == (Shard(0),):  # the usual cut, without a loop over the ranks
        rows = -(-blocks.shape[0] // sharding.mesh.sizes[0])
        return rows % blocks.group == 0
    for rank in range(sharding.mesh.world_size):
        box = mesh_box(blocks.shape, sharding, rank)
        if not box.numel:
            continue
        scale = mesh_box(blocks.shape_of(SCALE), sharding, rank)
        held = blocks.boxes_of(box)
        if held is None or held[SCALE] != scale:
            return False
    return True


def _states_with_blocks(checkpoint: Checkpoint) -> Iterator[tuple[str, Blocks, Tensor | Value]]:
    """The key of each state quantized in blocks, how it is quantized, and its codes."""
    for section in (checkpoint.states, checkpoint.extra, *checkpoint.rank_extra):
        yield from _in_blocks(section, "")


def _in_blocks(value: object, prefix: str) -> Iterator[tuple[str, Blocks, Tensor | Value]]:
    """The states quantized in blocks inside a nested value. ``prefix``: of their keys."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for name, item in items:
        blocks = blocks_of(item)
        if blocks is not None and isinstance(value, Mapping):
            yield f"{prefix}{name}", blocks, value.get(part_name(name, CODES))
        elif isinstance(item, (dict, list, tuple)):
            yield from _in_blocks(item, f"{prefix}{name}.")
