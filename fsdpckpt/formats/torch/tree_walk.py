"""Makes the leaves of an unpickled tree: one pass locates its tensors, parses its distributed tensors, and refuses what
cannot be converted, listing every key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import cast

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.pickle import StubInstance, as_object
from fsdpckpt.formats.pickle.check import MAX_DEPTH, check_size, too_deep
from fsdpckpt.formats.torch.distributed import Distributed, DistributedBlocks, DistributedParser
from fsdpckpt.formats.torch.loadable import array_object, decode_stand_in, is_stand_in
from fsdpckpt.formats.torch.tensors import Refused, StoredTensor, TensorBuilder, Wrapped
from fsdpckpt.formats.torch.torchao import StoredBlocks
from fsdpckpt.ir.quantized import split_state
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import plural, truncate

_PLAIN: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes, complex, bytearray, Global, Distributed})


class TreeWalk:
    """One pass over an unpickled tree, in place: makes the leaves, and collects what cannot be converted with
    its key.
    """

    def __init__(
        self,
        source: ByteSource,
        builder: TensorBuilder,
        leaf: Callable[[StoredTensor], object],
        parser: DistributedParser,
    ) -> None:
        self._source, self._builder, self._leaf, self._parser = source, builder, leaf, parser
        self._path: list[Key] = []
        self._seen: set[int] = set()
        # By the id of a value: the value, kept alive so that its id stays unique, and what replaces it.
        self._replaced: dict[int, tuple[object, Value]] = {}
        self._refused: list[str] = []
        self._enclosing_class: str | None = None
        self.defaultdicts: set[str] = set()
        self.ranks: set[int] = set()
        self.worlds: dict[int, tuple[int, ...]] = {}
        self.forms: set[str] = set()
        self.devices: set[str] = set()

    def value(self, value: object) -> Value:
        """The ir value of ``value``; containers are changed in place."""
        kind: type = type(value)
        if kind in _PLAIN or (kind is Tensor and self._enclosing_class is None):  # a tensor that was made in bulk
            return cast(Value, value)
        if kind is StoredTensor:
            return self._stored(cast(StoredTensor, value))
        if kind is dict or kind is OrderedDict:
            return self._mapping(cast("dict[Key, Value]", value))
        if kind is list:
            return self._list(cast("list[Value]", value))
        if kind is tuple:
            return self._tuple(cast("tuple[Value, ...]", value))
        return self._other(value)

    def _enter(self, key: Key) -> None:
        self._path.append(key)
        if len(self._path) > MAX_DEPTH:
            raise too_deep(self._source.path, key=self._key()[:200])

    def _mapping(self, mapping: dict[Key, Value]) -> Value:
        if id(mapping) in self._seen:
            return self._replaced.get(id(mapping), (None, cast(Value, mapping)))[1]
        self._seen.add(id(mapping))
        tensors: list[tuple[Key, StoredTensor]] = []
        split_states: dict[Key, dict[Key, Value]] = {}
        for key, value in mapping.items():
            kind: type = type(value)
            if type(key) is not str:
                self._check_key(key)
            if kind is StoredTensor:
                if self._builder.any_cloned:
                    tensors.append((key, cast(StoredTensor, value)))
                else:
                    self._path.append(key)
                    mapping[key] = self._stored(cast(StoredTensor, value))
                    self._path.pop()
            elif kind not in _PLAIN and (kind is not Tensor or self._enclosing_class is not None):
                self._enter(key)
                parsed = self._wrapped(value) if isinstance(value, Wrapped) else self.value(value)
                if isinstance(parsed, DistributedBlocks | StoredBlocks):
                    split_states[key] = self._parts(key, parsed)
                else:
                    mapping[key] = parsed
                self._path.pop()
        if split_states:
            _put_in_place(mapping, split_states)
        if tensors:
            self._full_state_dict(mapping, tensors)
        if is_stand_in(mapping):
            self._replaced[id(mapping)] = mapping, decode_stand_in(mapping, self._source.path)
            return self._replaced[id(mapping)][1]
        return mapping

    def _check_key(self, key: object) -> None:
        """Refuse keys with tensors in them, and what no key of the IR is. Keys are never changed."""
        if isinstance(key, Object):
            self._object(key)
        elif isinstance(key, tuple):
            for item in key:
                self._check_key(item)
        elif not isinstance(key, (str, int, float, bytes, complex, Global, type(None))):
            self._refuse(f"a {'tensor' if isinstance(key, (StoredTensor, Wrapped)) else type(key).__name__} in a key")

    def _full_state_dict(self, mapping: dict[Key, Value], tensors: list[tuple[Key, StoredTensor]]) -> None:
        """FSDP1 marks the parameters of a full model state dict; its other tensors are buffers, whole on every rank."""
        if any(stored.cloned for _, stored in tensors):
            for _, stored in tensors:
                if not stored.cloned and stored.sharded is None:
                    stored.sharded = False
        for key, stored in tensors:
            mapping[key] = self._stored(stored)

    def _list(self, items: list[Value]) -> Value:
        if id(items) in self._seen:
            return items
        self._seen.add(id(items))
        for index, item in enumerate(items):
            if type(item) not in _PLAIN:
                self._enter(index)
                items[index] = self.value(item)
                self._path.pop()
        return items

    def _tuple(self, items: tuple[Value, ...]) -> Value:
        if all(type(item) in _PLAIN for item in items):
            return items
        known = self._replaced.get(id(items))
        if known is None:
            values = []
            for index, item in enumerate(items):
                self._enter(index)
                values.append(self.value(item))
                self._path.pop()
            known = self._replaced[id(items)] = items, tuple(values)
        return known[1]

    def _stored(self, stored: StoredTensor) -> Value:
        if self._enclosing_class is not None:
            return self._refuse(f"a tensor inside a {self._enclosing_class}")
        if stored.array:
            return self._array(stored)
        if stored.sharded is None and not stored.shape:
            stored.sharded = False
        return cast(Value, self._leaf(stored))

    def _array(self, stored: StoredTensor) -> Value:
        known = self._replaced.get(id(stored))
        if known is not None:
            return known[1]
        nbytes = prod(stored.shape) * stored.dtype.itemsize
        if stored.stride != contiguous_stride(stored.shape):
            return self._refuse("a NumPy array whose elements were put into another order")
        check_size(nbytes, self._source.path)
        array = array_object(stored.array, self._source.read(stored.offset, nbytes), self._source.path)
        self._replaced[id(stored)] = stored, array
        return array

    def _other(self, value: object) -> Value:
        if isinstance(value, Wrapped):
            parsed = self._wrapped(value)
            if isinstance(parsed, DistributedBlocks | StoredBlocks):
                return self._refuse(f"{parsed.blocks}, outside of a dict")
            return cast(Value, parsed)
        if isinstance(value, StubInstance):
            value = as_object(value)
        if isinstance(value, Object):
            return self._object(value)
        if isinstance(value, frozenset):
            items = cast("list[Value]", sorted(value, key=_set_order))
            return self._object(Object(Global("builtins", "frozenset"), (items,)))
        if isinstance(value, set):
            return self._set(cast("set[Key]", value))
        return self._refuse_kind(value)

    def _set(self, items: set[Key]) -> Value:
        if id(items) in self._seen:
            return items
        self._seen.add(id(items))
        outer, self._enclosing_class = self._enclosing_class, "set"
        parsed = [self.value(item) for item in items]
        self._enclosing_class = outer
        items.clear()
        items.update(cast("list[Key]", parsed))
        return items

    def _wrapped(self, value: Wrapped) -> Distributed | DistributedBlocks | StoredBlocks | None:
        if self._enclosing_class is not None:
            self._refuse(f"a tensor inside a {self._enclosing_class}")
            return None
        parsed = self._parser.parse(value, self._key())
        for part in parsed.parts.values() if isinstance(parsed, DistributedBlocks) else [parsed]:
            if isinstance(part, Distributed):
                self._note(part)
        return parsed

    def _parts(self, key: Key, state: DistributedBlocks | StoredBlocks) -> dict[Key, Value]:
        """The entries for ``state`` under the name ``key``."""
        parts = state.whole() if isinstance(state, StoredBlocks) else state.parts
        leaves: dict[str, object] = {}
        for name, part in parts.items():
            leaves[name] = self._stored(part) if isinstance(part, StoredTensor) else part
        return cast("dict[Key, Value]", split_state(key, state.blocks, leaves))

    def _note(self, distributed: Distributed) -> None:
        if distributed.rank is not None:
            self.ranks.add(distributed.rank)
        # One object for all tensors of a mesh, so its id stands for it: hashing so many ranks would be slow.
        self.worlds[id(distributed.world)] = distributed.world
        self.forms.add(distributed.form)
        if distributed.device:
            self.devices.add(distributed.device)

    def _refuse_kind(self, value: object) -> Value:
        if isinstance(value, Refused):
            return self._refuse(value.what)
        named = getattr(value, "function", None) if isinstance(value, type) else None
        if isinstance(named, Global):  # a class as a value, not as a constructor
            return named
        return self._refuse("a bare storage" if type(value).__name__ == "_Storage" else f"a {type(value).__name__}")

    def _object(self, value: Object) -> Value:
        """A record: unchanged if it holds no tensor; a ``defaultdict`` becomes a plain dict."""
        if value.function.name == "defaultdict":
            known = self._replaced.get(id(value))
            if known is None:
                known = self._replaced[id(value)] = value, dict(value.entries)
                self.defaultdicts.add(self._key())
            return self._mapping(cast("dict[Key, Value]", known[1]))
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        outer, self._enclosing_class = self._enclosing_class, str(value.function)
        self._enter(value.function.name)
        value.args = cast("tuple[Value, ...]", self.value(value.args))
        if value.has_state:
            value.state = self.value(value.state)
        if value.items:
            self.value(value.items)
        if value.entries:
            value.entries = cast("list[tuple[Key, Value]]", self.value(value.entries))
        self._path.pop()
        self._enclosing_class = outer
        return value

    def _refuse(self, what: str) -> Value:
        """Record that the value at the current path cannot be converted; None replaces it until ``finish``."""
        self._refused.append(f"{self._key() or 'the whole file'}: {what}")
        return None

    def _key(self) -> str:
        return ".".join(map(str, self._path))

    def finish(self) -> None:
        """Raises SourceUnsupportedError that lists everything that was refused."""
        if self._refused:
            raise SourceUnsupportedError(
                f"{self._source.path} holds {plural(len(self._refused), 'value')} that fsdpckpt does not convert",
                details=self._refused,
                file=self._source.path,
                key=self._refused[0].partition(":")[0],
                why="only strided tensors (and DTensor and ShardedTensor of them) have bytes that can be moved",
                next_step="leave these keys out when saving, or save them as plain tensors",
            )


def _set_order(item: object) -> str:
    """The sort key for the items of a set: ``repr`` of scalars."""
    return repr(item) if isinstance(item, (str, int, float, bytes)) else truncate(item)


def _put_in_place(mapping: dict[Key, Value], split_states: dict[Key, dict[Key, Value]]) -> None:
    """Put the entries of each split state where the state was, among the others."""
    items: list[tuple[Key, Value]] = []
    for key, value in mapping.items():
        items += split_states.get(key, {key: value}).items()
    mapping.clear()
    mapping.update(items)
