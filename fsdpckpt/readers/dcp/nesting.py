"""Put the flat keys of a DCP checkpoint back into the nesting they had, as its planner data says.

``DefaultSavePlanner`` flattens dicts and lists (``_nested_dict.py``, ``_traverse.py``): dict keys became strings, list
positions ints, empty dicts and lists vanished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.dcp.metadata import PathElement
from fsdpckpt.ir.checkpoint import Note, Problem
from fsdpckpt.ir.values import Key, Value

__all__ = ["misnamed", "nest"]


_MOST_POSITIONS = 1 << 20  # of lists whose entries are mostly empty


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
    _require_positions(root, file)
    finished = _finish(root, (), notes)
    return finished if isinstance(finished, dict) else {"": finished}


def misnamed(keys: Collection[str], paths: Mapping[str, tuple[PathElement, ...]] | None) -> list[Problem]:
    """Keys that are not their path joined by dots, and keys that have a path alone or none.

    ``flatten_state_dict`` makes none of these; damage and mixtures do.
    """
    if paths is None:
        return []
    joined = {key: ".".join(map(str, paths[key])) if key in paths else None for key in keys}
    told = {key: _elsewhere(place) for key, place in joined.items() if key != place}
    told |= {key: "holds nothing under that key" for key in paths if key not in joined}
    return [
        Problem("names", f"the metadata calls one entry {key}, and {what}", fatal=False, key=key)
        for key, what in told.items()
    ]


def _elsewhere(place: str | None) -> str:
    return f"says that it lies at {place}" if place is not None else "does not say where in the state dict it lies"


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


def _require_positions(root: _Node, file: str) -> None:
    """Refuse list positions that the entries cannot have: a list is as long as its highest position."""
    nodes, length = [root], 0
    for node in nodes:
        nodes.extend(child for child in node.values() if type(child) is _Node)
        if all(type(key) is int for key in node):
            length += max((key for key in node if isinstance(key, int)), default=0)
        if length > _MOST_POSITIONS + len(nodes):
            raise SourceCorruptError(
                f"{file}: the planner data names list positions beyond {length}",
                file=file,
                expected=f"at most {_MOST_POSITIONS} positions",
                found=str(length),
                why="the metadata was damaged or edited",
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
        shown = str(missing) if len(missing) <= 20 else f"{str(missing[:20])[:-1]}, ...]"
        notes.append(
            Note("empty-entries", f"{dotted}: entries {shown} were empty when saved, DCP keeps no empty dict", dotted)
        )
    return [node.get(index, {}) for index in range(highest + 1)]
