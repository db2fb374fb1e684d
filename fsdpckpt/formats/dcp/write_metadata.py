"""Writes the ``.metadata`` file of a DCP directory.

Pickled under PyTorch's class paths, in the form it has had since torch 2.3. Newer fields are instance attributes that
older readers ignore (``StorageMeta.modules``, ``Metadata.version``), and fields that a newer reader adds have defaults.
``checkpoint_id`` stays None: it would contain a path of this machine and a ``pathlib`` class that moved between Python
versions.

Entries that are cut alike differ only in their names and in the offsets of their items: the rest of their opcodes is
made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Final, Generic, TypeVar

from fsdpckpt.formats.pickle.opcodes import PickleOpcodes, integer
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Int64Array

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # torch.distributed.checkpoint.planner_helpers and metadata: the only version so far
_BATCH = 1000
_NEW = b")\x81}("  # an empty argument tuple, __new__, and the start of the attributes
_BUILD = b"ub"
_Made = TypeVar("_Made")


@dataclass(slots=True, eq=False)
class StoredItems:
    """The common part of the items of all entries that are cut alike, n rows: the box of each in elements, (n, d); the
    number of its file; and its length in bytes.
    """

    start: Final[Int64Array]
    size: Final[Int64Array]
    file: Final[Int64Array]
    nbytes: Final[Int64Array]


@dataclass(slots=True, eq=False)
class DcpEntry:
    """One flat key. ``path``: its nesting, dict keys as text, list indexes as ints.

    ``dtype``: None for BYTES, a value that is not a tensor, which has one item. ``offset``: where each item begins.
    """

    key: Final[str]
    path: Final[tuple[str | int, ...]]
    dtype: Final[DType | None]
    shape: Final[tuple[int, ...]]
    items: Final[StoredItems]
    offset: Final[Int64Array]


def metadata_pickle(entries: Sequence[DcpEntry], files: Sequence[str]) -> bytearray:
    """The whole file for ``entries``, in their order. ``files``: the relative paths to which items refer by number."""
    writer = _Writer(files, Counter(entry.items for entry in entries if entry.dtype is not None))
    raw, text = writer.raw, writer.text
    raw(writer.name(_METADATA, "Metadata") + _NEW)
    raw(text("state_dict_metadata"))
    _dict(writer, map(writer.storage_metadata, entries))
    raw(text("planner_data"))
    _dict(writer, (text(entry.key) + _path(writer, entry.path) for entry in entries))
    raw(text("storage_data"))
    _dict(writer, chain.from_iterable(map(writer.storage_data, entries)))
    raw(text("storage_meta") + writer.name(_METADATA, "StorageMeta") + _NEW)
    for absent in ("checkpoint_id", "save_id", "load_id"):
        raw(text(absent) + b"N")
    raw(text("modules") + b"]" + _BUILD)
    raw(text("version") + text(_VERSION) + _BUILD)
    raw(b".")
    return writer.out


def _dict(writer: PickleOpcodes, pairs: Iterator[bytes]) -> None:
    """A dict from opcodes of keys and values. Each pair is made when it is written, so that memo numbers are in order
    and only one pair is in memory: a tensor in thousands of chunks has 200 KB of opcodes.
    """
    out = writer.out
    out += b"}"
    while (first := next(pairs, None)) is not None:
        out += b"("
        out += first
        for pair in islice(pairs, _BATCH - 1):
            out += pair
        out += b"u"


def _path(writer: PickleOpcodes, path: tuple[str | int, ...]) -> bytes:
    text = writer.text
    body = b"".join([integer(part) if isinstance(part, int) else text(part) for part in path])
    return b"(%bt" % body


class _Reusable(Generic[_Made]):
    """What was made of items, until the last tensor that uses them. On thousands of ranks most tensors have some items
    of their own, because the empty chunk that several ranks hold is written by a different one each time.
    """

    def __init__(self, uses: Counter[StoredItems]) -> None:
        self.left = uses.copy()
        self.made: dict[StoredItems, _Made] = {}

    def take(self, items: StoredItems) -> _Made | None:
        self.left[items] -= 1
        return self.made.get(items) if self.left[items] else self.made.pop(items, None)


class _Writer(PickleOpcodes):
    """``uses``: how many tensors use these items."""

    def __init__(self, files: Sequence[str], uses: Counter[StoredItems]) -> None:
        super().__init__()
        self._files = files
        self._chunks = _Reusable[bytes](uses)
        self._items = _Reusable[list[tuple[bytes, bytes]]](uses)

    def _reused(self, reusable: _Reusable[_Made], items: StoredItems, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes of texts and names: from the second time on these are all memo references."""
        known = reusable.take(items)
        if known is not None:
            return known
        memo = self._memo
        made = make()
        if reusable.left[items]:
            reusable.made[items] = made if self._memo == memo else make()
        return made

    def storage_metadata(self, entry: DcpEntry) -> bytes:
        key, dtype, shape = self.text(entry.key), entry.dtype, entry.shape
        if dtype is None:
            return key + self.name(_METADATA, "BytesStorageMetadata") + b")\x81"
        head = self.constant((dtype.name, shape), partial(self._tensor_head, dtype, shape))
        chunks = self._reused(self._chunks, entry.items, partial(self._chunk_list, entry.items))
        return b"%b%b](%beub" % (key, head, chunks)

    def _tensor_head(self, dtype: DType, shape: tuple[int, ...]) -> bytes:
        """TensorStorageMetadata up to its chunks: strided, no gradient, contiguous format, not pinned."""
        text, name = self.text, self.name
        head = name(_METADATA, "TensorStorageMetadata") + _NEW + text("properties")
        head += name(_METADATA, "TensorProperties") + b")\x81(" + name("torch", dtype.name)
        head += name("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R\x89"
        head += name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R\x89tb"
        return head + text("size") + self.size(shape) + text("chunks")

    def _chunk_list(self, items: StoredItems) -> bytes:
        made = []
        for start, size in zip(items.start.tolist(), items.size.tolist(), strict=True):
            head = self.name(_METADATA, "ChunkStorageMetadata") + _NEW
            head += self.text("offsets") + self.size(start)
            made.append(head + self.text("sizes") + self.size(size) + _BUILD)
        return b"".join(made)

    def storage_data(self, entry: DcpEntry) -> Iterable[bytes]:
        """One MetadataIndex and _StorageInfo for each item. Only the name and the offset differ between entries."""
        items, memo, first = entry.items, self._memo, self._index(entry.key)
        if entry.dtype is None:
            around = self._item_parts(items, tensor=False)
        else:
            around = self._reused(self._items, items, partial(self._item_parts, items, tensor=True))
        names = repeat(first) if memo == self._memo else chain([first], repeat(self._index(entry.key)))
        offsets = map(integer, entry.offset.tolist())
        rows = zip(names, around, offsets, strict=False)
        return [b"%b%b%b%b" % (name, before, offset, after) for name, (before, after), offset in rows]

    def _index(self, key: str) -> bytes:
        return self.name(_METADATA, "MetadataIndex") + _NEW + self.text("fqn") + self.text(key)

    def _item_parts(self, items: StoredItems, *, tensor: bool) -> list[tuple[bytes, bytes]]:
        """The opcodes before and after the offset of each item: its number, its place and its file; its length."""
        made = []
        rows = zip(items.start.tolist(), items.file.tolist(), items.nbytes.tolist(), strict=True)
        for number, (start, file, nbytes) in enumerate(rows):
            if number < 2:  # from the second item on all texts are memo references
                index, place, info, begin, length = self._attributes()
            hint, where = (integer(number), self.size(start)) if tensor else (b"N", b"N")
            before = b"%b%b%b%b%b%b%b" % (index, hint, place, where, info, self.text(self._files[file]), begin)
            made.append((before, length + integer(nbytes) + _BUILD))
        return made

    def _attributes(self) -> tuple[bytes, ...]:
        """The opcodes before the values of one MetadataIndex after its name, and of one _StorageInfo."""
        text = self.text
        return (
            text("index"),
            text("offset"),
            _BUILD + self.name(_FILESYSTEM, "_StorageInfo") + _NEW + text("relative_path"),
            text("offset"),
            text("length"),
        )
