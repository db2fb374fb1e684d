"""Unpickles a DCP ``.metadata`` file into inert records, at C speed: nothing named in it is ever imported.

``.metadata`` is one plain pickle (no zip) of a closed set of dataclasses. A checkpoint of 100,000 tensors has millions
of them, so the names resolve to stub classes whose instances the C unpickler fills by itself; ``torch.Size`` resolves
to a function that makes short tuples. A name outside the set becomes an inert placeholder too, and at the end all such
names are reported together. The set was collected from files of torch 2.1 to 2.14
(``torch/distributed/checkpoint/metadata.py``, ``filesystem.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from fsdpckpt.errors import COPY_AGAIN, SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.dcp.reduce import Run
from fsdpckpt.formats.pickle import Swallow, buffered, instance_class
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS
from fsdpckpt.text import plural

_INTEGERS = {int}
_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"  # Megatron-core keeps every rank's plan in the metadata
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_CLASSES = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_FILESYSTEM, "_StorageInfo"),
        (_FILESYSTEM, "_StoragePrefix"),
        *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        (_SHARDED_TENSOR, "TensorProperties"),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        *(
            (module, f"{pure}{system}Path")
            for module in ("pathlib", "pathlib._local")
            for pure in ("", "Pure")
            for system in ("", "Posix", "Windows")
        ),
    }
)


def _size(extents: object = ()) -> tuple[int, ...]:
    """``torch.Size``: few numbers, so that no pickle can build large tuples of sizes of sizes."""
    few = type(extents) in (tuple, list) and len(extents) <= MAX_DIMENSIONS  # type: ignore[arg-type]
    if not (few and _INTEGERS.issuperset(map(type, extents))):  # type: ignore[call-overload]
        raise pickle.UnpicklingError("a size that is no short list of numbers")
    return tuple(extents)  # type: ignore[arg-type]


class TorchName(str):
    """``torch.<name>``, a dtype. A name and not the dtype itself: a pickle may set the state of whatever it names."""

    __slots__ = ()


class _Unpickler(pickle.Unpickler):
    """Gives every name an inert class, which no file can change."""

    def __init__(self, data: bytes, runs: Sequence[Run]) -> None:
        super().__init__(buffered(data))
        self._runs = runs
        self.unknown: dict[str, None] = {}
        self._known: dict[tuple[str, str], object] = {}

    def find_class(self, module: str, name: str) -> object:
        known = self._known.get((module, name))
        if known is None:
            known = self._known[(module, name)] = self._resolve(module, name)
        return known

    def _resolve(self, module: str, name: str) -> object:
        if module == "torch":
            if name == "Size":
                return _size
            if name in DTYPES:
                return TorchName(name)
        if (module, name) in _CLASSES:
            return instance_class(module, name)
        self.unknown[f"{module}.{name}"] = None
        return Swallow

    def persistent_load(self, pid: object) -> Run:
        if type(pid) is not int or not 0 <= pid < len(self._runs):
            raise pickle.UnpicklingError("a persistent id has no place in .metadata")
        return self._runs[pid]


def load_records(data: bytes, *, file: str, runs: Sequence[Run] = ()) -> object:
    """The object in ``data``: records, tuples, dicts, scalars and ``TorchName``; persistent id n is ``runs[n]``.

    Raises SourceUnsafeError naming every global outside the closed set, SourceCorruptError when it is no pickle.
    """
    check_pickle(data, file, "is not a readable DCP metadata file")
    unpickler = _Unpickler(data, runs)
    failure: Exception | None = None
    loaded: object = None
    try:
        loaded = unpickler.load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        failure = error
    if unpickler.unknown:
        raise SourceUnsafeError(
            f"{file} names {plural(len(unpickler.unknown), 'global')} that fsdpckpt does not know",
            details=list(unpickler.unknown),
            why="a custom save planner or storage writer added them, or somebody tampered with the file",
            next_step="save again with the planner and writer of torch.distributed.checkpoint",
            file=file,
        )
    if failure is not None:
        raise SourceCorruptError(
            f"{file} is not a readable DCP metadata file",
            found=f"{type(failure).__name__}: {failure}".rstrip(": "),
            why="the file is damaged, truncated or still being written",
            next_step=COPY_AGAIN,
            file=file,
        )
    return loaded
