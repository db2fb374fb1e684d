"""Reads a DCP directory (``torch.distributed.checkpoint``) into one nested state dict, with ranks and files merged.

Chunks come from ``.metadata``. With ``locate`` each stored item, a small ``torch.save`` archive, is opened to locate
its elements and to compare it with the metadata. Order and nesting come from the planner data: ``DefaultSavePlanner``
flattens dicts and lists (``_nested_dict.py``, ``_traverse.py``), so that dict keys became strings, list positions ints,
and empty dicts and lists vanished.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, damaged
from fsdpckpt.formats.dcp import DcpMetadata, PathElement
from fsdpckpt.ir.checkpoint import Container, Layout, Note, Problem, ProblemKind, Section
from fsdpckpt.ir.placements import OneSlice
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor, contiguous_strides
from fsdpckpt.ir.text_keys import restored
from fsdpckpt.ir.values import UNREAD, Key, Value
from fsdpckpt.layouts.flattened import flat_boxes, is_flat_key
from fsdpckpt.readers.dcp.blockwise import read_blockwise
from fsdpckpt.readers.dcp.directory import DcpDirectory, open_directory
from fsdpckpt.readers.dcp.item_numbers import have_items
from fsdpckpt.readers.dcp.items import declared_chunks, locate_chunks, locate_some, read_values
from fsdpckpt.readers.dcp.overlaps import shared_bytes
from fsdpckpt.readers.protocol import ChunkedTensor, FileTable, Items, Locate, PartContents, build_tensors
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

_MAX_VALUES = 1 << 14  # pickled values that are always read, at some microseconds each: groups, counters, ...
# Megatron's values that are always read: what all ranks share, and the settings of parameters.
_GROUPS = re.compile(r"^common_state/|\.optimizer/|(?:^|\.)param_to_group_meta\.")


def read_dcp(path: str, files: FileTable, sources: Sources, *, locate: Locate) -> PartContents:
    """Read the checkpoint in the directory ``path``.

    With ``Locate.NOTHING`` only the tensor items of param groups are opened: all other chunks have offset -1, and if
    there are more than ``_MAX_VALUES`` pickled values, those outside ``_GROUPS`` are ``UNREAD``. With some tensors all
    are located if the items of these have other sizes than the metadata declares. Raises SourceIncompleteError (no
    metadata, files or items missing: lists all), SourceCorruptError (contradictions), SourceUnsafeError (unknown
    globals), SourceUnsupportedError (compressed items).
    """
    directory = open_directory(path, sources)
    tree = PartContents(
        {}, Layout.FULL, Container.DCP, directory.world_size, evidence=directory.evidence, notes=directory.notes
    )
    if directory.metadata.paths is None:  # only the planner data keep the order
        tree.keys_in_order = False
    directory.numbers = {name: files.add(directory.file(name), nbytes) for name, nbytes in directory.nbytes.items()}
    metadata, blocks = read_blockwise(directory, sources, tree)
    ordinary = replace(directory, metadata=metadata)
    chosen = None if locate.all else locate_some(_only_items(ordinary, locate.items), sources, tree)
    if chosen is None:
        chunked = locate_chunks(ordinary, sources, tree)
    else:
        located = {tensor.key: tensor for tensor in chosen}
        chunked = [located.get(tensor.key, tensor) for tensor in declared_chunks(ordinary)]
    values = read_values(directory, sources, tree) if locate.values else _few_values(directory, sources, tree)
    in_shape = _in_own_shapes(chunked, directory.metadata.unflattened, file=path)
    tensors = build_tensors(in_shape, world_size=directory.world_size)
    _share_equal_settings(tensors, files, sources)
    sharded_blocks = (value for value in blocks.values() if isinstance(value, Tensor) and value.sharded)
    if any(len(tensor.chunks) > 1 for tensor in tensors.values()) or any(True for _ in sharded_blocks):
        tree.layout = Layout.SHARDED
    if files.may_hold_slices():
        _find_flattened(directory, tensors, tree)
    tree.problems.extend(_misnamed_problems(directory.metadata.order, directory.metadata.paths))
    tree.problems.extend(shared_bytes(directory.metadata))
    leaves = {**values, **tensors, **blocks}
    in_order = ((key, leaves[key]) for key in metadata.order)
    nested = _nest(in_order, metadata.paths, file=path, notes=tree.notes)
    tree.root = restored(nested, files.lost)
    return tree


def _few_values(directory: DcpDirectory, sources: Sources, tree: PartContents) -> dict[str, Value]:
    items = directory.metadata.items
    few = items if len(items) <= _MAX_VALUES else {key: items[key] for key in items if _GROUPS.search(key)}
    if len(few) < len(items):
        tree.notes.append(Note("unread", f"values that are not tensors were not read: {len(items) - len(few):,}"))
    values = read_values(replace(directory, metadata=replace(directory.metadata, items=few)), sources, tree)
    return {key: values.get(key, UNREAD) for key in items}


def _is_setting(key: str) -> bool:
    """Whether ``key`` is ``<optimizer>.param_groups.<fqn>.<name>``; with a group's number it is the nested form."""
    _, groups, rest = f".{key}".partition(".param_groups.")
    return bool(groups) and not re.fullmatch(r"\d+\.[^.]+", rest)


