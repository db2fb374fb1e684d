"""The closed set of importable names a checkpoint's pickles may hold: data for the reader and the writer alike.

``kind_of(module, name)`` gives what a name is allowed to do when it is read; None means it is refused. Names are
canonical: ``__builtin__`` and ``copy_reg`` (what pickle protocol 2 writes) are ``builtins`` and ``copyreg`` here;
``canonical`` translates. Nothing in this module imports what it names.

The set: what ``torch.save`` writes for tensors and their containers (``torch._utils``, ``torch._tensor``,
``torch.serialization``), what FSDP1, FSDP2 and DTensor put into per-rank files and into a DCP ``.metadata``
(torch 2.1 to 2.14), and inert data types of Python and numpy that training scripts save beside them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import Enum

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.ir.dtypes import DTYPES, STORAGE_DTYPES
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.torchao import CLASSES
from fsdpckpt.ir.values import Decoder, Json, Value


class Kind(Enum):
    """What a name may do: be a value, be called, be the class of a new object, or build a tensor."""

    VALUE = "value"  # a value that is only stored: torch.float32, or the type of a storage
    CALL = "call"  # REDUCE gives an ir Object
    CLASS = "class"  # NEWOBJ (or REDUCE) gives an ir Object
    PYTHON = "python"  # REDUCE gives the plain Python value itself
    REBUILD = "rebuild"  # REDUCE gives a tensor
    GETATTR = "getattr"  # getattr, for the pairs of NESTED_CLASSES and for members of allowed enums only


# Modules that moved: the same class was pickled under each of these paths by some torch from 2.1 to 2.14.
_DTENSOR_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor.api",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
)
_PLACEMENT_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor",
    "torch.distributed._tensor.placement_types",
)
_SPEC_MODULES = (
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed._tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
)
_MESH_MODULES = (
    "torch.distributed.device_mesh",
    "torch.distributed._tensor.device_mesh",
    "torch.distributed.tensor.device_mesh",
)

# Where each item of a DCP directory is stored. OLMo-core's storage writer pickles a class of its own, with the three
# fields of torch's (olmo_core/distributed/checkpoint/filesystem.py).
STORAGE_MODULES = ("torch.distributed.checkpoint.filesystem", "olmo_core.distributed.checkpoint.filesystem")

# (module, names, kind); names separated by blanks
_ROWS: tuple[tuple[str, str, Kind], ...] = (
    # Python
    ("builtins", "set complex bytes bytearray", Kind.PYTHON),
    ("builtins", "frozenset slice range", Kind.CALL),
    ("builtins", "int float str bool list tuple dict object", Kind.VALUE),  # default factories and type fields
    ("builtins", "getattr", Kind.GETATTR),
    ("_codecs", "encode", Kind.PYTHON),
    ("collections", "OrderedDict", Kind.PYTHON),
    ("collections", "defaultdict Counter deque", Kind.CALL),
    ("datetime", "datetime date time timedelta timezone", Kind.CALL),
    ("uuid", "UUID", Kind.CLASS),
    ("decimal", "Decimal", Kind.CALL),
    ("fractions", "Fraction", Kind.CALL),
    ("pathlib", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path", Kind.CALL),
    ("pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path", Kind.CALL),
    ("_io", "BytesIO", Kind.CLASS),
    ("argparse", "Namespace", Kind.CLASS),
    ("types", "SimpleNamespace", Kind.CLASS),
    # numpy: arrays, scalars, dtypes and the states of its random generators
    ("numpy.core.multiarray", "_reconstruct scalar", Kind.CALL),
    ("numpy._core.multiarray", "_reconstruct scalar", Kind.CALL),
    ("numpy.core.numeric", "_frombuffer", Kind.CALL),
    ("numpy._core.numeric", "_frombuffer", Kind.CALL),
    ("numpy", "ndarray dtype", Kind.CALL),
    ("numpy", "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64", Kind.VALUE),
    ("numpy.random._pickle", "__randomstate_ctor __bit_generator_ctor __generator_ctor", Kind.CALL),
    ("numpy.random._mt19937", "MT19937", Kind.VALUE),
    ("numpy.random._pcg64", "PCG64 PCG64DXSM", Kind.VALUE),
    ("numpy.random._philox", "Philox", Kind.VALUE),
    ("numpy.random._sfc64", "SFC64", Kind.VALUE),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence", Kind.CALL),
    ("numpy.random.bit_generator", "SeedSequence", Kind.VALUE),
    # torch: types, tensors
    ("torch", "Size device", Kind.CALL),
    ("torch.torch_version", "TorchVersion", Kind.CLASS),  # of torch.__version__
    ("torch", "contiguous_format channels_last channels_last_3d preserve_format", Kind.VALUE),
    ("torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged", Kind.VALUE),
    ("torch", "per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric", Kind.VALUE),
    ("torch", "per_channel_affine_float_qparams", Kind.VALUE),
    ("torch", "Tensor", Kind.VALUE),
    ("torch", "quint8 qint8 qint32 quint4x2 quint2x4", Kind.VALUE),
    ("torch", "QInt8Storage QUInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage", Kind.VALUE),
    ("torch", "UntypedStorage", Kind.VALUE),
    ("torch.storage", "UntypedStorage TypedStorage", Kind.VALUE),
    ("torch.nn.parameter", "Parameter Buffer UninitializedParameter UninitializedBuffer", Kind.VALUE),
    ("torch.serialization", "_get_layout", Kind.CALL),
    (
        "torch._utils",
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state"
        " _rebuild_wrapper_subclass _rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_nested_tensor"
        " _rebuild_qtensor _rebuild_meta_tensor_no_storage _rebuild_device_tensor_from_numpy"
        " _rebuild_device_tensor_from_cpu_tensor",
        Kind.REBUILD,
    ),
    ("torch._tensor", "_rebuild_from_type _rebuild_from_type_v2", Kind.REBUILD),
    # ShardedTensor (FSDP1)
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", Kind.VALUE),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState", Kind.CLASS),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard", Kind.CLASS),
    (
        "torch.distributed._shard.sharded_tensor.metadata",
        "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
        Kind.CLASS,
    ),
    ("torch.distributed._shard.metadata", "ShardMetadata", Kind.CLASS),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec", Kind.CLASS),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec", Kind.CLASS),
    ("torch.distributed._shard.sharding_spec", "ChunkShardingSpec EnumerableShardingSpec", Kind.CLASS),
    ("torch.distributed.remote_device", "_remote_device", Kind.CLASS),
    # DTensor (FSDP2, and FSDP1 with a device mesh)
    *((module, "DTensor", Kind.VALUE) for module in _DTENSOR_MODULES),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", Kind.VALUE),
    *((module, "Shard Replicate Partial _Partial _StridedShard", Kind.CLASS) for module in _PLACEMENT_MODULES),
    *((module, "DTensorSpec TensorMeta ShardOrderEntry", Kind.CLASS) for module in _SPEC_MODULES),
    *((module, "DeviceMesh", Kind.CLASS) for module in _MESH_MODULES),
    ("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout", Kind.CLASS),
    # torchao: optimizer states in blocks
    *((module, name, Kind.VALUE) for module, name in sorted(CLASSES)),
    # DeepSpeed
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler", Kind.CLASS),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum", Kind.CALL),
    ("deepspeed.utils.tensor_fragment", "fragment_address", Kind.CLASS),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", Kind.CLASS),
    # Megatron-core (megatron/core/safe_globals.py)
    ("megatron.core.enums", "ModelType", Kind.CALL),
    ("megatron.core.transformer.enums", "AttnBackend AttnMaskType CudaGraphScope", Kind.CALL),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState", Kind.CALL),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig", Kind.CLASS),
    ("signal", "Signals", Kind.CALL),
    # DCP .metadata
    (
        "torch.distributed.checkpoint.metadata",
        "Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata BytesStorageMetadata"
        " ChunkStorageMetadata _MEM_FORMAT_ENCODING",
        Kind.CLASS,
    ),
    *((module, "_StorageInfo _StoragePrefix", Kind.CLASS) for module in STORAGE_MODULES),
)

# The only attributes allowed for getattr: pickle protocol 2 writes a nested class as getattr(outer, name).
NESTED_CLASSES: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor", "ProcessGroupState"): (
        "torch.distributed._shard.sharded_tensor.api",
        "ShardedTensor.ProcessGroupState",
    ),
}

_ALIASES = {
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "long"): ("builtins", "int"),
}
_MODULE_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def _table() -> dict[tuple[str, str], Kind]:
    table = {(module, name): kind for module, names, kind in _ROWS for name in names.split()}
    table.update({("torch", name): Kind.VALUE for name in DTYPES})
    table.update({("torch", name): Kind.VALUE for name in STORAGE_DTYPES})
    numpy_scalars = "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 LongDouble"
    numpy_scalars += " Complex64 Complex128 CLongDouble Object Bytes Str Void DateTime64 TimeDelta64"
    numpy_scalars += " LongLong ULongLong Long ULong Int UInt Short UShort Byte UByte"
    table.update({("numpy.dtypes", f"{name}DType"): Kind.CALL for name in numpy_scalars.split()})
    return table


ALLOWED: Mapping[tuple[str, str], Kind] = _table()


def canonical(module: str, name: str) -> tuple[str, str]:
    """The name in Python 3 of what pickle protocols 0 to 2 write under a Python 2 name."""
    alias = _ALIASES.get((module, name))
    return alias if alias is not None else (_MODULE_ALIASES.get(module, module), name)


def kind_of(module: str, name: str) -> Kind | None:
    """What the (canonical) name may do, None if it is outside the closed set."""
    return ALLOWED.get((module, name))


def decode_allowed(data: Json, *, tensors: Mapping[str, Tensor] | None = None, file: str) -> Value:
    """The value that ``ir.values.encode`` turned into ``data``, which ``file`` holds. ``tensors``: by their keys.

    Raises SourceCorruptError for what ``encode`` does not write, SourceUnsafeError for names outside the closed set.
    """
    decoder = Decoder(tensors)
    try:
        value: Value = decoder.decode(data)
    except (KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
        raise SourceCorruptError(
            "a value stored as JSON cannot be decoded",
            file=file,
            found=f"{type(error).__name__}: {error}",
            why="the text was edited, or a newer fsdpckpt wrote it",
        ) from None
    unknown = [str(name) for name in decoder.names if kind_of(name.module, name.name) is None]
    if unknown:
        raise unsafe_error(file, unknown)
    return value


def unsafe_error(file: str, names: Iterable[str]) -> SourceUnsafeError:
    """The error for ``names`` in ``file`` that are outside the closed set."""
    listed = sorted(names)
    things = "1 class or function" if len(listed) == 1 else f"{len(listed):,} classes or functions"
    return SourceUnsafeError(
        f"{file} refers to {things} that fsdpckpt does not allow",
        details=listed,
        file=file,
        found=", ".join(listed),
        why="loading them could run code; fsdpckpt reads only types that it knows to be data, and runs nothing",
        next_step="save the checkpoint again without these objects (tensors, numbers, text, lists and dicts are fine)",
    )
