"""Puts together a model that each rank saved as its local tensors, beside an optimizer of DTensors.

RLinf's ``local_shard`` files hold ``DTensor.to_local()`` of each parameter and the optimizer's own state dict. What a
rank has of a parameter then looks like a tensor that every rank has whole. The DTensors of its states say how it was
cut, and their lengths prove it: on every rank the plain tensor has exactly the shape of the state's local tensor. With
ids, all parameters with the same local shapes must be cut alike, and be as many as the model's tensors of these shapes.

Where a model turns out to be saved that way, nothing says of its other tensors whether a rank has all of them: they
become ``PerRank``, which no command takes for a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.attached_states import param_keys
from fsdpckpt.ir.checkpoint import Container, Layout, ModelState, Note
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import PerRank, Sharded, Whole
from fsdpckpt.ir.state_shapes import mirrors, shown_shapes
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.protocol import PartContents
from fsdpckpt.readers.sections import Sections
from fsdpckpt.text import plural, some_of

_KEYS_IN_MESSAGE = 5

_Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""The shape of what each rank holds of one tensor; None for a rank that holds no element."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the states of one parameter are cut. ``local``: what each rank holds; ``leaf``: a state that is cut so."""

    local: _Shapes
    leaf: Tensor

    def same_as(self, other: _Layout) -> bool:
        ours, theirs = self.leaf, other.leaf
        columns = ((ours.chunks.start, theirs.chunks.start), (ours.chunks.size, theirs.chunks.size))
        return ours.shape == theirs.shape and all(np.array_equal(first, second) for first, second in columns)


@dataclass(frozen=True, slots=True)
class _RankTensors:
    """A plain tensor of the model: its ``local`` shapes, one chunk for each rank, and all its names (tied weights)."""

    local: _Shapes
    tensor: Tensor
    chunks: Chunks
    names: list[str]


def join_local_tensors(tree: PartContents, sections: Sections, optim: Optimizer | None) -> None:
    """Put together the tensors of the model in ``sections``, of the rank files ``tree``, that ``optim`` proves to be
    local tensors. A note names them, and how they are cut. Changes ``tree`` and ``sections``.
    """
    model = sections.model
    if optim is None or model is None or tree.container is not Container.TORCH or tree.world_size < 2:
        return
    leaves = [leaf for leaf in model.params.values() if isinstance(leaf, Tensor)]
    if not leaves or any(not isinstance(leaf.cut, Whole) for leaf in leaves):
        return  # the model's own DTensors say how it is cut
    layouts = {key: layout for key in optim.state if (layout := _layout(optim.state[key], tree.world_size))}
    cut = {key: layout for key, layout in layouts.items() if layout.local != (layout.leaf.shape,) * tree.world_size}
    if not cut:
        return
    held = _held_by_ranks(tree, sections, model)
    proved = _proved(held, layouts, param_keys(model.params, optim))
    joined: dict[str, Tensor | Value] = {}
    for first, layout in proved.items():
        if layout in cut.values():
            joined.update(dict.fromkeys(held[first].names, _joined(held[first], layout)))
    if not joined:
        return
    decided = {name for first in proved for name in held[first].names}
    params: dict[str, Tensor | Value] = {}
    for name, leaf in model.params.items():
        params[name] = joined.get(name, leaf)
        if isinstance(leaf, Tensor) and name not in decided and leaf.ndim and leaf.dtype.kind in ("float", "complex"):
            params[name] = replace(leaf, cut=PerRank())
    sections.model = ModelState(params, model.metadata)
    for name in joined:
        tree.rank_values.pop((*(sections.model_path or ()), name), None)
    tree.layout = Layout.SHARDED
    how = some_of(sorted({str(layout.leaf.cut) for layout in proved.values()}), 3)
    message = (
        f"{plural(len(joined), 'model tensor', 'were')} saved as what each rank holds, and put together as the "
        f"optimizer's DTensors are cut ({how}), whose local shapes are the same on all {tree.world_size} ranks: "
        f"{some_of(list(joined), _KEYS_IN_MESSAGE)}"
    )
    tree.notes.append(Note("inferred", message, keys=tuple(joined)))


