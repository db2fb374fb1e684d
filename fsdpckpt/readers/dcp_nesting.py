"""Put the flat keys of a DCP checkpoint back into the nesting they had, as its planner data says.

``DefaultSavePlanner`` flattens dicts and lists (``_nested_dict.py``, ``_traverse.py``): dict keys became strings, list
positions ints, empty dicts and lists vanished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdpckpt.containers.dcp_metadata import PathElement
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.values import Key, Value

__all__ = ["nest"]


class _Node(dict[PathElement, Value]):
    """A container being filled; a plain dict below it is a stored value."""


def nest(
    leaves: Iterable[tuple[str, Value]],
    paths: Mapping[str, tuple[PathElement, ...]] | None,
    *,
    file: str,
    notes: list[Note],
) -> dict[Key, Value]:
    """The state dict of ``leaves`` (flat key, value). Without ``paths`` it stays flat.

    Raises SourceCorruptError when one path runs through another one's value.
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
    finished = _finish(root, (), notes)
    return finished if isinstance(finished, dict) else {"": finished}


def _descend(root: _Node, path: tuple[PathElement, ...], key: str, file: str) -> _Node:
    node = root
    for element in path:
        child: object = node.get(element)
        if child is None and element not in node:
            node[element] = child = _Node()  # type: ignore[assignment]  # until _finish makes it a dict or a list
        if not isinstance(child, _Node):
            raise _clash(key, file)
        node = child
    return node


def _clash(key: str, file: str) -> SourceCorruptError:
    return SourceCorruptError(
        f"{file}: the nesting of {key} runs through another entry",
        file=file,
        key=key,
        why="the planner data of the metadata does not fit its keys",
    )


def _finish(node: _Node, path: tuple[PathElement, ...], notes: list[Note]) -> Value:
    """Plain dicts and lists. A node with int keys was a list."""
    for key, child in node.items():
        if type(child) is _Node:
            node[key] = _finish(child, (*path, key), notes)
    if not node or not all(type(key) is int for key in node):
        return {key: value for key, value in node.items()}  # noqa: C416 (a dict of wider types)
    highest = max(key for key in node if isinstance(key, int))
    missing = [index for index in range(highest + 1) if index not in node]
    if missing:
        dotted = ".".join(map(str, path))
        notes.append(
            Note("empty-entries", f"{dotted}: entries {missing} were empty when saved, DCP keeps no empty dict", dotted)
        )
    return [node.get(index, {}) for index in range(highest + 1)]
