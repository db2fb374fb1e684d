"""Reads a ``torch.save`` archive as values: the pickle's tree with its tensors located in the file.

Nothing is loaded or run. One pass over the unpickled tree makes its leaves, parses its distributed tensors, and refuses
what cannot be converted, listing every key. ``load_torch`` reads a whole torch file, or one item of a DCP file; for the
tensor items of a DCP file, one for each shard of each tensor, ``dcp.items`` is faster.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.errors import COPY_AGAIN, SourceUnrecognisedError, SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle import StubInstance, as_object, load
from fsdpckpt.formats.pickle.check import MAX_DEPTH, check_expansion, check_size, too_deep
from fsdpckpt.formats.torch.distributed import Distributed, DistributedBlocks, DistributedParser
from fsdpckpt.formats.torch.loadable import array_object, decode_stand_in, is_stand_in
from fsdpckpt.formats.torch.tensors import Refused, StoredTensor, TensorBuilder, Wrapped
from fsdpckpt.formats.torch.torchao import StoredBlocks
from fsdpckpt.formats.zip import SERIALIZATION_ID, ZipDirectory, ZipRecord, read_directory
from fsdpckpt.ir.checkpoint import Checksums, Note
from fsdpckpt.ir.quantized import split_state
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text, plural, some_of, truncate

_PLAIN: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes, complex, bytearray, Global, Distributed})


class _TreeWalk:
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
            items = [item for key, value in mapping.items() for item in split_states.get(key, {key: value}).items()]
            mapping.clear()
            mapping.update(items)
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
        leaves = {name: self._stored(part) if isinstance(part, StoredTensor) else part for name, part in parts.items()}
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


# Records of an archive that hold no tensor. Nothing else ever reads some of them, so that damage to them would be found
# by `verify` alone: whoever opens the archive compares their checksums.
_DESCRIPTIONS = ("byteorder", "version", ".format_version", ".storage_alignment", SERIALIZATION_ID)
_LARGEST_DESCRIPTION = 4096  # bytes; torch's have at most 40
_BLOCK = 1 << 20  # bytes of a record that are read at a time

ChecksumRow: TypeAlias = tuple[int, int, int, int]  # file, offset, nbytes, crc


@dataclass(frozen=True, slots=True)
class OpenedArchive:
    """One archive of which only the pickle's bytes were read: ``pickle``. ``source``: the file that contains it."""

    source: ByteSource
    records: ZipDirectory
    pickle: bytes

    def checksums(self, file_id: int) -> Checksums:
        """The CRC-32 of every record; empty if it was saved with ``set_crc32_options(False)``, which leaves all 0."""
        records = self.records
        if not records.crc.any():
            return Checksums.of([])
        return Checksums(np.full(len(records), file_id, np.int64), records.offset, records.nbytes, records.crc)


class ComparedRecords(ByteSource):
    """A file, for bytes that become part of a value and that nobody reads again: a mesh, a NumPy array. The record in
    which they are must have its checksum, if there are ``checksums``.
    """

    def __init__(self, source: ByteSource, checksums: Checksums) -> None:
        self.path, self.nbytes = source.path, source.nbytes
        self._source = source
        order = np.argsort(checksums.offset, kind="stable")
        self._records = np.stack([checksums.offset, checksums.nbytes, checksums.crc])[:, order]
        self._compared: set[int] = set()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        number = int(self._records[0].searchsorted(offset, side="right")) - 1
        if number >= 0 and number not in self._compared:
            self._compare(*self._records[:, number].tolist())
            self._compared.add(number)
        self._source.read_into(offset, buffer)

    def _compare(self, offset: int, nbytes: int, stored: int) -> None:
        crc = 0
        for at in range(0, nbytes, _BLOCK):
            crc = zlib.crc32(self._source.read(offset + at, min(_BLOCK, nbytes - at)), crc)
        _require_checksum(self.path, f"{bytes_text(nbytes)} at offset {offset:,}", stored, crc)


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """The content of one archive. ``root``'s leaves are ``StoredTensor`` (or what ``leaf`` made of them),
    ``Distributed`` or ir values. ``path``: of the file; ``dropped``: the Python attributes of its tensors, which are
    left out; ``defaultdicts``: the keys of those that became plain dicts. ``ranks``: the ranks that saved its
    distributed tensors, ``worlds``: all ranks, both according to these tensors; ``forms``: ``DTensor``,
    ``ShardedTensor``; ``devices``: the device types of DTensors' meshes. All empty if it holds none.
    """

    root: Value
    checksums: Checksums
    path: str
    dropped: frozenset[str]
    defaultdicts: frozenset[str]
    ranks: frozenset[int]
    worlds: tuple[tuple[int, ...], ...]
    forms: frozenset[str]
    devices: frozenset[str]


