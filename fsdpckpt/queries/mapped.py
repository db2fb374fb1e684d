"""One side of a comparison as a layout map makes it: ``diff --map``."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.map_options import with_mapping
from fsdpckpt.converters.transform import transform_to_load
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.ir import Container, Layout
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.table import Table
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.commands import DiffOptions
from fsdpckpt.queries.opening import knowledge_of
from fsdpckpt.storage.sources import Sources


def mapped(
    a: Checkpoint, b: Checkpoint, options: DiffOptions, request: UnitsRequest, sources: Sources
) -> tuple[Checkpoint, str]:
    """``a`` as the maps of ``options`` make it, keyed by name, and a note that says so.

    ``request``: what the options say about units. The numbers of the model are those of a ``config.json`` beside either
    side, unless they are given. Raises what the conversion of ``a`` would raise.
    """
    chosen = ConvertOptions.of(
        **knowledge_of(options),
        map=options.map,
        inverse=options.inverse,
        map_value=options.map_value,
        only=options.only,
        key_type="name",
    )
    decision = with_mapping(
        Decision(Layout.FULL, Container.TORCH, None, chosen, directory=False), folders=(b.origin.directory,)
    )
    made = transform_to_load(a, decision, sources, request).checkpoint
    names = " and ".join(f"{flags.map_(name)}" for name in options.map)
    backwards = f" {flags.inverse}" if options.inverse else ""
    makes = "makes" if len(options.map) == 1 else "make"
    return _listed_as(made, b.optim), f"A is what {names}{backwards} {makes} of {a.source}"


def _listed_as(checkpoint: Checkpoint, other: Optimizer | None) -> Checkpoint:
    """``checkpoint`` with the names of each param group in the order in which the same group of ``other`` lists them.

    A map knows no order of the parameters that it makes, and for keys by name it means nothing.
    """
    table = Table.of(checkpoint)
    if other is None or other.groups is None or table.optimizer is None or table.optimizer.groups is None:
        return checkpoint
    names = table.member_names()
    own_lists = [group.members for group in table.optimizer.groups if group.members is not None]
    other_lists = other.in_groups()
    positions: list[dict[str, int]] = []
    for number, members in enumerate(own_lists):
        other_keys = other_lists[number] if number < len(other_lists) else []
        position = {clean(str(key)): at for at, key in enumerate(other_keys)}
        # A group of other parameters says nothing of the order of these.
        same_parameters = position.keys() == {clean(str(names[member])) for member in members}
        positions.append(position if same_parameters else {})
    return table.sorted_by(positions).written(checkpoint)