def _only_items(directory: DcpDirectory, items: Items) -> DcpDirectory:
    """The same directory with only the settings of param groups and the tensors that have one of ``items``."""
    numbers = directory.by_file(directory.numbers)
    all_tensors = directory.metadata.tensors
    stored = [(numbers[tensor.chunks.file], tensor.chunks.item) for tensor in all_tensors.values()]
    chosen = have_items(stored, items)
    tensors = {
        key: tensor
        for (key, tensor), has_one in zip(all_tensors.items(), chosen, strict=True)
        if has_one or (_is_setting(key) and tensor.shape == ())
    }
    return replace(directory, metadata=replace(directory.metadata, tensors=tensors, items={}))


def _share_equal_settings(tensors: MutableMapping[str, Tensor], files: FileTable, sources: Sources) -> None:
    """Make settings with the same dtype and bytes one tensor, so that ``sections`` sees which parameters agree."""
    read = files.files()
    seen: dict[tuple[str, bytes], Tensor] = {}
    for key, tensor in tensors.items():
        if _is_setting(key) and tensor.shape == () and len(tensor.chunks):
            source = sources.open_file(read[int(tensor.chunks.file[0])])
            content = source.read(int(tensor.chunks.offset[0]), tensor.nbytes)
            tensors[key] = seen.setdefault((tensor.dtype.name, content), tensor)


def _in_own_shapes(
    chunked: Sequence[ChunkedTensor], shapes: Mapping[str, tuple[int, ...]], *, file: str
) -> Sequence[ChunkedTensor]:
    """``chunked``, those among ``shapes`` with boxes of these."""
    if not shapes:
        return chunked
    shaped: list[ChunkedTensor] = []
    for tensor in chunked:
        shape = shapes.get(tensor.key)
        shaped.append(tensor if shape is None else _in_shape(tensor, shape, file=file))
    return shaped


