"""What a conversion writes, decided once (``converters.target.decide``) and changed by nothing that follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpckpt.ir import Container, Layout
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import PLAIN, Flavor, Form
from fsdpckpt.readers.side_files import SideFiles
from fsdpckpt.transform.placements import TargetMesh


@dataclass(frozen=True, slots=True)
class Decision:
    """What is written, and how the options apply to it."""

    layout: Layout
    container: Container
    world_size: int | None  # ranks of the target; None for one file, and for DCP that keeps the source's chunks
    options: ConvertOptions  # with what the source, the mesh and the form decide in place of what was left open
    directory: bool  # whether DST is a directory
    flavor: Flavor | None = None  # the producer whose form it has; None is plain
    form: Form | None = None
    notes: tuple[Note, ...] = ()  # what was decided without being asked for, and why
    mesh: TargetMesh | None = None  # of a sharded target; None for one dimension that cuts rows
    side_files: SideFiles = field(default_factory=SideFiles)  # files of the source that the framework needs beside it
    splits_param_group: bool = False  # whether ``--no-weight-decay`` makes two param groups of the only one
    mapping: MapDecision | None = None  # what ``--map`` does; the other fields are about the model that it makes
    moves_schedule: bool = False  # whether the LR scheduler alone is written of the extras, to a file of its own

    @property
    def flavor_name(self) -> str:
        """The name of the flavor that is written."""
        return self.flavor.name if self.flavor is not None else PLAIN


@dataclass(frozen=True, slots=True)
class MapDecision:
    """Maps make another model of the source. Each option about a model is about one of both."""

    options: ConvertOptions  # all: they name the maps, and say where their numbers are
    read: Decision  # how the source is read, as whole tensors by name
    knows_target: bool  # whether the options about names, order and units are certainly about the model that is written
    folders: tuple[str, ...] = ()  # where a ``config.json`` may be, beside those of the source
