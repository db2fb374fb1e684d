"""Defines what a writer is: it turns a checkpoint and a ``WriteSpec`` into the laid-out files of a ``Target``.

To add a target format, write one module with a ``lay_out`` that conforms to ``Writer``, add it to the table in
``converters/lay_out.py``, and let a test class inherit ``tests/writers/writer_contract.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, NamedTensor, Note, Section
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.placements import MeshShape, Sharding
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.layouts import row_sharding
from fsdpckpt.options import DEFAULT_MAX_SHARD_SIZE, TensorForm
from fsdpckpt.producers import PLAIN_MESH, PLAIN_PATHS, MeshForm, SectionPath
from fsdpckpt.text import plural


@dataclass(frozen=True, slots=True)
class DtypeRule:
    """The casts of one conversion; None casts nothing.

    ``model`` applies to the floating tensors of the model section. ``optim`` applies to the floating states of the
    optimizer that have the elements of a parameter. 0-dim states and ``step`` are counters, which a short float would
    round: they are not cast, and neither are tensors inside param groups or inside values of the model
    (``_extra_state``). Integers, bools and complex are never cast.
    """

    model: DType | None = None
    optim: DType | None = None

    def of(self, section: Section, state: str | None, tensor: Tensor) -> DType:
        """The dtype of ``tensor`` in the target; ``state``: as in ``NamedTensor``."""
        if section is Section.MODEL and state is None:
            wanted = self.model
        elif section is Section.OPTIM and state is not None and state != STEP and tensor.shape:
            wanted = self.optim
        else:
            wanted = None
        return tensor.dtype if wanted is None or not tensor.dtype.floating else wanted

    def of_named(self, checkpoint: Checkpoint, named: NamedTensor) -> DType:
        """The dtype in the target of one of the tensors of ``checkpoint``.

        An average of the weights beside the model, or a second optimizer, is not cast with it. Where all have names of
        their own, all are.
        """
        main = checkpoint.model if named.section is Section.MODEL else checkpoint.optim
        if named.of is not None and main is not None:
            return named.tensor.dtype
        return self.of(named.section, named.state, named.tensor)

    def casts(self, checkpoint: Checkpoint) -> tuple[Mapping[Tensor, DType], list[Note]]:
        """The new dtype of every tensor that changes, and one note for each kind of cast."""
        changed: dict[Tensor, DType] = {}
        kinds: Counter[tuple[Section, str, str]] = Counter()
        if self.model is None and self.optim is None:
            return changed, []
        for named in checkpoint.tensors():
            dtype = self.of_named(checkpoint, named)
            if dtype is not named.tensor.dtype:
                changed[named.tensor] = dtype
                kinds[named.section, named.tensor.dtype.name, dtype.name] += 1
        notes = [
            Note("cast", f"{section.value}: {plural(count, 'tensor')} cast from {old} to {new}")
            for (section, old, new), count in kinds.items()
        ]
        return changed, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSpec:
    """What a writer has to know beside the checkpoint. Each writer uses the fields that concern its format.

    ``dtypes``: the casts.
    ``world_size``: ranks of the target; None for one file, or to keep the source's own chunks and ranks (DCP).
    ``path``: of the one file ("" when the target itself is the file), or what precedes the names in a DCP directory.
    ``section_paths``: the path of keys to each section in one state dict, and the name of each section's files by rank.
    ``flattened_keys``: of the optimizer in one state dict, as in ``Form``.
    ``unwrap``: a torch file of one section without extras holds that section's dict itself.
    ``tensor``, ``mesh``, ``mesh_device``: of files by rank, what a sharded tensor becomes, the form of the mesh that
    DTensors name, and its device type where the user gave one.
    ``torch_version``: the PyTorch version that loads DTensors, None for the one installed here.
    ``meshes``: those of the target, each of all ranks, on which every ``Tensor.sharding`` is; none: one dimension.
    ``max_shard_size``: bytes of tensor data in a safetensors file; ``single_file``: one file whatever its size;
    ``weights_only``: the model's tensors and ``{"format": "pt"}`` alone, as Hugging Face's libraries write.
    ``default_loadable``: one torch file that ``torch.load`` takes with ``weights_only=True``, its default.
    ``units``, ``key_type``: of FSDP1's flat parameters, and whether its optimizer is keyed by name or by id.
    ``by_item``: of files by rank, every top-level key has files of its own, and ``metadata.pkl`` says how tensors are
    cut (torch_checkpointing).
    ``linkable``: numbers of the source's files that a file of the target may be, unchanged (``Target.links``).
    """

    dtypes: DtypeRule = DtypeRule()
    world_size: int | None = None
    path: str = ""
    section_paths: Mapping[Section, SectionPath] = field(default_factory=lambda: PLAIN_PATHS)
    flattened_keys: bool = False
    unwrap: bool = False
    tensor: TensorForm = TensorForm.DTENSOR
    mesh: MeshForm = PLAIN_MESH
    mesh_device: str | None = None
    torch_version: str | None = None
    meshes: tuple[MeshShape, ...] = ()
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE
    single_file: bool = False
    weights_only: bool = False
    default_loadable: bool = False
    units: Units | None = None
    key_type: KeyType = "id"
    linkable: frozenset[int] = frozenset()
    by_item: bool = False

    def sharding(self, tensor: Tensor) -> Sharding:
        """How a sharded ``tensor`` is cut: by its own sharding, or without ``meshes`` along dimension 0 over all ranks.

        Raises InternalError for a tensor without a sharding on a mesh of all ranks.
        """
        if not self.meshes:
            return row_sharding(self.ranks(), self.mesh.names)
        if tensor.sharding is None or tensor.sharding.mesh.world_size != self.ranks():
            raise InternalError(f"a tensor of shape {tensor.shape} has no sharding on a mesh of {self.ranks()} ranks")
        return tensor.sharding

    def ranks(self) -> int:
        """``world_size``, for a target of rank files. Raises InternalError if it is None."""
        if self.world_size is None:
            raise InternalError("one file per rank needs a world size")
        return self.world_size


class Writer(Protocol):
    """Lays out one target: every file of it as literal bytes and as write items for tensor data. Copies nothing.

    Every worker of a run calls the writer with equal arguments and must get equal files, so the result may depend on
    nothing else. Literals, repeats and write items follow each other without gaps or overlaps, file names are unique
    and relative to the target, and what cannot be done exactly is refused before the first byte is written: with
    SourceUnsupportedError for what the format cannot hold, NeedsInformationError for what only the user knows.
    ``Target.notes`` say what was cast, renamed, dropped or inferred.
    """

    def __call__(self, checkpoint: Checkpoint, spec: WriteSpec) -> Target: ...
