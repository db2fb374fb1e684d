"""Notes what a DCP directory does not keep of dicts, and gives it back.

DCP makes every key of a dict text, and every dict a plain one (``torch.distributed.checkpoint._traverse``). ``lost_in``
lists the dicts that change by it, and ``restored`` makes of what a directory holds what was saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fsdpckpt.ir.values import Json, Key, Value, encode, require_key


class LostDict(NamedTuple):
    """A dict that is another one in a DCP directory. ``path``: of it there, texts and positions in lists.

    ``keys``: those that are no text; ``ordered``: whether it is an OrderedDict.
    """

    path: tuple[str | int, ...]
    keys: tuple[Key, ...]
    ordered: bool

    def to_json(self) -> Json:
        return {"path": list(self.path), "keys": encode(list(self.keys)), "ordered": self.ordered}

    @classmethod
    def from_json(cls, data: Any, decode: Callable[[Json], Any]) -> LostDict:
        """The inverse of ``to_json``. Raises KeyError, TypeError or ValueError for anything else."""
        path, keys = data["path"], decode(data["keys"])
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
            raise TypeError("a path has texts and positions")
        return cls(tuple(path), tuple(map(require_key, keys)), data["ordered"] is True)


def lost_in(value: Value, path: tuple[str | int, ...] = ()) -> Iterator[LostDict]:
    """The dicts in ``value``, a state dict at ``path``, that DCP changes. It stores tuples whole, as they are."""
    if isinstance(value, dict):
        keys = tuple(key for key in value if type(key) is not str)
        ordered = isinstance(value, OrderedDict) and not vars(value)  # attributes are lost, and with them its use
        if keys or ordered:
            yield LostDict(path, keys, ordered)
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from lost_in(item, (*path, str(key)))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from lost_in(item, (*path, number))


def restored(value: Value, lost: Sequence[LostDict]) -> Value:
    """``value``, what a DCP directory holds, with the dicts of which ``lost`` says what they were."""
    if not lost:
        return value
    below: dict[str | int, list[LostDict]] = {}
    for each in lost:
        if each.path:
            below.setdefault(each.path[0], []).append(each._replace(path=each.path[1:]))
    if isinstance(value, list):
        return [restored(item, below.get(number, ())) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    own = next((each for each in lost if not each.path), LostDict((), (), ordered=False))
    names: dict[Key, Key] = {str(key): key for key in own.keys}
    entries: dict[Key, Value] = {}
    for key, item in value.items():
        inner = below.get(key, ()) if isinstance(key, (str, int)) else ()
        entries[names.get(key, key)] = restored(item, inner)
    return OrderedDict(entries) if own.ordered else entries
