"""What is known of names, order and units beside the checkpoint: what options say, and the files that they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, SourceError, of_option, required
from fsdpckpt.flat.units.request import UnitsRequest, load_units, of_same_section
from fsdpckpt.flat.units.sections import request_of_section
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, NamedSection
from fsdpckpt.ir.sections import with_each_optimizer
from fsdpckpt.ir.units import Units
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.rekey import apply_key_type, find_named
from fsdpckpt.transform.stated_orders import GivenNames


@dataclass(frozen=True)
class Knowledge:
    """What ``request`` says. Each file that it names is read once, when first asked for, and all sections share it."""

    request: UnitsRequest
    sources: Sources

    def of(self, request: UnitsRequest) -> Knowledge:
        """What ``request`` says, this one if it says the same."""
        return self if request == self.request else Knowledge(request, self.sources)

    @property
    def reference(self) -> Checkpoint | None:
        """The checkpoint of ``--reference``: its names, shapes and groups; no tensor of it is located.

        Raises what ``open_checkpoint`` raises.
        """
        return required(self.opened_reference)

    @cached_property
    def opened_reference(self) -> Checkpoint | FsdpckptError | None:
        """``reference``, or why it is no checkpoint that can be opened: a directory without weights may be given for
        its ``config.json``.
        """
        path = self.request.reference
        if path is None:
            return None
        try:
            with of_option(flags.reference):
                reference = open_checkpoint(path, sources=self.sources, locate=Locate.NOTHING)
        except FsdpckptError as error:
            return error
        return of_same_section(reference, self.request.sections)

    @property
    def reference_is_unreadable(self) -> bool:
        """Whether ``--reference`` names what is no checkpoint, as a directory with a ``config.json`` alone."""
        return isinstance(self.opened_reference, SourceError)

    @cached_property
    def units(self) -> Units | None:
        """The units in the file of ``--units``."""
        request = self.request
        return load_units(request.file, self.sources, request.sections) if request.file is not None else None

    def given_names(self, units: Units | None) -> GivenNames:
        """All that is known of names and order. ``units``: those that map ids to parameters. Raises what opening the
        reference raises.
        """
        request = self.request
        return GivenNames(
            units=units,
            reference=self.reference,
            parameters=request.parameters,
            parameter_groups=request.parameter_groups,
            buffers=request.buffers,
        )

    def keyed(
        self, checkpoint: Checkpoint, key_type: KeyType, units: Units | None, rule: IdRule = IdRule.GROUPS
    ) -> Checkpoint:
        """``checkpoint`` with its optimizer keyed by ``key_type``. ``units``: those that map its ids to parameters;
        ``rule``: how new ids count. Raises what ``apply_key_type`` raises.
        """
        return apply_key_type(checkpoint, key_type, self.given_names(units), rule=rule)

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint`` with each of its optimizers keyed by name. Raises what ``apply_key_type`` raises."""
        return required(self.find_named(checkpoint))

    def find_named(self, checkpoint: Checkpoint) -> Checkpoint | FsdpckptError:
        """``named``; if nothing proves which parameter each id is, or what is known contradicts it, the error."""
        unnamed: list[FsdpckptError] = []

        def found(view: Checkpoint, section: NamedSection | None) -> Checkpoint:
            own = self
            if checkpoint.named:
                own = self.of(request_of_section(self.request, checkpoint, section, self.sources))
            answer = own.find_named_alone(view, own.units)
            if isinstance(answer, FsdpckptError):
                unnamed.append(answer)
                return view
            return answer

        named = with_each_optimizer(checkpoint, found)
        return unnamed[0] if unnamed else named

    def find_named_alone(self, view: Checkpoint, units: Units | None) -> Checkpoint | FsdpckptError:
        """``find_named`` for a checkpoint with one optimizer. ``units``: those that map its ids to parameters."""
        if isinstance(self.opened_reference, FsdpckptError):
            return self.opened_reference
        return find_named(view, self.given_names(units))
