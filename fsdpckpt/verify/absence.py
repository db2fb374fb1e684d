"""Decides whether it is a difference that one side of a comparison lacks a key, or only what its format cannot hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Section
from fsdpckpt.ir.optimizer import PARAMS
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, find_value
from fsdpckpt.producers import PLAIN
from fsdpckpt.producers.flavors import extra_keys
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.leaves import Address, Leaves, Path
from fsdpckpt.verify.measures import digest
from fsdpckpt.verify.repeated import is_endless
from fsdpckpt.verify.resumption import has_keys
from fsdpckpt.verify.wrappers import is_weights_only


@dataclass(frozen=True, eq=False)
class Absence:
    """Asks of keys that only one of two checkpoints has whether that counts. ``leaves_b``: those of ``b``."""

    a: Checkpoint
    b: Checkpoint
    sources: Sources
    leaves_b: Leaves
    _digests_b: dict[tuple[tuple[int, ...], str], set[str]] = field(default_factory=dict)  # of tensors of one form

    def counts(self, address: Address, value: Value, other: Checkpoint) -> bool:
        """Whether it is a difference that ``other`` lacks this key."""
        section, path, rank = address.section, address.path, address.rank
        if _has_no_place(address, value, other):
            return False
        if section is Section.MODEL:
            if other is self.a:
                return not (is_weights_only(self.a) and self._is_another_name_in_b(value))
            return section not in self._not_kept or not self._is_in_b(value)
        if section is Section.EXTRA and path[:1] in self._foreign_to(other):
            return False
        absent = self._absent_from_a if other is self.a else self._absent_from_b
        if section is Section.OPTIM and (path in absent or path[:2] in absent):
            return False
        return section not in self._not_kept and (rank is None or rank < len(other.rank_extra))

    @cached_property
    def _not_kept(self) -> frozenset[Section]:
        return _not_kept(self.a, self.b)

    def _foreign_to(self, other: Checkpoint) -> set[Path]:
        """The extras of the side that is not ``other`` whose names ``other``'s framework has for something else: there
        it cannot have them.
        """
        side = self.b if other is self.a else self.a
        flavor = flavor_named(other.flavor)
        opens = dict(chain.from_iterable(form.loader_opens for form in flavor.forms)) if flavor is not None else {}
        foreign: set[Path] = set()
        for key, expected in opens.items():
            value = find_value(side.extra, extra_keys(key))
            if value is not None and not has_keys(value, expected):
                foreign.add(extra_keys(key)[:1])
        return foreign

    @cached_property
    def _absent_from_a(self) -> set[Path]:
        return _missing_lists(self.a) | _lost_groups(self.a, self.b)

    @cached_property
    def _absent_from_b(self) -> set[Path]:
        return _missing_lists(self.b) | _lost_groups(self.b, self.a)

    def _is_another_name_in_b(self, value: Value) -> bool:
        """Whether B's model stores this tensor once, and has it under the name that A has, too."""
        place = value.location() if isinstance(value, Tensor) else None
        return place is not None and place in self._places_of_common_names

    @cached_property
    def _places_of_common_names(self) -> set[tuple[object, ...]]:
        params = self.a.params
        tensors = [
            leaf
            for address, leaf in self.leaves_b.items()
            if address.section is Section.MODEL and isinstance(leaf, Tensor) and address.path[0] in params
        ]
        return {place for leaf in tensors if (place := leaf.location()) is not None}

    def _is_in_b(self, value: Value) -> bool:
        """Whether B's model has these bytes under a different name: some frameworks store tied weights once."""
        if not isinstance(value, Tensor) or is_endless(value):
            return False
        form = value.shape, value.dtype.name
        if form not in self._digests_b:  # once: comparing each with each would read the square of their number
            reader_b = BlockReader(self.b.files, self.sources)
            self._digests_b[form] = {
                digest(reader_b, candidate)
                for address, candidate in self.leaves_b.items()
                if address.section is Section.MODEL and isinstance(candidate, Tensor)
                if (candidate.shape, candidate.dtype.name) == form and not is_endless(candidate)
            }
        return digest(BlockReader(self.a.files, self.sources), value) in self._digests_b[form]


def _has_no_place(address: Address, value: Value, other: Checkpoint) -> bool:
    """Whether a format has no place for ``value``: DCP for empty containers, flat parameters for None in place of the
    states of a parameter.
    """
    if isinstance(value, (dict, list, tuple)):
        return not value
    is_state = address.section is Section.OPTIM and address.path[0] == "state" and len(address.path) == 2
    return value is None and is_state and other.layout is Layout.FLATTENED


def _not_kept(a: Checkpoint, b: Checkpoint) -> frozenset[Section]:
    """The sections in which B's framework does not keep everything, if it is a different framework than A's.

    Each framework has extras of its own beside a model and its optimizer. A format for weights alone has neither
    optimizer nor extras, and has tied weights once.
    """
    if b.flavor in (PLAIN, a.flavor):
        return frozenset()
    return frozenset(Section) if is_weights_only(b) else frozenset({Section.EXTRA})


def _missing_lists(checkpoint: Checkpoint) -> set[Path]:
    """The paths of the ``params`` that param groups lack: Megatron does not store which parameters are in which group;
    ``--no-weight-decay`` says it.
    """
    groups = checkpoint.groups
    without_list = [index for index, group in enumerate(groups) if PARAMS not in group.settings]
    return {("param_groups", index, PARAMS) for index in without_list}


def _lost_groups(checkpoint: Checkpoint, other: Checkpoint) -> set[Path]:
    """The paths of ``other``'s param groups without parameters, if ``checkpoint`` has flattened keys, which cannot hold
    them.
    """
    if not checkpoint.origin.flattened_keys:
        return set()
    return {("param_groups", index) for index, group in enumerate(other.groups) if not group.members}