def notes_on_dropped(archives: Iterable[TorchArchive]) -> list[Note]:
    """Notes on Python attributes of tensors, and on defaultdicts: one for all files with the same."""
    paths: dict[tuple[bool, frozenset[str]], list[str]] = {}
    for archive in archives:
        paths.setdefault((False, archive.dropped), []).append(archive.path)
        paths.setdefault((True, archive.defaultdicts), []).append(archive.path)
    notes = []
    for (defaultdicts, names), files in paths.items():
        where = files[0] if len(files) == 1 else f"{files[0]} and {plural(len(files) - 1, 'more file')}"
        if defaultdicts:
            notes += notes_on_defaultdicts(where, names)
        elif names:
            message = f"Python attributes of tensors in {where} are left out: {', '.join(sorted(names))}"
            notes.append(Note("dropped", message))
    return notes


def notes_on_defaultdicts(where: str, keys: Iterable[str]) -> list[Note]:
    """A note on the defaultdicts at ``keys`` that became plain dicts, if there are any."""
    ordered = sorted(keys)
    message = f"defaultdicts in {where} become plain dicts: {some_of(ordered, 6)}"
    return [Note("dropped", message, keys=tuple(ordered))] if ordered else []


def checksums_of(source: ByteSource, file_id: int) -> Checksums:
    """The CRC-32 of every record of the torch file ``source``, none for another zip. Compares nothing.

    Raises what ``zip.read_directory`` raises.
    """
    records = read_directory(source)
    return OpenedArchive(source, records, b"").checksums(file_id) if "data.pkl" in records else Checksums.of([])


def load_torch(
    source: ByteSource, file_id: int, *, begin: int = 0, end: int | None = None, rank: int = 0
) -> tuple[Value, list[ChecksumRow], frozenset[str]]:
    """The value in the torch archive at bytes [begin, end), its tensors as ir ``Tensor`` with one chunk in file
    ``file_id`` held by ``rank``, its checksum rows, and the keys of its defaultdicts, which are plain dicts now.
    DTensor and ShardedTensor leaves are ``Distributed``.

    Raises what ``read_archive`` raises.
    """
    opened = open_archive(source, begin=begin, end=end)
    archive = parse_archive(opened, file_id, lambda stored: local_tensor(stored, file_id, rank))
    sums = archive.checksums
    columns = (sums.file.tolist(), sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist())
    return archive.root, list(zip(*columns, strict=True)), archive.defaultdicts


def local_tensor(stored: StoredTensor, file_id: int, rank: int = 0, *, offset: int | None = None) -> Tensor:
    """The ir tensor that is whole in one file, at its own offset or at another one."""
    at = stored.offset if offset is None else offset
    chunks = Chunks.whole(file=file_id, offset=at, shape=stored.shape, stride=stored.stride, rank=rank)
    return Tensor(stored.dtype, stored.shape, chunks, stored.sharded)


def read_archive(source: ByteSource, file_id: int) -> TorchArchive:
    """Read the torch file ``source``. Raises what ``open_archive`` and ``parse_archive`` raise."""
    return parse_archive(open_archive(source), file_id)


