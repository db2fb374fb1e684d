"""The records of a ``.metadata`` file: tensors, their chunks, and the items that are stored for them.

Every save describes chunks and items by the million, so they are scanned (``formats.pickle.records``) rather than
loaded. A tensor is one record with its list of chunks, because most tensors are described by the same bytes. What a
form of records means is taken from its example, which the checked loader makes (``MetadataRuns``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.dcp.plans import Plans
from fsdpckpt.formats.pickle import StubInstance, instance_class
from fsdpckpt.formats.pickle.allowlist import STORAGE_MODULES
from fsdpckpt.formats.pickle.operands import Columns, NotScannedError
from fsdpckpt.formats.pickle.patterns import GET, MEMOIZED, NEW
from fsdpckpt.formats.pickle.records import (
    Example,
    Record,
    RecordRun,
    Scan,
    ScanResolver,
    list_of,
    number,
    number_or_none,
    same,
    sizes,
    text,
)
from fsdpckpt.formats.pickle.scanner import Scanner
from fsdpckpt.storage import ByteSource

_METADATA = "torch.distributed.checkpoint.metadata"
_NEW = GET + NEW + MEMOIZED + rb"\}" + MEMOIZED + rb"\("  # an instance, its attributes, and a mark before them
_ATTRIBUTE = GET
_SIZE_CALLED = rb"\x85" + MEMOIZED + rb"R" + MEMOIZED  # torch.Size, whose name is before the tuple
# A dtype, a layout, whether it needs a gradient, a memory format, whether it is pinned: names and calls of names.
_PROPERTIES = rb"\((?:" + GET + rb"|[\x88\x89]|K.|[\x85R]" + MEMOIZED + rb")++t" + MEMOIZED + rb"b"

CHUNK = Record(
    "chunk",
    (
        same(_NEW, _ATTRIBUTE, GET),
        sizes("start"),
        same(_SIZE_CALLED, _ATTRIBUTE, GET),
        sizes("size"),
        same(_SIZE_CALLED),
    ),
    b"ub",
)
ITEM = Record(
    "item",
    (
        same(_NEW, _ATTRIBUTE),
        text("name"),
        same(_ATTRIBUTE),
        number_or_none("index"),
        same(_ATTRIBUTE, GET),
        sizes("start"),
        same(_SIZE_CALLED, rb"ub", _NEW, _ATTRIBUTE),
        text("path"),
        same(_ATTRIBUTE),
        number("offset"),
        same(_ATTRIBUTE),
        number("length"),
    ),
    b"ub",
    values=2,
    added=b"u",
)
TENSOR = Record(
    "tensor",
    (
        same(_NEW, _ATTRIBUTE, GET, NEW, MEMOIZED, _PROPERTIES, _ATTRIBUTE, GET),
        sizes("shape"),
        same(_SIZE_CALLED, _ATTRIBUTE, rb"\]", MEMOIZED),
        list_of(CHUNK),
    ),
    b"ub",
    inner=CHUNK,
)

_BLOCK = 4 << 20  # bytes scanned at a time: the results take several times as much memory
_ROOM = 4096  # bytes at the end of a block in which no opcode or record begins that might not end there
_NUMBERED = (b"\x80\x02", b"\x80\x03")  # protocols that write memo numbers, and have no frames
_COUNTED = (b"\x80\x04", b"\x80\x05")
_FRAME = 0x95
_CHUNKS = (instance_class(_METADATA, "ChunkStorageMetadata"),)
_TENSORS = (instance_class(_METADATA, "TensorStorageMetadata"),)
_INDEXES = (instance_class(_METADATA, "MetadataIndex"),)
_INFOS = tuple(instance_class(module, "_StorageInfo") for module in STORAGE_MODULES)


@dataclass(frozen=True, slots=True, eq=False)
class ScannedTensor:
    """Takes the place of a tensor: its number among those with other bytes, its ``TensorProperties`` and shape, and its
    chunks, which are rows of the columns.
    """

    number: int
    properties: object
    shape: tuple[int, ...]
    chunks: RecordRun

    def __setstate__(self, _state: object) -> None:
        raise TypeError("what stands for a tensor has no state")


def scan_metadata(source: ByteSource, *, block: int = _BLOCK, room: int = _ROOM) -> Scan:
    """Scan a ``.metadata`` file. Raises NotScannedError if it is not the pickle of a save, or of another protocol."""
    protocol = source.read(0, min(2, source.nbytes))
    if protocol not in _NUMBERED + _COUNTED:
        raise NotScannedError("another protocol")
    scanner = Scanner((TENSOR, CHUNK, ITEM), numbered=protocol in _NUMBERED, skipped=Plans())
    rest, ends = b"", [0]
    for opcodes, frames in _unframed(source, block):
        data = rest + opcodes
        ends += [end + len(rest) for end in frames]
        at = scanner.read(data, len(data) - room, ends)
        rest, ends = data[at:], [end - at for end in ends if end > at]
    at = scanner.read(rest, len(rest), ends)
    if at < len(rest):
        raise NotScannedError("bytes after the end")
    return scanner.finish(protocol)


def _unframed(source: ByteSource, block: int) -> Iterator[tuple[bytes, list[int]]]:
    """The opcodes of a pickle without its frames, in parts of about ``block`` bytes, and where frames end in each."""
    if source.nbytes > 2 and source.read(2, 1)[0] != _FRAME:
        for at in range(2, source.nbytes, block):
            yield source.read(at, min(block, source.nbytes - at)), []
        return
    at, data, begin = 2, b"", 0
    parts: list[bytes] = []
    ends: list[int] = []
    held = 0
    while at < source.nbytes:
        if at + 9 > begin + len(data):
            data, begin = source.read(at, min(block, source.nbytes - at)), at
        inner = at - begin
        nbytes = int.from_bytes(data[inner + 1 : inner + 9], "little")
        if data[inner] != _FRAME or nbytes > min(block - 9, source.nbytes - at - 9):
            raise NotScannedError("bytes in no frame, or in a large one")
        if inner + 9 + nbytes > len(data):
            data, begin, inner = source.read(at, min(block, source.nbytes - at)), at, 0
        parts.append(data[inner + 9 : inner + 9 + nbytes])
        held += nbytes
        ends.append(held)
        at += 9 + nbytes
        if held >= block:
            yield b"".join(parts), ends
            parts, ends, held = [], [], 0
    yield b"".join(parts), ends


class MetadataRuns:
    """Resolves the persistent ids of a scanned ``.metadata``: to a ``RecordRun`` of chunks or items, or to a
    ``ScannedTensor``.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._resolver = ScanResolver(scan, self._compare)
        self._properties: dict[int, object] = {}  # of tensors, by form
        self._entries: dict[int, ScannedTensor] = {}  # by holder: most tensors are described by the same bytes
        self.finish = self._resolver.finish

    def storage(self, persistent_id: object) -> RecordRun | ScannedTensor:
        run = self._resolver.run(persistent_id)
        if run.holder < 0:
            return run
        entry = self._entries.get(run.holder)
        if entry is None:
            holder = self._scan.holders[run.holder]
            shape = cast("tuple[int, ...]", holder.row["shape"])
            entry = self._entries[run.holder] = ScannedTensor(run.holder, self._properties[holder.form], shape, run)
        return entry

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> NoReturn:
        raise pickle.UnpicklingError(f"unexpected tensor: {function}, {len(arguments)} arguments")

    def _compare(self, example: Example, values: Sequence[object]) -> None:
        """Raises UnpicklingError unless the values of an example are what its row says."""
        row = example.row
        if example.record is CHUNK:
            fits = _is_instance(values[0], _CHUNKS, offsets=row["start"], sizes=row["size"])
        elif example.record is TENSOR:
            properties = getattr(values[0], "properties", None)
            self._properties[example.form] = properties
            fits = _is_instance(values[0], _TENSORS, properties=properties, size=row["shape"], chunks=[])
        else:
            index, info = values
            # The index is a hint, which may be None.
            hint = getattr(index, "index", None)
            fits = _is_instance(index, _INDEXES, fqn=row["name"], offset=row["start"], index=hint) and _is_instance(
                info, _INFOS, relative_path=row["path"], offset=row["offset"], length=row["length"]
            )
            fits = fits and hint in (row["index"], None)
        if not fits:
            raise pickle.UnpicklingError("a record that is not what it seems")


