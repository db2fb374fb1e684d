"""Declares every option of ``convert`` once, for the command line, the Python API, workers and its checks.

To add an option, add one field to the record of its command, with what ``options.declare.Option`` describes: nothing
else needs an edit except the code that uses it. ``scripts/keywords`` then rewrites the types of ``fsdpckpt.convert``.
Imports neither numpy nor torch, since ``--help`` needs all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fsdpckpt import flags
from fsdpckpt.ir import Container, KeyType, Layout, Section, SectionName, Strategy
from fsdpckpt.options.declare import Heading, OptionRecord, Scope, option, repeatable
from fsdpckpt.options.kinds import PATH, PATHS, SECTION, SECTIONS, SIZE, TORCH_VERSION, WORKERS, one_of

# Bytes of copy buffers: several windows for each thread, far below a laptop's memory.
DEFAULT_MAX_MEMORY = 128 * 1024 * 1024
DEFAULT_MAX_SHARD_SIZE = 5_000_000_000  # bytes, the split Hugging Face's own writers use

# Listed, as --help imports no table of producers and dtypes; tests compare them with those.
FLAVORS = (
    *("plain", "accelerate", "automodel", "deepspeed-universal", "fabric", "huggingface", "lightning"),
    *("lightning-model-parallel", "llamafactory", "nemo-rl", "nemo-rl-v1", "olmo-core", "prime-rl", "skyrl"),
    *("slime", "torch_checkpointing", "torchtitan", "torchtitan-old", "torchtune", "trainer"),
    *("transformers-distributed", "veomni", "veomni-experts", "verl"),
)
# float8_e8m0fnu has neither sign nor zero: it holds the scales of other tensors, never values.
CASTABLE_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_ALIASES |= {"fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
DTYPE = one_of(CASTABLE_DTYPES, "a floating-point dtype", "bfloat16", "DTYPE", "str | torch.dtype", _ALIASES)
AUTO_DTYPE = "auto"
"""What ``--dtype`` says for the dtype that ``config.json`` states."""

_MODEL_DTYPES = (*CASTABLE_DTYPES, AUTO_DTYPE)
_MODEL_DTYPE = one_of(_MODEL_DTYPES, "a floating-point dtype", "bfloat16", "DTYPE", "str | torch.dtype", _ALIASES)
# What ``torch.device`` takes, and the names of backends outside of PyTorch that train with FSDP.
DEVICE_TYPES = ("cuda", "cpu", "xpu", "npu", "hpu", "mlu", "musa", "mps", "mtia", "xla", "ipu", "maia", "privateuseone")
DEVICE_TYPE = one_of(DEVICE_TYPES, "a device type of PyTorch", "cuda", "TYPE")


class TensorForm(StrEnum):
    """What a per-rank sharded torch file holds."""

    DTENSOR = "dtensor"
    SHARDED_TENSOR = "sharded-tensor"


class VerifyLevel(StrEnum):
    NONE = "none"
    STRUCTURE = "structure"
    FULL = "full"


class MissingState(StrEnum):
    """What to do with parameters that a param group lists and that have no optimizer state."""

    ERROR = "error"
    ZEROS = "zeros"
    SKIP = "skip"


class LinkMode(StrEnum):
    """How to make a file of DST that equals a file of SRC. ``AUTO``: a reflink if possible, else a copy."""

    COPY = "copy"
    AUTO = "auto"
    HARDLINK = "hardlink"
    REFLINK = "reflink"


class Launcher(StrEnum):
    """Where a conversion runs. ``AUTO``: as workers if several are requested, or if started as one of them."""

    AUTO = "auto"
    LOCAL = "local"
    TORCHRUN = "torchrun"


class OutputScope(StrEnum):
    """Who sees DST: all workers the same one, or each node one of its own, for the ranks it will load."""

    SHARED = "shared"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class ConvertOptions(OptionRecord):
    """Options of one conversion. None: the default that the help text names. Sizes are bytes."""

    to: Layout | None = option("Target layout (default: the source's).", Heading.WRITTEN)
    container: Container | None = option(
        "File format (default: by DST's suffix, else the framework's; plain: torch for full, dcp for sharded).",
        Heading.WRITTEN,
        synonyms=("format",),
    )
    world_size: int | None = option(
        "Number of ranks of the target; for dcp, how it is split into files.",
        Heading.WRITTEN,
        minimum=1,
        synonyms=("gpus", "n", "n-gpus", "np", "num-gpus", "num-processes", "num-ranks", "ranks", "world"),
    )
    mesh: tuple[str, ...] = repeatable(
        "Device mesh of the target, for example dp_replicate=2,dp_shard=4,tp=2 (default: the source's); may be "
        "repeated if the tensors are on several meshes.",
        Heading.WRITTEN,
        metavar="NAME=SIZE,...",
        scope=Scope.SHARDED,
    )
    placements: str | None = option(
        "JSON file with the placements of the parameters, and with several meshes the mesh of each.",
        Heading.WRITTEN,
        kind=PATH,
        scope=Scope.SHARDED,
    )
    like: str | None = option(
        "Per-rank DTensor files whose meshes and placements are used for the target.",
        Heading.WRITTEN,
        kind=PATH,
        metavar="PATH",
        scope=Scope.SHARDED,
    )
    tensor: TensorForm = option(
        "Tensor type in per-rank torch files.", Heading.WRITTEN, default=TensorForm.DTENSOR, scope=Scope.PER_RANK_FILES
    )
    torch_version: str | None = option(
        "PyTorch version that will load per-rank DTensor files, for example 2.8 (default: the one installed here).",
        Heading.WRITTEN,
        kind=TORCH_VERSION,
        scope=Scope.PER_RANK_FILES,
    )
    mesh_device: str | None = option(
        "Device type that DTensors record for their mesh: cuda, cpu, ... (default: the source's, else the flavor's).",
        Heading.WRITTEN,
        kind=DEVICE_TYPE,
        completion=DEVICE_TYPES[:2],
        scope=Scope.DTENSORS,
    )
    key_type: KeyType | None = option(
        "Key optimizer state by parameter name or by id (default: as in the source).",
        Heading.WRITTEN,
        scope=Scope.OPTIMIZER,
    )
    flavor: str | None = option(
        f"Framework whose file names and keys are written: {', '.join(FLAVORS)} (default: the source's).",
        Heading.WRITTEN,
        metavar="NAME",
        completion=FLAVORS,
        synonyms=("framework",),
    )
    max_shard_size: int = option(
        "Split safetensors files at this size (default: 5GB).",
        Heading.WRITTEN,
        default=DEFAULT_MAX_SHARD_SIZE,
        kind=SIZE,
        minimum=1,
        scope=Scope.SAFETENSORS,
    )
    only: Section | SectionName | None = option(
        "Convert only this section; NAME is one of several models or optimizers, as inspect lists them.",
        Heading.SELECTED,
        kind=SECTION,
        completion=SECTIONS,
        synonyms=("model-only", "weights-only"),
    )
    include: tuple[str, ...] = repeatable(
        "Convert only parameters whose names match; may be repeated.", Heading.SELECTED
    )
    exclude: tuple[str, ...] = repeatable("Leave out parameters whose names match; may be repeated.", Heading.SELECTED)
    ignore_file: tuple[str, ...] = repeatable(
        "Leave out files and directories of SRC with this name or path; may be repeated.", Heading.SELECTED
    )
    clean_names: bool = option(
        "Remove the prefixes of wrappers (_orig_mod., _checkpoint_wrapped_module., ...) from names.",
        Heading.SELECTED,
        default=False,
    )
    strip_prefix: str | None = option("Remove PREFIX from the start of names.", Heading.SELECTED, metavar="PREFIX")
    add_prefix: str | None = option("Add PREFIX to the start of names.", Heading.SELECTED, metavar="PREFIX")
    rename: tuple[tuple[str, str], ...] = repeatable(
        "Rename a key or a dotted prefix; may be repeated, and is applied in order.", Heading.SELECTED
    )
    map: tuple[str, ...] = repeatable(
        "Layout map: rename, stack, split and rearrange parameters with their optimizer state; a TOML or JSON file, or "
        "the name of a built-in one (fsdpckpt formats lists them); may be repeated, and is applied in order.",
        Heading.SELECTED,
        kind=PATHS,
        flag=flags.map_,
        metavar="FILE|NAME",
        synonyms=("layout-map", "mapping"),
    )
    inverse: bool = option(
        "Apply the maps backwards, the last one first.", Heading.SELECTED, default=False, scope=Scope.MAP
    )
    map_value: tuple[tuple[str, str], ...] = repeatable(
        "A number that the map leaves open (default: what config.json states); may be repeated.",
        Heading.SELECTED,
        metavar="NAME=N",
        scope=Scope.MAP,
    )
    dtype: str | None = option(
        "Cast the model's floating-point tensors, for example to bfloat16; 'auto': as config.json states "
        "(default: no cast).",
        Heading.SELECTED,
        kind=_MODEL_DTYPE,
        completion=_MODEL_DTYPES,
        scope=Scope.MODEL,
    )
    optim_dtype: str | None = option(
        "Cast the optimizer's floating-point states, but not step and those without dimensions (default: no cast).",
        Heading.SELECTED,
        kind=DTYPE,
        completion=CASTABLE_DTYPES,
        scope=Scope.OPTIMIZER,
    )
    missing_state: MissingState | None = option(
        "For parameters without optimizer state: stop with an error, write zeros, or leave them out.",
        Heading.SELECTED,
        scope=Scope.OPTIMIZER,
    )
    no_weight_decay: tuple[str, ...] = repeatable(
        "Parameters without weight decay ('standard': vectors and biases); may be repeated. Megatron's checkpoints do "
        "not list those of each param group; an optimizer with one group, as DeepSpeed makes it, gets two.",
        Heading.SELECTED,
        completion=("standard",),
        scope=Scope.OPTIMIZER,
    )
    buffers: tuple[str, ...] = repeatable(
        "Model keys that every rank holds whole, such as buffers ('none': there are none); may be repeated. If ranks "
        "hold different copies of one, the lowest rank's is taken.",
        Heading.SELECTED,
        scope=Scope.KNOWLEDGE,
    )
    units: str | None = option(
        "Units file: the parameters of each flat parameter, their order, the groups (fsdpckpt units --help).",
        Heading.UNITS,
        kind=PATH,
        scope=Scope.KNOWLEDGE,
    )
    unit: tuple[str, ...] = repeatable(
        "Names of the modules that FSDP1 wrapped ('none': only the root); may be repeated.",
        Heading.UNITS,
        scope=Scope.FLAT_PARAMETERS,
    )
    use_orig_params: bool | None = option(
        "use_orig_params of the job that saved, or will load, the flat shards.",
        Heading.UNITS,
        scope=Scope.FLAT_PARAMETERS,
    )
    strategy: Strategy | None = option(
        "FSDP1's sharding strategy (default: full-shard).", Heading.UNITS, scope=Scope.FLAT_PARAMETERS
    )
    param_dtype: str | None = option(
        "MixedPrecision.param_dtype of the training job, which decides how slices are aligned.",
        Heading.UNITS,
        kind=DTYPE,
        completion=CASTABLE_DTYPES,
        scope=Scope.FLAT_PARAMETERS,
    )
    shard_size: int | None = option(
        "Number of ranks in one sharding group (hybrid-shard).", Heading.UNITS, minimum=1, scope=Scope.FLAT_PARAMETERS
    )
    reference: str | None = option(
        "A checkpoint with the model's names, shapes and order, and of the same job the optimizer's groups by name; "
        "for Hugging Face's weights, a directory with its config.json and tokenizer.",
        Heading.UNITS,
        kind=PATH,
        metavar="PATH",
        scope=Scope.KNOWLEDGE,
    )
    parameters: str | None = option(
        "A text file with the names in the order of model.parameters() or of the optimizer, one per line; a blank "
        "line ends a group of the optimizer.",
        Heading.UNITS,
        kind=PATH,
        scope=Scope.KNOWLEDGE,
    )
    dry_run: bool = option("Print the plan and write nothing.", Heading.SAFETY, default=False, changes_output=False)
    verify: VerifyLevel = option(
        "How the output is checked before it appears.",
        Heading.SAFETY,
        default=VerifyLevel.STRUCTURE,
        changes_output=False,
    )
    link: LinkMode = option(
        "Link files of SRC that do not change instead of copying them; auto: reflinks if the file system supports "
        "them; hardlink: SRC and DST then share these files.",
        Heading.WRITTEN,
        default=LinkMode.COPY,
        synonyms=("hard-link", "hardlink", "reflink", "symlink"),
    )
    overwrite: bool = option(
        "Replace the checkpoint at DST; refused if DST contains anything else.",
        Heading.SAFETY,
        default=False,
        synonyms=("force", "f", "replace"),
        changes_output=False,
    )
    resume: bool | None = option(
        "Continue an interrupted run of the same command (default), or remove what it left and start over.",
        Heading.SAFETY,
        changes_output=False,
    )
    max_memory: int = option(
        "Limit on copy buffers (default: 128MiB).",
        Heading.RESOURCES,
        default=DEFAULT_MAX_MEMORY,
        kind=SIZE,
        changes_output=False,
    )
    threads: int | None = option("Number of threads that copy.", Heading.RESOURCES, minimum=1, changes_output=False)
    # For a path it has no effect, and the summary says so: one command may serve both.
    staging: str | None = option(
        "Stage a DST for an object store in this local directory (default: TMPDIR, and mostly nothing is staged).",
        Heading.RESOURCES,
        kind=PATH,
        metavar="DIR",
    )


@dataclass(frozen=True, slots=True)
class LaunchOptions(OptionRecord):
    """The processes that run a conversion; these options do not change a byte of the output."""

    launcher: Launcher = option(
        "Where to run; auto: workers if --nproc-per-node asks for them, or torchrun or srun started this.",
        Heading.WORKERS,
        default=Launcher.AUTO,
    )
    nproc_per_node: str | None = option(
        "Start this many workers on this node.", Heading.WORKERS, kind=WORKERS, scope=Scope.LAUNCH
    )
    nnodes: int = option(
        "Number of nodes that run this command.", Heading.WORKERS, default=1, minimum=1, scope=Scope.LAUNCH
    )
    node_rank: int | None = option(
        "Rank of this node, from 0.", Heading.WORKERS, minimum=0, scope=Scope.LAUNCH | Scope.WORKERS
    )
    rdzv_endpoint: str | None = option(
        "Address at which the nodes meet: the same on every node.",
        Heading.WORKERS,
        metavar="HOST:PORT",
        scope=Scope.LAUNCH | Scope.WORKERS,
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "Device used for communication.", Heading.WORKERS, default="auto", scope=Scope.WORKERS
    )
    backend: Literal["auto", "nccl", "gloo"] = option(
        "Backend of communication; auto: nccl if every worker has its own GPU, else gloo.",
        Heading.WORKERS,
        default="auto",
        scope=Scope.WORKERS,
    )
    output_visibility: OutputScope = option(
        "Who sees DST; node: each node a directory of its own, which gets the files that its ranks load.",
        Heading.WORKERS,
        default=OutputScope.SHARED,
        scope=Scope.WORKERS,
    )
    fault_limit: float = option(
        "End all workers this many seconds after one is lost.",
        Heading.WORKERS,
        default=15.0,
        metavar="SECONDS",
        minimum=1.0,
        scope=Scope.WORKERS,
    )


@dataclass(frozen=True, slots=True)
class EachOptions(OptionRecord):
    """Which checkpoints of a run are converted, if SRC is one."""

    each: str | None = option(
        "SRC is a run: convert every checkpoint in it that matches, to one of the same name in DST; those that are "
        "in DST already are compared, not written again.",
        Heading.RUN,
        metavar="GLOB",
    )
    newer_than: str | None = option(
        "With --each: only checkpoints that come after this one (900 comes before 1000).",
        Heading.RUN,
        metavar="NAME",
    )
    watch: float | None = option(
        "With --each: look for new checkpoints again and again, with this pause; one that is still being saved is "
        "tried again.",
        Heading.RUN,
        metavar="SECONDS",
        minimum=1.0,
    )
