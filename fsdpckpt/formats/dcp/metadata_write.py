"""The ``.metadata`` file of a DCP directory: what lies where, pickled under PyTorch's own class paths.

The forms are those ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` have had since torch 2.3: newer
fields are instance attributes that older readers ignore (``StorageMeta.modules``, ``Metadata.version``), and those a
newer reader adds have defaults. ``checkpoint_id`` stays None: it would carry the path of this machine and a
``pathlib`` class that moved between Python versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from fsdpckpt.formats.pickle.opcodes import PickleOpcodes, integer, integers
from fsdpckpt.ir.dtypes import DType

__all__ = ["DcpEntry", "StoredChunk", "metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # torch.distributed.checkpoint.planner_helpers and metadata: the only version so far
_BATCH = 1000
_NEW = b")\x81}("  # an empty argument tuple, __new__, and the start of the attributes
_BUILD = b"ub"


class StoredChunk(NamedTuple):
    """One item of a data file: its box in elements (empty for values that are no tensor) and its bytes."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class DcpEntry(NamedTuple):
    """One flat key. ``path`` is where it was nested: dict keys as text, list indexes as ints.

    ``dtype`` is None for BYTES, a value that is no tensor.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: DType | None
    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]


def metadata_pickle(entries: Sequence[DcpEntry]) -> bytes:
    """The whole file for ``entries``, in their order."""
    writer = PickleOpcodes()
    raw, text = writer.raw, writer.text
    raw(writer.name(_METADATA, "Metadata") + _NEW)
    raw(text("state_dict_metadata"))
    _dict(writer, (_storage_metadata(writer, entry) for entry in entries))
    raw(text("planner_data"))
    _dict(writer, (text(entry.key) + _path(writer, entry.path) for entry in entries))
    raw(text("storage_data"))
    _dict(writer, _storage_data(writer, entries))
    raw(text("storage_meta") + writer.name(_METADATA, "StorageMeta") + _NEW)
    raw(
        text("checkpoint_id") + b"N" + text("save_id") + b"N" + text("load_id") + b"N" + text("modules") + b"]" + _BUILD
    )
    raw(text("version") + text(_VERSION) + _BUILD)
    return writer.finish()


def _dict(writer: PickleOpcodes, pairs: Iterator[bytes]) -> None:
    """A dict from opcodes of key and value. Each pair is made when it is written, so that memo places come in order."""
    writer.raw(b"}")
    while True:
        first = next(pairs, None)
        if first is None:
            return
        writer.raw(b"(" + first)
        for pair in islice(pairs, _BATCH - 1):
            writer.raw(pair)
        writer.raw(b"u")


def _path(writer: PickleOpcodes, path: tuple[str | int, ...]) -> bytes:
    text = writer.text
    body = b"".join([integer(part) if isinstance(part, int) else text(part) for part in path])
    return b"(%bt" % body


def _size(writer: PickleOpcodes, values: tuple[int, ...]) -> bytes:
    return writer.name("torch", "Size") + integers(values) + b"\x85R"


def _storage_metadata(writer: PickleOpcodes, entry: DcpEntry) -> bytes:
    key, dtype, shape = writer.text(entry.key), entry.dtype, entry.shape
    if dtype is None:
        return key + writer.name(_METADATA, "BytesStorageMetadata") + b")\x81"
    head = writer.constant((dtype.name, shape), partial(_tensor_head, writer, dtype, shape))
    chunks = [writer.constant((start, size), partial(_chunk, writer, start, size)) for start, size, *_ in entry.chunks]
    return b"%b%b](%beub" % (key, head, b"".join(chunks))


def _tensor_head(writer: PickleOpcodes, dtype: DType, shape: tuple[int, ...]) -> bytes:
    """TensorStorageMetadata up to its chunks. The properties: strided, no gradient, contiguous format, not pinned."""
    text, name = writer.text, writer.name
    head = name(_METADATA, "TensorStorageMetadata") + _NEW + text("properties")
    head += name(_METADATA, "TensorProperties") + b")\x81(" + name("torch", dtype.name)
    head += name("torch.serialization", "_get_layout") + text("torch.strided") + b"\x85R\x89"
    head += name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R\x89tb"
    return head + text("size") + _size(writer, shape) + text("chunks")


def _chunk(writer: PickleOpcodes, start: tuple[int, ...], size: tuple[int, ...]) -> bytes:
    text = writer.text
    head = writer.name(_METADATA, "ChunkStorageMetadata") + _NEW
    head += text("offsets") + _size(writer, start)
    return head + text("sizes") + _size(writer, size) + _BUILD


def _storage_data(writer: PickleOpcodes, entries: Sequence[DcpEntry]) -> Iterator[bytes]:
    text, parts = writer.text, _index_parts(writer)
    first = True
    for entry in entries:
        fqn = text(entry.key)
        tensor = entry.dtype is not None
        for number, (start, _, file, at, nbytes) in enumerate(entry.chunks):
            head, index, offset, info, begin, length = parts
            hint = place = b"N"
            if tensor:
                hint, place = integer(number), writer.constant(start, partial(_size, writer, start))
            yield b"%b%b%b%b%b%b%b%b%b%b%b%bub" % (
                head, fqn, index, hint, offset, place, info, text(file), begin, integer(at), length, integer(nbytes)
            )  # fmt: skip
            if first:
                parts, first = _index_parts(writer), False  # from now on memo references


def _index_parts(writer: PickleOpcodes) -> tuple[bytes, ...]:
    """What stands between the values of one MetadataIndex (its offset None for BYTES) and one _StorageInfo."""
    text, name = writer.text, writer.name
    return (
        name(_METADATA, "MetadataIndex") + _NEW + text("fqn"),
        text("index"),
        text("offset"),
        _BUILD + name(_FILESYSTEM, "_StorageInfo") + _NEW + text("relative_path"),
        text("offset"),
        text("length"),
    )
