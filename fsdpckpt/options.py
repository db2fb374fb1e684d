"""Everything ``convert`` can be told, as data. The command line and the Python API fill the same record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from fsdpckpt.ir.vocabulary import Container, KeyType, Layout, Section, Strategy

__all__ = [
    "ConvertOptions",
    "LaunchOptions",
    "Launcher",
    "MissingState",
    "TensorForm",
    "VerifyLevel",
    "Visibility",
    "parse_size",
]

DEFAULT_MAX_MEMORY = 128 * 1024 * 1024  # bytes of copy buffers: several windows a thread, far below a laptop's memory
DEFAULT_MAX_SHARD_SIZE = 5_000_000_000  # bytes, the split Hugging Face's own writers use


class TensorForm(StrEnum):
    """What a per-rank sharded torch file holds."""

    DTENSOR = "dtensor"
    SHARDED_TENSOR = "sharded-tensor"


class VerifyLevel(StrEnum):
    NONE = "none"
    STRUCTURE = "structure"
    FULL = "full"


class MissingState(StrEnum):
    """What becomes of parameters that a param group lists and that have no optimizer state."""

    ERROR = "error"
    ZEROS = "zeros"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of one conversion; None means "as the contract's default says". Sizes are bytes.

    ``flavor``: the producer whose file names and nesting are written.
    ``mesh_device``: the device type of the mesh that DTensors say they are on; None: the source's, else the flavor's.
    ``buffers``: globs of model keys that every rank holds whole; the single word ``none`` says there are none.
    ``rename``: (old, new) pairs, applied to whole keys or to dotted prefixes, in order.
    ``dtype``, ``optim_dtype`` and ``param_dtype`` (``MixedPrecision.param_dtype``) are torch dtype names.
    ``units``: a units file; ``unit``: globs of module paths, or the single word ``none`` for the root alone.
    ``shard_size``: ranks in one sharding group. ``parameters``: a file of the names in ``model.parameters()`` order.
    ``staging``: a local directory where the output for an object store is put together; default: the system's.
    ``resume``: go on with what an interrupted run of the same conversion left beside the target.
    What describes units describes the target when that is flattened, otherwise the source.
    """

    to: Layout | None = None
    flavor: str | None = None
    container: Container | None = None
    world_size: int | None = None
    tensor: TensorForm = TensorForm.DTENSOR
    mesh_device: str | None = None
    key_type: KeyType | None = None
    units: str | None = None
    unit: tuple[str, ...] = ()
    use_orig_params: bool | None = None
    strategy: Strategy | None = None
    param_dtype: str | None = None
    shard_size: int | None = None
    parameters: str | None = None
    missing_state: MissingState | None = None
    reference: str | None = None
    buffers: tuple[str, ...] = ()
    only: Section | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str | None = None
    add_prefix: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None
    optim_dtype: str | None = None
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE
    max_memory: int = DEFAULT_MAX_MEMORY
    threads: int | None = None
    verify: VerifyLevel = VerifyLevel.STRUCTURE
    dry_run: bool = False
    overwrite: bool = False
    resume: bool = False
    staging: str | None = None


class Launcher(StrEnum):
    """Where a conversion runs. ``AUTO``: as workers when asked for several, or started as one of them; else here."""

    AUTO = "auto"
    LOCAL = "local"
    TORCHRUN = "torchrun"


class Visibility(StrEnum):
    """Who sees DST: all workers the same one, or each node one of its own, for the ranks it will load."""

    SHARED = "shared"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """On which processes a conversion runs; none of it changes a byte of what is written.

    ``nproc_per_node``: a number, ``gpu`` or ``auto``. ``node_rank`` and ``rdzv_endpoint`` (host:port) as torchrun's.
    ``device``: auto, cpu or cuda; ``backend``: auto, nccl or gloo. ``fault_limit``: seconds within which the failure of
    one worker ends all.
    """

    launcher: Launcher = Launcher.AUTO
    nproc_per_node: str | None = None
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    device: str = "auto"
    backend: str = "auto"
    output_visibility: Visibility = Visibility.SHARED
    fault_limit: float = 15.0


_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def parse_size(text: str) -> int:
    """``"128MiB"``, ``"5GB"``, ``"1000"`` to bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower(), re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write for example 128MiB or 5GB")
    return int(float(found[1]) * _UNITS[found[2]])