def _is_instance(value: object, classes: Sequence[type], **attributes: object) -> bool:
    return isinstance(value, StubInstance) and type(value) in classes and vars(value) == attributes


def chunks_of(scan: Scan) -> Columns:
    """The columns of all chunks, and their number of dimensions as ``ndim``; {} if there are none."""
    parts = scan.columns[CHUNK.name]
    names = list(parts[0]) if parts else []
    chunks: Columns = {}
    for name in names:  # pop: what is joined is not needed twice
        chunks[name] = _concatenate([part.pop(name) for part in parts])
    if chunks:
        chunks["ndim"] = chunks.pop("start_ndim")
        if not np.array_equal(chunks["ndim"], chunks.pop("size_ndim")):
            raise NotScannedError("a chunk whose start and size have different numbers of dimensions")
    return chunks


def items_of(scan: Scan) -> list[Columns]:
    """The columns of all items, in parts."""
    parts = scan.columns[ITEM.name]
    for part in parts:
        part["ndim"] = part.pop("start_ndim")
    return parts


def _concatenate(parts: list[npt.NDArray[np.signedinteger]]) -> npt.NDArray[np.signedinteger]:
    width = max(part.shape[1] for part in parts) if parts[0].ndim == 2 else 0
    if width:
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
    return np.concatenate(parts)