def _in_shape(tensor: ChunkedTensor, shape: tuple[int, ...], *, file: str) -> ChunkedTensor:
    """``tensor``, saved by Megatron-core 0.7 to 0.15 as ranges of flattened local shards, with boxes of ``shape``.

    The distributed optimizer gives each rank a range of elements of a parameter's local shard (``flattened_range``).
    Local shards are all of one shape and form a grid; the tensor is saved with the shape of that grid and one dimension
    more, for the elements of a flattened shard, which is what the ranges cut
    (``megatron/core/dist_checkpointing/strategies/torch.py``, ``sharded_tensor_to_torch_sharded_tensor``). ``shape``
    comes from ``mcore_data`` in ``.metadata``. Raises SourceCorruptError where the grid does not make up that shape.
    """
    grid, elements = tensor.shape[:-1], tensor.shape[-1]
    fits = len(grid) == len(shape) and all(
        cells > 0 and extent % cells == 0 for extent, cells in zip(shape, grid, strict=True)
    )
    local = tuple(extent // cells for extent, cells in zip(shape, grid, strict=True)) if fits else ()
    chunks = tensor.chunks
    if not fits or prod(local) != elements or (chunks.size[chunks.size[:, -1] > 0, :-1] != 1).any():
        raise damaged(
            file,
            f"the slices of {tensor.key} do not make up its shape",
            f"a grid of equal shards of {list(shape)}",
            f"shape {list(tensor.shape)}",
            key=tensor.key,
            why="the metadata was damaged or edited, or a version of Megatron-core that is not known wrote it",
        )
    ranges = zip(chunks.start[:, -1].tolist(), chunks.size[:, -1].tolist(), strict=True)
    boxes = [flat_boxes(local, begin, count) for begin, count in ranges]
    row = np.repeat(np.arange(len(boxes)), list(map(len, boxes)))
    start = np.array([box.offsets for each in boxes for box in each], np.int64).reshape(len(row), len(shape))
    size = np.array([box.sizes for each in boxes for box in each], np.int64).reshape(len(row), len(shape))
    before: list[int] = []  # of each box, the elements of its range in the boxes before it
    for of_range in boxes:
        before += accumulate((box.numel for box in of_range[:-1]), initial=0) if of_range else ()
    step = chunks.stride[row, -1]
    offset = chunks.offset[row]
    in_range = np.array(before, np.int64) * step * tensor.dtype.itemsize
    offset = np.where(offset < 0, offset, offset + in_range)
    start += chunks.start[row, :-1] * np.array(local, np.int64)
    strides = contiguous_strides(size) * step[:, None]
    # An item holds a range, in another shape than its boxes: no target may refer to it as the item of a box.
    item = chunks.item[row] if chunks.item is not None and (offset < 0).any() else None
    boxed = Chunks(chunks.rank[row], chunks.file[row], offset, Boxes(start, size, strides), item)
    return tensor._replace(shape=shape, chunks=boxed)


_MAX_POSITIONS = 1 << 20  # largest list whose entries may be mostly empty


class _Node(dict[PathElement, Value]):
    """A container being filled; a plain dict below it is a stored value."""


def _nest(
    leaves: Iterable[tuple[str, Value]],
    paths: Mapping[str, tuple[PathElement, ...]] | None,
    *,
    file: str,
    notes: list[Note],
) -> dict[Key, Value]:
    """The state dict of ``leaves`` (flat key, value). Without ``paths`` it stays flat.

    Raises SourceCorruptError if a path runs through the value of another path.
    """
    if paths is None:
        return {key: value for key, value in leaves}  # noqa: C416 (a dict of wider types)
    root = _Node()
    parents: dict[tuple[PathElement, ...], _Node] = {(): root}
    for key, value in leaves:
        path = paths.get(key, (key,))
        parent = parents.get(path[:-1])
        if parent is None:
            parent = parents[path[:-1]] = _descend(root, path[:-1], key, file)
        if path[-1] in parent:
            raise _clash(key, file)
        parent[path[-1]] = value
    _require_positions(root, file)
    finished = _to_containers(root, (), notes)
    return finished if isinstance(finished, dict) else {"": finished}


def _misnamed_problems(keys: Collection[str], paths: Mapping[str, tuple[PathElement, ...]] | None) -> list[Problem]:
    """A fatal problem for each key that differs from its path joined by dots, has no path, or is only a path: nothing
    shows which of the two is right.

    ``flatten_state_dict`` makes none of these; they come from damage and mixed saves.
    """
    if paths is None:
        return []
    joined = {key: ".".join(map(str, paths[key])) if key in paths else None for key in keys}
    misplaced = {
        key: f"says that it is at {place}" if place is not None else "does not say where it is in the state dict"
        for key, place in joined.items()
        if key != place
    }
    misplaced |= {key: "holds nothing under that key" for key in paths if key not in joined}
    return [
        Problem("names", f"the metadata calls one entry {key}, and {what}", key=key) for key, what in misplaced.items()
    ]


def _descend(root: _Node, path: tuple[PathElement, ...], key: str, file: str) -> _Node:
    node = root
    for element in path:
        child: object = node.get(element)
        if child is None and element not in node:
            node[element] = child = _Node()  # type: ignore[assignment]  # until _to_containers makes it a dict or a list
        if not isinstance(child, _Node):
            raise _clash(key, file)
        node = child
    return node


def _clash(key: str, file: str) -> SourceCorruptError:
    why = "the planner data of the metadata does not fit its keys"
    return damaged(file, f"the nesting of {key} runs through another entry", key=key, why=why)


def _require_positions(root: _Node, file: str) -> None:
    """Refuse list positions that the entries cannot have: a list is as long as its highest position."""
    nodes, length = [root], 0
    for node in nodes:
        nodes.extend(child for child in node.values() if type(child) is _Node)
        if all(type(key) is int for key in node):
            length += max((key for key in node if isinstance(key, int)), default=0)
        if length > _MAX_POSITIONS + len(nodes):
            what = f"the planner data names list positions beyond {length}"
            most = f"at most {_MAX_POSITIONS} positions"
            raise damaged(file, what, most, str(length), why="the metadata was damaged or edited")


def _to_containers(node: _Node, path: tuple[PathElement, ...], notes: list[Note]) -> Value:
    """Turn nodes into plain dicts and lists. A node with int keys was a list."""
    for key, child in node.items():
        if type(child) is _Node:
            node[key] = _to_containers(child, (*path, key), notes)
    if not node or not all(type(key) is int for key in node):
        return {key: value for key, value in node.items()}  # noqa: C416 (a dict of wider types)
    highest = max(key for key in node if isinstance(key, int))
    missing = [index for index in range(highest + 1) if index not in node]
    if missing:
        dotted = ".".join(map(str, path))
        shown = str(missing) if len(missing) <= 20 else f"{str(missing[:20])[:-1]}, ...]"
        message = f"{dotted}: entries {shown} were empty when saved, DCP keeps no empty dict"
        notes.append(Note("empty-entries", message, dotted))
    return [node.get(index, {}) for index in range(highest + 1)]


_STATE_BY_ID = re.compile(r"((?:.*\.)?state\.)\d+\.[^.]+")
# Of an optimizer: a producer (composer) that nests everything under "state." must not look like one.
_STATE = re.compile(r"\.state\.|^state\.\d|(?:^|\.)param_groups\.")


def _find_flattened(directory: DcpDirectory, tensors: dict[str, Tensor], tree: PartContents) -> None:
    """Decide from keys, shapes and chunks alone whether there are flat parameters, or slices that DCP lost."""
    metadata = directory.metadata
    flat = [key for key in metadata.tensors if is_flat_key(key)]
    by_id = _states_by_id(metadata)
    lost = _first_lost(metadata, by_id, directory.world_size) if by_id else None
    if flat or lost is not None:
        tree.layout = Layout.FLATTENED
    if lost is not None:
        ranks = plural(directory.world_size, "rank")
        certain = bool(flat) or len(by_id) == len(metadata.tensors)
        if certain:
            message = (
                f"{directory.path} is the raw optimizer.state_dict() of FSDP1, saved through DCP by {ranks}: each rank "
                f"held a different slice of {lost}, and DCP kept one; the others are gone. Save it again with "
                "FSDP.optim_state_dict or torch.distributed.checkpoint.state_dict"
            )
        else:
            message = (
                f"{lost} is a vector in one piece, although {ranks} saved {directory.path}. It is whole if FSDP does "
                "not shard its parameter (ignored_params). In FSDP1's raw optimizer.state_dict() it is one rank's "
                "slice, and DCP kept no other. Nothing shows which: save it again with get_optimizer_state_dict of "
                f"torch.distributed.checkpoint.state_dict, or convert the model alone ({flags.only('model')})"
            )
        kind: ProblemKind = "flattened-lost" if certain else "flattened"
        tree.problems.append(Problem(kind, message, file=directory.path, key=lost, section=Section.OPTIM))
    beside = _beside_flat(metadata, flat)
    for key in beside:
        tensors[key] = replace(tensors[key], sharded=None, cut=OneSlice())
    if beside:
        message = (
            f"{plural(len(beside), 'vector', 'are')} stored with the flat parameters: buffers, and slices of one "
            "rank, which are not converted: their data is in the flat parameters"
        )
        tree.notes.append(Note("flattened-names", message, beside[0], tuple(beside)))


def _states_by_id(metadata: DcpMetadata) -> list[str]:
    """The keys of states in optimizers that are keyed by id. One with a name among its keys is keyed by name: a
    parameter may be called "0"."""
    by_start: dict[str, list[str]] = {}
    for key in metadata.tensors:
        if matched := _STATE_BY_ID.fullmatch(key):
            by_start.setdefault(matched[1], []).append(key)
    found: list[str] = []
    for start, keys in by_start.items():
        after = (key[len(start) :] for key in metadata.tensors if key.startswith(start))
        if all(rest[:1].isdigit() for rest in after):
            found += keys
    return found


def _beside_flat(metadata: DcpMetadata, flat: list[str]) -> list[str]:
    """Vectors in one dict with flat parameters: with use_orig_params=True every parameter also has an entry by name,
    one rank's slice, often of size 0 (``ir.tensors.OneSlice``)."""
    sections = {_section(metadata, key) for key in flat}
    return [
        key
        for key, tensor in metadata.tensors.items()
        if flat
        and len(tensor.shape) == 1
        and len(tensor.chunks) == 1
        and not is_flat_key(key)
        and not _STATE.search(key)
        and _section(metadata, key) in sections
    ]


def _section(metadata: DcpMetadata, key: str) -> tuple[object, ...]:
    """The dict that contains ``key``; without planner data this is not known, and all keys count as one dict."""
    paths = metadata.paths
    return paths[key][:-1] if paths is not None and key in paths else ()


def _first_lost(metadata: DcpMetadata, by_id: list[str], world_size: int) -> str | None:
    """The first state by id that is one rank's slice; None when all are whole, or cut by DCP itself.

    They are slices when all of them are vectors in one chunk although several ranks wrote, and the model is not made
    of vectors itself. Where DCP cut the model and no state, any vector is one that has the shape of no tensor of the
    model: only the states of parameters outside of FSDP are whole.
    """
    states = {key: metadata.tensors[key] for key in by_id if metadata.tensors[key].shape}
    vectors = [key for key, tensor in states.items() if len(tensor.shape) == 1 and len(tensor.chunks) == 1]
    if world_size < 2 or not vectors:
        return None
    others = {key: tensor for key, tensor in metadata.tensors.items() if key not in set(by_id)}
    if len(vectors) == len(states):
        model_is_flat = bool(others) and all(len(tensor.shape) < 2 for tensor in others.values())
        has_flat_param = any(map(is_flat_key, metadata.tensors))
        return vectors[0] if has_flat_param or not model_is_flat else None
    if any(len(tensor.chunks) > 1 for tensor in states.values()):
        return None  # DCP cut them: they are not a raw optimizer's, and a vector among them is a state in its own shape
    if not any(len(tensor.chunks) > 1 for tensor in others.values()):
        return None
    cut = {tensor.shape for tensor in others.values() if len(tensor.chunks) > 1}
    uncut = {tensor.shape for tensor in others.values() if len(tensor.chunks) <= 1}
    if any(len(tensor.shape) > 1 and tensor.shape in cut - uncut for tensor in states.values()):
        return None  # it is whole, where FSDP1 would have had slices of it
    whole = cut | uncut
    return next((key for key in vectors if states[key].shape not in whole and states[key].shape != (1,)), None)