def open_archive(source: ByteSource, *, begin: int = 0, end: int | None = None) -> OpenedArchive:
    """Open the torch archive at bytes [begin, end) of ``source``.

    Raises SourceUnrecognisedError (a zip of something else), SourceUnsupportedError (big-endian) and
    SourceCorruptError.
    """
    records = read_directory(source, begin=begin, end=end)
    if "data.pkl" not in records or "constants.pkl" in records:
        raise SourceUnrecognisedError(
            f"{source.path} is a zip file, but not one that torch.save writes",
            file=source.path,
            expected="a record data.pkl and no constants.pkl",
            found=", ".join(sorted(records)[:8]) or "an empty zip",
            why="it may be a TorchScript module, or an archive that holds a checkpoint",
            next_step="give the checkpoint itself: unpack the archive, or torch.save(module.state_dict(), new_path)",
        )
    has_checksums = bool(records.crc.any())
    for name in _DESCRIPTIONS if has_checksums else ():
        if name in records and records[name].nbytes <= _LARGEST_DESCRIPTION:
            read_record(source, records[name], verify_checksum=True)
    if "byteorder" in records:
        check_byteorder(source, records["byteorder"])
    return OpenedArchive(source, records, read_pickle(source, records["data.pkl"], verify_checksum=has_checksums))


def parse_archive(
    opened: OpenedArchive,
    file_id: int,
    leaf: Callable[[StoredTensor], object] = lambda stored: stored,
    builder: TensorBuilder | None = None,
    parser: DistributedParser | None = None,
) -> TorchArchive:
    """Parse the archive; ``leaf`` makes the leaves from stored tensors. ``builder``: replaces that of its records, and
    may make ir tensors; ``parser``: replaces that of its distributed tensors.

    Raises SourceUnsupportedError (lists the keys of all values that are not strided tensors), SourceUnsafeError and
    SourceCorruptError.
    """
    source = ComparedRecords(opened.source, opened.checksums(file_id))
    if builder is None:
        builder = TensorBuilder(opened.records, source.path)
    walk = _TreeWalk(source, builder, leaf, parser or DistributedParser(source))
    root = walk.value(load(opened.pickle, file=source.path, tensors=builder))
    walk.finish()
    check_expansion(root, source.path)
    return TorchArchive(
        root,
        opened.checksums(file_id),
        source.path,
        frozenset(builder.dropped),
        frozenset(walk.defaultdicts),
        frozenset(walk.ranks),
        tuple(walk.worlds.values()),
        frozenset(walk.forms),
        frozenset(walk.devices),
    )


def read_pickle(source: ByteSource, record: ZipRecord, *, verify_checksum: bool) -> bytes:
    """The bytes of the record, which is a pickle.

    ``verify_checksum``: the archive has checksums, which torch.load does not check. Raises SourceCorruptError if that
    of the record is wrong.
    """
    check_size(record.nbytes, source.path)
    return read_record(source, record, verify_checksum=verify_checksum)


def read_record(source: ByteSource, record: ZipRecord, *, verify_checksum: bool) -> bytes:
    """All bytes of the record. Raises as ``read_pickle``."""
    data = source.read(record.offset, record.nbytes)
    if verify_checksum:
        _require_checksum(source.path, record.name, record.crc, zlib.crc32(data))
    return data


def _require_checksum(path: str, name: str, stored: int, computed: int) -> None:
    if computed != stored:
        what, why = f"the checksum of {name} is wrong", "bytes of the file were changed after it was saved"
        raise damaged(path, what, f"{stored:#010x}", f"{computed:#010x}", why=why, next_step=COPY_AGAIN, run_again=True)


def check_byteorder(source: ByteSource, record: ZipRecord) -> None:
    order = source.read(record.offset, min(record.nbytes, 16))
    if order != b"little":
        raise SourceUnsupportedError(
            f"{source.path} was written on a big-endian machine",
            file=source.path,
            expected="byteorder little",
            found=repr(order),
            next_step="in Python, on any machine: torch.save(torch.load(path), new_path)",
        )
