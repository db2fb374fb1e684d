"""Read a DCP directory (``torch.distributed.checkpoint``) into one nested state dict, ranks and files merged.

Order and nesting come from the planner data, chunks from ``.metadata``. With ``locate`` each stored item, a small
``torch.save`` archive of its own, is opened to learn where its elements lie, and to check that it holds what the
metadata says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from dataclasses import replace

from fsdpckpt.ir.checkpoint import UNORDERED, Container, Layout, Note
from fsdpckpt.ir.tensors import ONE_SLICE, Tensor
from fsdpckpt.ir.values import Global, Value
from fsdpckpt.readers.chunks import Box, ChunkedTensor, build_tensors
from fsdpckpt.readers.dcp.directory import DcpDirectory, open_directory
from fsdpckpt.readers.dcp.flat import find_flattened
from fsdpckpt.readers.dcp.items import locate_chunks, read_values
from fsdpckpt.readers.dcp.nesting import misnamed, nest
from fsdpckpt.readers.tree import FileTable, Tree
from fsdpckpt.storage.sources import Sources

__all__ = ["UNREAD", "read_dcp", "settings_of", "share_equal_settings"]

UNREAD = Global("fsdpckpt", "unread")
"""Stands for a pickled value that ``locate=False`` left in its file."""

FEW_VALUES = 1 << 14  # pickled values that are read in any case, at some microseconds each: groups, counters, ...


def read_dcp(directory: str, files: FileTable, sources: Sources, *, locate: bool) -> Tree:
    """The checkpoint in ``directory``.

    With ``locate=False`` no tensor's item is opened but those of param groups: all other chunks have offset -1, and
    pickled values are ``UNREAD`` when there are more than ``FEW_VALUES``. Raises SourceIncompleteError (no metadata,
    files or items missing: all named), SourceCorruptError (contradictions), SourceUnsafeError (unknown globals),
    SourceUnsupportedError (compressed items).
    """
    found = open_directory(directory, sources)
    tree = Tree({}, Layout.FULL, Container.DCP, found.world_size, evidence=found.evidence, notes=found.notes)
    if found.metadata.paths is None:  # only the planner data keep the order
        tree.evidence.append(UNORDERED)
    numbers = {name: files.add(found.file(name), found.nbytes[name]) for name in found.nbytes}
    flattened = find_flattened(found.metadata, directory=directory, world_size=found.world_size)
    if locate:
        chunked = locate_chunks(found, numbers, sources, tree)
        values = read_values(found, numbers, sources, tree)
    else:
        settings = locate_chunks(settings_of(found), numbers, sources, tree)
        located = {tensor.key: tensor for tensor in settings}
        chunked = [located.get(tensor.key, tensor) for tensor in _declared(found, numbers)]
        values = _few_values(found, numbers, sources, tree)
    tensors = build_tensors(chunked, world_size=found.world_size)
    share_equal_settings(tensors, files, sources)
    if any(len(tensor.chunks) > 1 for tensor in tensors.values()):
        tree.layout = Layout.SHARDED
    if flattened.layout is not None:
        tree.layout = flattened.layout
    for key in flattened.beside:
        tensors[key] = replace(tensors[key], managed=None, placement=ONE_SLICE)
    tree.problems.extend(flattened.problems)
    tree.problems.extend(misnamed(found.metadata.order, found.metadata.paths))
    tree.notes.extend(flattened.notes)
    leaves: Iterator[tuple[str, Value]] = (
        (key, tensors[key] if key in tensors else values[key]) for key in found.metadata.order
    )
    tree.root = nest(leaves, found.metadata.paths, file=directory, notes=tree.notes)
    return tree


def _few_values(found: DcpDirectory, numbers: dict[str, int], sources: Sources, tree: Tree) -> dict[str, Value]:
    items = found.metadata.items
    if len(items) <= FEW_VALUES:
        return read_values(found, numbers, sources, tree)
    tree.notes.append(Note("unread", f"{len(items)} values that are no tensors were not read"))
    return dict.fromkeys(items, UNREAD)


def _declared(found: DcpDirectory, numbers: dict[str, int]) -> Iterator[ChunkedTensor]:
    """The chunks as the metadata declares them."""
    for key, tensor in found.metadata.tensors.items():
        boxes = [
            Box(
                found.ranks[stored.relative_path],
                numbers[stored.relative_path],
                -1,
                start,
                size,
                item=(stored.offset, stored.length),
            )
            for start, size, stored in tensor.chunks
        ]
        yield ChunkedTensor(key, tensor.dtype, tensor.shape, boxes)


SMALL = 64  # bytes: a setting is one number or a few; anything larger is data and not looked at


def _is_setting(key: str) -> bool:
    """Whether ``key`` is ``<optimizer>.param_groups.<fqn>.<name>``; with a group's number it is the nested form."""
    _, found, rest = f".{key}".partition(".param_groups.")
    return bool(found) and not re.fullmatch(r"\d+\.[^.]+", rest)


def settings_of(found: DcpDirectory) -> DcpDirectory:
    """The same directory with only the small tensors of param groups in it."""
    tensors = {
        key: tensor
        for key, tensor in found.metadata.tensors.items()
        if _is_setting(key) and len(tensor.shape) == 0 and tensor.dtype.itemsize <= SMALL
    }
    return replace(found, metadata=replace(found.metadata, tensors=tensors, items={}))


def share_equal_settings(tensors: MutableMapping[str, Tensor], files: FileTable, sources: Sources) -> None:
    """Make settings with the same dtype and bytes one object: so ``optimizers`` sees which parameters agree."""
    paths = [file.path for file in files.files()]
    seen: dict[tuple[str, bytes], Tensor] = {}
    for key, tensor in tensors.items():
        if _is_setting(key) and tensor.shape == () and len(tensor.chunks):
            source = sources.open(paths[int(tensor.chunks.file[0])])
            content = source.read(int(tensor.chunks.offset[0]), tensor.nbytes)
            tensors[key] = seen.setdefault((tensor.dtype.name, content), tensor)
