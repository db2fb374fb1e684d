"""A checkpoint on its way from what was read to what is written, with what the steps have found out about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.flags import Wording
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType
from fsdpckpt.ir.row_names import RowNames
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.selection import NoKeyMatchesError

if TYPE_CHECKING:
    from fsdpckpt.maps import AppliedMap


@dataclass(frozen=True, slots=True)
class Selection:
    """The units of the source, or of ``--units``, without the parameters that were left out."""

    units: Units | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a step gets and returns. Every step returns a new one."""

    checkpoint: Checkpoint  # as the steps up to here have made it
    opened: Checkpoint  # as it was before them: what ``--only`` leaves out still says what names and parameters are
    knowledge: Knowledge
    leads: tuple[str, ...] = ()  # before the names of parameters in any section of the source: ``module.``, wrappers
    places: tuple[str, ...] = ()  # the keys of a named section, and of its model: globs may have them before its names
    side_files: Mapping[str, Tensor] = field(default_factory=dict)  # to copy beside the checkpoint, by target name
    source_units: ResolvedUnits | None = None  # of a flattened source, with its names: what its slices were named by
    source_names: RowNames = field(default_factory=RowNames)  # before the prefixes of wrappers were removed
    buffers_needed: bool = False  # whether ``--buffers`` had to say which tensors may differ between ranks
    changes: NameChanges | None = None  # what is selected, and the new names; known once keys are selected
    selection: Selection | None = None  # what is left of the units of the source, where keys were left out
    renamed: bool = False  # whether the names are those that will be written
    units: Units | None = None  # of a flattened target
    key_type: KeyType | None = None  # the keys that a flattened target gets; until it is written it has names
    applied_maps: tuple[AppliedMap, ...] = ()  # what each ``--map`` did
    keys_before_map: KeyType | None = None  # how the source keyed the optimizer that a map has keyed by name
    model_for_ids: bool = False  # whether the model is only there to say what the ids of this optimizer are
    one_of_several: bool = False  # whether options that select or rename keys may be meant for other sections alone
    unmatched: tuple[NoKeyMatchesError, ...] = ()  # the options that apply to nothing of this one of several sections
    unused: tuple[Wording, ...] = ()  # options that supply what this section states itself
    left_out: bool = False  # whether options leave nothing of this one of several sections: no further step is taken

    @property
    def sources(self) -> Sources:
        return self.knowledge.sources

    @property
    def source_keys(self) -> KeyType | None:
        """How the source keyed the optimizer, if it is selected."""
        if self.applied_maps:
            return self.keys_before_map
        selected = self.checkpoint.optim is not None and self.opened.optim is not None
        return self.opened.optim.key_type if self.opened.optim is not None and selected else None

    @property
    def units_of_source(self) -> Units | None:
        """Those of a flattened source, else those of ``--units``, of all parameters."""
        return self.source_units.units if self.source_units is not None else self.knowledge.units

    @property
    def known_units(self) -> Units | None:
        """``units_of_source``, of the parameters that are selected."""
        return self.units_of_source if self.selection is None else self.selection.units

    @property
    def id_units(self) -> Units | None:
        """Those that map ids to parameters: ``known_units``, unless the order of the model is not among them."""
        in_order = self.source_units is None or self.source_units.order_known
        return self.known_units if in_order else None

    def with_selection(self, checkpoint: Checkpoint, changes: NameChanges) -> Draft:
        """The draft of ``checkpoint``, from which keys were left out; its units are those of what is left."""
        left = changes.selection()
        units, own = self.units_of_source, checkpoint.units
        return replace(
            self,
            checkpoint=checkpoint if own is None else replace(checkpoint, units=left.applied_to(own)),
            changes=changes,
            selection=Selection(None if units is None else left.applied_to(units)),
        )

    def with_checkpoint(self, checkpoint: Checkpoint) -> Draft:
        return self if checkpoint is self.checkpoint else replace(self, checkpoint=checkpoint)

    def with_unmatched(self, errors: Sequence[NoKeyMatchesError]) -> Draft:
        """Raises the first of ``errors``; of several sections another one may have what this one lacks."""
        if errors and not self.one_of_several:
            raise errors[0]
        return replace(self, unmatched=(*self.unmatched, *errors)) if errors else self

    @property
    def transformed(self) -> TransformedCheckpoint:
        return TransformedCheckpoint(self.checkpoint, self.units, self.key_type, self.applied_maps)


Step: TypeAlias = Callable[[Draft, Decision], Draft]


@dataclass(frozen=True, slots=True)
class TransformedCheckpoint:
    """The checkpoint to write, with whole tensors.

    ``units``: those of a flattened target. Its optimizer is keyed by name; the writer rekeys it to ``key_type``.
    ``applied_maps``: what each ``--map`` did.
    """

    checkpoint: Checkpoint
    units: Units | None = None
    key_type: KeyType | None = None
    applied_maps: tuple[AppliedMap, ...] = ()