def _layout(states: Mapping[str, Tensor | Value], world_size: int) -> _Layout | None:
    """How the states that mirror a parameter are cut; None without any, or if a rank holds several boxes."""
    for shown in shown_shapes(states):
        leaf = shown.tensor
        if isinstance(leaf.cut, Sharded) and mirrors(shown.state) and leaf.shape == shown.shape:
            ranks: list[int] = leaf.chunks.rank.tolist()
            sizes = [tuple(size) for size in leaf.chunks.size.tolist()]
            if len(set(ranks)) == len(ranks):
                by_rank = dict(zip(ranks, sizes, strict=True))
                return _Layout(tuple(_filled(by_rank.get(rank)) for rank in range(world_size)), leaf)
    return None


def _filled(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None or 0 in shape else shape


def _held_by_ranks(tree: PartContents, sections: Sections, model: ModelState) -> dict[str, _RankTensors]:
    """What each rank has of the model's tensors, by their first names, also where shapes differ
    (``PartContents.rank_values``). Integers are left out.
    """
    held: dict[str, _RankTensors] = {}
    first_at: dict[object, _RankTensors] = {}
    for name, leaf in model.params.items():
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.dtype.kind not in ("float", "complex"):
            continue
        values = tree.rank_values.get((*(sections.model_path or ()), name), (leaf,))
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) < len(values) or any(value.dtype is not leaf.dtype for value in tensors):
            continue
        if any(value.ndim != leaf.ndim for value in tensors):
            continue
        chunks = Chunks.joined([value.chunks for value in tensors])
        if sorted(chunks.rank.tolist()) != list(range(tree.world_size)):
            continue
        place = chunks.file.tobytes(), chunks.offset.tobytes(), chunks.size.tobytes()
        if place in first_at:
            first_at[place].names.append(name)
            continue
        sizes = dict(zip(chunks.rank.tolist(), map(tuple, chunks.size.tolist()), strict=True))
        local = tuple(_filled(sizes[rank]) for rank in range(tree.world_size))
        held[name] = first_at[place] = _RankTensors(local, leaf, chunks, [name])
    return held


def _proved(
    held: Mapping[str, _RankTensors], layouts: Mapping[ParamKey, _Layout], names: Mapping[ParamKey, str]
) -> dict[str, _Layout]:
    """The tensors whose layout is certain: by name, or because all that have their local shapes are cut alike."""
    proved: dict[str, _Layout] = {}
    first_names = {name: first for first, tensors in held.items() for name in tensors.names}
    for key, layout in layouts.items():
        name = first_names.get(names.get(key, ""))
        if name is not None and held[name].local == layout.local:
            proved[name] = layout
    unnamed = [layout for key, layout in layouts.items() if key not in names]
    open_names = [name for name in held if name not in proved]
    counts = Counter(held[name].local for name in open_names)
    for local, alike in _by_local_shapes(unnamed):
        if len(alike) == counts[local] and all(alike[0].same_as(other) for other in alike[1:]):
            proved.update({name: alike[0] for name in open_names if held[name].local == local})
    return proved


def _by_local_shapes(layouts: Sequence[_Layout]) -> Iterator[tuple[_Shapes, list[_Layout]]]:
    groups: dict[_Shapes, list[_Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.local, []).append(layout)
    yield from groups.items()


def _joined(held: _RankTensors, layout: _Layout) -> Tensor:
    """The whole tensor: each rank's box is that of the state, its bytes those of the plain tensor."""
    leaf = layout.leaf
    rows = dict(zip(held.chunks.rank.tolist(), range(len(held.chunks)), strict=True))
    with_elements: npt.NDArray[np.bool_] = np.all(leaf.chunks.size > 0, axis=1)
    filled = leaf.chunks.take(with_elements)
    own = held.chunks.take(np.array([rows[rank] for rank in filled.rank.tolist()], np.intp))
    chunks = own.with_boxes(start=filled.start, size=filled.size)
    return Tensor(held.tensor.dtype, leaf.shape, chunks, sharded=True, cut=leaf.cut, sharding=leaf.sharding)
