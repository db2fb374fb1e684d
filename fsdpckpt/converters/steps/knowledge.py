"""What is known of names, order and units beside the checkpoint: what options say, and the files that they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, of_option
from fsdpckpt.flat.units.request import UnitsRequest, load_units, of_same_section
from fsdpckpt.flat.units.sections import request_of_section
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, NamedSection
from fsdpckpt.ir.sections import with_each_optimizer
from fsdpckpt.ir.units import Units
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.rekey import apply_key_type


@dataclass(frozen=True)
class Knowledge:
    """What ``request`` says. Each file that it names is read once, when first asked for, and all sections share it."""

    request: UnitsRequest
    sources: Sources

    def of(self, request: UnitsRequest) -> Knowledge:
        """What ``request`` says, this one if it says the same."""
        return self if request == self.request else Knowledge(request, self.sources)

    @cached_property
    def reference(self) -> Checkpoint | None:
        """The checkpoint of ``--reference``: its names, shapes and groups; no tensor of it is located."""
        path = self.request.reference
        if path is None:
            return None
        with of_option(flags.reference):
            reference = open_checkpoint(path, sources=self.sources, locate=Locate.NOTHING)
        return of_same_section(reference, self.request.sections)

    @cached_property
    def units(self) -> Units | None:
        """The units in the file of ``--units``."""
        request = self.request
        return load_units(request.file, self.sources, request.sections) if request.file is not None else None

    def keyed(
        self, checkpoint: Checkpoint, key_type: KeyType, units: Units | None, rule: IdRule = IdRule.GROUPS
    ) -> Checkpoint:
        """``checkpoint`` with its optimizer keyed by ``key_type``. ``units``: those that map its ids to parameters;
        ``rule``: how new ids count. Raises what ``apply_key_type`` raises.
        """
        return apply_key_type(
            checkpoint,
            key_type,
            units=units,
            reference=self.reference,
            parameters=self.request.parameters,
            parameter_groups=self.request.parameter_groups,
            buffers=self.request.buffers,
            rule=rule,
        )

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint`` with each of its optimizers keyed by name. Raises what ``apply_key_type`` raises."""

        def named(view: Checkpoint, section: NamedSection | None) -> Checkpoint:
            own = self
            if checkpoint.named:
                own = self.of(request_of_section(self.request, checkpoint, section, self.sources))
            return own.keyed(view, "name", own.units)

        return with_each_optimizer(checkpoint, named)

    def named_if_proved(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """What ``named`` returns; None if nothing proves which parameter each id is, or what is known contradicts it.

        For what only gains by names. A step that needs them asks ``named``, which says what is missing.
        """
        try:
            return self.named(checkpoint)
        except FsdpckptError:
            return None
