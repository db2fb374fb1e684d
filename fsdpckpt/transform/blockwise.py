"""Optimizer states in blocks: whether a target can hold them as they are. They are never quantized again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.ir import bitsandbytes
from fsdpckpt.ir.bitsandbytes import scales_in, unwrapped
from fsdpckpt.ir.blockwise import CODES, LIBRARY, SCALE, Blocks, blocks_of, part_name
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import Sharding, Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.sharded import mesh_box, on_one_dimension
from fsdpckpt.text import listed

_TRIED = 256  # ranks, of those that a message proposes
_ONLY_MODEL = "--only model converts the model alone"


def states_in_blocks(checkpoint: Checkpoint) -> Iterator[tuple[str, Blocks, Tensor | Value]]:
    """The key and the form of each such state, and its codes."""
    if checkpoint.optim is not None:
        yield from _states(checkpoint.optim.state, "")  # type: ignore[arg-type]  # its keys are keys
    for extras in (checkpoint.extra, *checkpoint.rank_extra):
        yield from _states(extras, "")


def _states(value: Value | Mapping[Key, Value], at: str) -> Iterator[tuple[str, Blocks, Tensor | Value]]:
    items: Iterator[tuple[object, Value]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    for name, item in items:
        key = f"{at}{name!s}"
        blocks = blocks_of(item)
        if blocks is not None and isinstance(value, Mapping):
            yield key, blocks, value.get(part_name(name, CODES))
        elif isinstance(item, (dict, list, tuple)):
            yield from _states(item, f"{key}.")


def refuse_in_blocks(checkpoint: Checkpoint, why: str, next_step: str = _ONLY_MODEL) -> None:
    """Raises SourceUnsupportedError where ``checkpoint`` has a state in blocks."""
    for key, blocks, _ in states_in_blocks(checkpoint):
        raise SourceUnsupportedError(
            f"{key} is {blocks}, which cannot be converted to this target",
            key=key,
            file=checkpoint.source,
            why=why,
            next_step=next_step,
        )


def refuse_casts(checkpoint: Checkpoint) -> None:
    """Raises UsageError where ``--optim-dtype`` would cast a state in blocks."""
    for key, blocks, _ in states_in_blocks(checkpoint):
        raise UsageError(f"--optim-dtype cannot cast {key}: it is {blocks}", key=key, next_step="drop --optim-dtype")
    for param, states in checkpoint.optim.state.items() if checkpoint.optim is not None else ():
        for scale in scales_in(unwrapped(states)):
            raise UsageError(
                f"--optim-dtype cannot cast {param}.{scale}: it scales {bitsandbytes.LIBRARY}' 8-bit states",
                key=str(param),
                next_step="drop --optim-dtype",
            )


def require_whole_blocks(checkpoint: Checkpoint, world_size: int, *, placed: bool) -> None:
    """Raises NeedsInformationError where a rank's shard would begin or end inside of a block.

    ``placed``: tensors have a sharding of their own; else they are cut along dimension 0 over ``world_size`` ranks.
    """
    forms: dict[tuple[Blocks, Sharding | None], str] = {}
    for key, blocks, codes in states_in_blocks(checkpoint):
        if isinstance(codes, Tensor) and codes.sharded:
            forms.setdefault((blocks, codes.sharding if placed else on_one_dimension(world_size)), key)
    for (blocks, sharding), key in forms.items():
        if sharding is not None and not _fits(blocks, sharding):
            every = [each for each, _ in forms]
            works = [n for n in range(1, _TRIED + 1) if all(_fits(each, on_one_dimension(n)) for each in every)]
            raise NeedsInformationError(
                f"{key} of shape {blocks.shape} is {blocks}, and {sharding} over {sharding.mesh.world_size} ranks "
                "cuts blocks apart",
                key=key,
                file=checkpoint.source,
                expected=f"shards of whole rows, {blocks.group} or a multiple of it"
                if blocks.group > 1
                else "shards of whole rows",
                why=f"{LIBRARY} keeps one scale for each block of a rank's shard: other blocks would have to be "
                "quantized again, which changes values",
                next_step=f"--world-size with a number that works for all states: {listed(works)}",
            )


def _fits(blocks: Blocks, sharding: Sharding) -> bool:
    """Whether each rank holds whole blocks: the same rows of the codes and of the scale."""
    if len(sharding.placements) == 1:  # quick: one cut
        step = -(-blocks.shape[0] // sharding.mesh.sizes[0])
        rows = all(placement is None or getattr(placement, "dim", 0) == 0 for placement in sharding.placements)
        return rows and (step % blocks.group == 0 or step >= blocks.shape[0])
    for rank in range(sharding.mesh.world_size):
        box = mesh_box(blocks.shape, sharding, rank)
        if not box.numel:
            continue
        scale = mesh_box(blocks.shape_of(SCALE), sharding, rank)
        if blocks.box_of(SCALE, box) != scale:
            return False
    return True
