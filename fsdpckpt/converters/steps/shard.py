"""Decides which tensors are sharded on the ranks of the target. ``place`` decides how they lie on its mesh."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.rename import with_written_names
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.flat.names import name_contradictions
from fsdpckpt.ir import Container, Layout
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.listings import model_names
from fsdpckpt.transform.selection import KEYS_IN_MESSAGE, parameter_names
from fsdpckpt.transform.sharded import (
    ShardingHints,
    decide_sharded,
)


def shard(draft: Draft, decision: Decision) -> Draft:
    """Decide which tensors of a sharded target are sharded, with ``--buffers`` and ``--reference``."""
    if decision.layout is not Layout.SHARDED:
        return draft
    # A cut that a DCP loader does not expect costs nothing; a DTensor in place of a buffer does not load.
    strict = decision.container is Container.TORCH
    checkpoint = decide_sharded(draft.checkpoint, sharding_hints(draft, decision), strict=strict)
    units = draft.id_units
    uncut = units.unit_of().keys() - units.cut_in_sharded() if units is not None else frozenset()
    keys = tuple(name for name in parameter_names(checkpoint) if name in uncut)
    if not keys:
        return draft.with_checkpoint(checkpoint)
    message = f"{plural(len(keys), 'parameter', 'are')} whole on every rank, as FSDP1 has those of NO_SHARD units: "
    note = Note("units", message + some_of(keys, KEYS_IN_MESSAGE), keys=keys)
    return draft.with_checkpoint(checkpoint.noted(note))


def shard_as_units(draft: Draft, decision: Decision) -> Draft:
    """For a framework that shards one section and flattens the other: shard what the flattened one cuts."""
    if decision.form is None or draft.units is None:
        return draft
    hints = ShardingHints(reference=_in_units(draft.units, draft.checkpoint))
    return draft.with_checkpoint(decide_sharded(draft.checkpoint, hints, strict=True))


def sharding_hints(draft: Draft, decision: Decision) -> ShardingHints:
    """The hints from ``--buffers``, and from ``--reference`` or the units of the source."""
    checkpoint, opened = draft.checkpoint, draft.opened
    return ShardingHints(
        buffers=draft.knowledge.request.buffers,
        reference=_sharded_elsewhere(draft),
        written=dict(zip(_keys(checkpoint), _keys(with_written_names(draft, decision, checkpoint)), strict=True)),
        left_out=opened.optim if checkpoint.optim is None else None,
        all_keys=tuple(map(clean, _keys(opened))),
    )


def _keys(checkpoint: Checkpoint) -> list[str]:
    return list(checkpoint.params)


def _sharded_elsewhere(draft: Draft) -> Mapping[str, bool | None] | None:
    """Whether each model key is sharded in the reference, or by units that describe this model; None without both."""
    reference, units = draft.knowledge.reference, draft.id_units or draft.checkpoint.units
    if reference is not None:
        params = reference.params
        return {name: getattr(leaf, "sharded", None) for name, leaf in params.items()}
    if units is not None and _describe_model(units, draft.checkpoint):
        return _in_units(units, draft.checkpoint)
    return None


def _in_units(units: Units, checkpoint: Checkpoint) -> dict[str, bool]:
    """Each model key (without wrapper prefixes) to whether it names a parameter that FSDP1 shards."""
    sharded, first_names = units.cut_in_sharded(), dict(units.shared)
    return {name: first_names.get(name, name) in sharded for name in _keys(checkpoint)}


def _describe_model(units: Units, checkpoint: Checkpoint) -> bool:
    """Whether all parameters of ``units`` are in the model section, with their shapes."""
    names = model_names(checkpoint, "the model section")
    return names is not None and not any(name_contradictions(units, names, whole_model=False))
