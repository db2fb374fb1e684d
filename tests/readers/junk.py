"""Checkpoints in whose files one value after the other is replaced or lost: they are read or refused, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from fsdpckpt.errors import FsdpckptError
from tests.readers.contents import opened

__all__ = ["refusals", "save"]

_JUNK = (None, -1, 1 << 70, "x", [], {}, (), [None], {0: {}}, torch.zeros(3), torch.zeros(2, 2), [torch.zeros(0)])
_LOST = object()


def save(files: dict[str, Any], directory: Path) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / name)


def refusals(files: dict[str, Any], directory: Path, *, seed: int, below: Sequence[tuple[Any, ...]] = ((),)) -> int:
    """How many of the changed checkpoints are refused; the others are read. ``files``: names and plain values, of which
    those at and ``below`` these keys change."""
    save(files, directory)
    assert opened(directory).model is not None, "nothing else is refused"
    random, count = Random(seed), 0
    for name, content in files.items():
        for changed in (*_JUNK, *_changed(content, random, below)):
            torch.save(changed, directory / name)
            count += _refused(directory)
        torch.save(content, directory / name)
    return count


def _changed(content: Any, random: Random, below: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    places = _places(content) if isinstance(content, dict) else ()
    for path in (place for place in places if any(place[: len(keys)] == keys for keys in below)):
        for junk in (random.choice(_JUNK), None, _LOST):
            changed = inner = copy.deepcopy(content)
            for key in path[:-1]:
                inner = inner[key]
            if junk is _LOST:
                del inner[path[-1]]
            else:
                inner[path[-1]] = junk
            yield changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from _places(child, (*path, key))


def _refused(directory: Path) -> bool:
    try:
        opened(directory)
    except FsdpckptError as error:
        assert error.exit_code in (3, 4)
        return True
    return False
