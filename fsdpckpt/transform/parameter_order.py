"""Finds the order of an optimizer's parameters, which maps its ids to names and back.

Several sources may state it: a units file, ``param_names``, ``--parameters``, the units or the groups of a reference of
the same job; a model section has that of ``model.parameters()``. The first is used, and the others must agree with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import TypeVar

import numpy as np

from fsdpckpt import flags
from fsdpckpt.globs import matches_any
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ChunkChecksums, Container
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import clean, keeps_order, revisits_a_module, without_module
from fsdpckpt.ir.optimizer import Optimizer, ParamGroup
from fsdpckpt.ir.parameters import Named, Parameter, RowNumber
from fsdpckpt.ir.state_shapes import ShownShapes, fits, has_scalars
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Groups, Units, first_misplaced
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.transform.id_order import in_model_order, listed_order
from fsdpckpt.transform.listings import units_names, whole_tensors

_Row = TypeVar("_Row")

BY_USER = f"{flags.parameters}"
"""The source of the order that the user gives."""


class Doubt(Flag):
    """What is not certain of a name that a source lists.

    ``OPTIMIZER``: the optimizer may lack it (buffers, frozen parameters). ``MODEL``: ``model.parameters()`` may lack it
    (buffers, later names of shared parameters). ``PLAIN``: a plain tensor beside distributed ones, which is a buffer
    unless FSDP ignored a frozen parameter. ``ALIKE``: a vector that has the checksums of another one: it may be that
    one under a second name, or both are zeros since they were made.
    """

    OPTIMIZER = auto()
    MODEL = auto()
    PLAIN = auto()
    ALIKE = auto()


@dataclass(frozen=True)
class ParameterOrder(Listing):
    """A listing as the order of an optimizer's ids: what its source says of the optimizer, too.

    ``authoritative``: True for a source whose purpose is this order (``--parameters``, a units file), False for a model
    section. ``members``: the rows of the optimizer's groups, each in the order of its ids (in none if not ``ordered``),
    if known. ``complete``: whether every name of the model is in a row or in ``shared``. ``excludes_buffers``: False if
    buffers may be among the rows. ``caution``: a warning for whoever uses this order. ``doubts``: by row.
    ``unit_order``: the rows as FSDP1 lists those of flat parameters, () if it has none.
    """

    authoritative: bool = False
    members: tuple[tuple[RowNumber, ...], ...] | None = None
    complete: bool = False
    excludes_buffers: bool = True
    caution: str | None = None
    doubts: Mapping[RowNumber, Doubt] = field(default_factory=dict)
    unit_order: tuple[RowNumber, ...] = ()

    @classmethod
    def of_groups(cls, groups: Iterable[Sequence[Named]], source: str) -> ParameterOrder:
        """The groups of an optimizer, each in its order."""
        groups = list(groups)
        rows = tuple(chain(*groups))
        members = cut(range(len(rows)), list(map(len, groups)))
        return cls(rows, source, in_model_order=False, authoritative=True, members=members)

    @cached_property
    def groups(self) -> Groups | None:
        """``members`` by name."""
        return (
            None if self.members is None else tuple(tuple(map(self.names.__getitem__, rows)) for rows in self.members)
        )

    @cached_property
    def by_unit(self) -> tuple[str, ...]:
        """``unit_order`` by name."""
        return tuple(map(self.names.__getitem__, self.unit_order))

    @cached_property
    def uncertain(self) -> frozenset[str]:
        """The names that the optimizer may lack."""
        return self._with(Doubt.OPTIMIZER)

    @cached_property
    def doubtful(self) -> frozenset[str]:
        """The names that ``model.parameters()`` may lack."""
        return self._with(Doubt.MODEL)

    @cached_property
    def plain(self) -> frozenset[str]:
        """The names of plain tensors beside distributed ones."""
        return self._with(Doubt.PLAIN)

    @cached_property
    def alike(self) -> frozenset[str]:
        """The names of vectors that have the checksums of others, which proves nothing of them."""
        return self._with(Doubt.ALIKE)

    def _with(self, doubt: Doubt) -> frozenset[str]:
        return frozenset(self.names[row] for row, doubts in self.doubts.items() if doubt in doubts)

    def with_shapes_of(self, others: Sequence[Listing]) -> ParameterOrder:
        """Add the shapes that this source lacks from the first of ``others`` that has them."""
        known: dict[str, Parameter] = {}
        for listing in reversed(others):
            known.update({param.name: param for param in listing.params})
        rows = tuple(row if isinstance(row, Parameter) else known.get(row.name, row) for row in self.rows)
        return replace(self, rows=rows)


def parameter_orders(
    checkpoint: Checkpoint,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    parameter_groups: Groups = (),
    buffers: tuple[str, ...] = (),
) -> list[ParameterOrder]:
    """Every source that states an order, the best one first; those that do not preserve the order come last.

    ``parameter_groups``: how blank lines divide ``parameters``.
    """
    units = units if units is not None else checkpoint.units
    names = _names_in(checkpoint)
    orders: list[ParameterOrder | None] = []
    if units is not None:
        of_checkpoint = units is checkpoint.units and checkpoint.origin.units_from
        label = f"the units of {checkpoint.origin.units_from}" if of_checkpoint else "the units"
        orders.append(from_units(units, label).named_like(names))
    if checkpoint.optim is not None:
        listed_names = from_param_names(checkpoint.optim, names)
        orders.append(listed_names.named_like(names) if listed_names is not None else None)
    listed = None if parameters is None else from_list(parameters, names).named_like(names)
    told = [order.names for order in (*orders, listed) if order is not None]
    keyed = _keyed_names(checkpoint).union(*told, parameters or ())
    scalars = checkpoint.optim is not None and has_scalars(checkpoint.optim)
    models: list[ParameterOrder | None] = []
    if reference is not None:
        label = f"the reference {reference.source}"
        of_reference = from_model(reference, label, buffers, names, keyed, scalars=scalars)
        models.append(of_reference.named_like(names) if of_reference is not None else None)
    label = "the checkpoint's own model section"
    models.append(from_model(checkpoint, label, buffers, keyed=keyed, scalars=scalars))
    known = [order for order in (*models, *orders) if order is not None]
    of_model = next((order for order in known if order.ordered and order.in_model_order), None)
    if listed is not None:
        by_user = _as_optimizer_lists(listed, parameter_groups, checkpoint.optim, of_model)
        # Units without groups, or with those of flat parameters, do not say the optimizer's order, which ids count in.
        recorded = any(order.groups is not None and not order.by_unit for order in orders if order is not None)
        orders.insert(len(orders) if recorded or by_user.groups is None else 0, by_user)
    if reference is not None:
        orders.extend(_of_reference(reference, checkpoint, models[0], of_model))
    orders.extend(models)
    return sorted((order for order in orders if order is not None), key=lambda order: not order.ordered)


def _as_optimizer_lists(
    listed: ParameterOrder, divided: Groups, optim: Optimizer | None, of_model: ParameterOrder | None
) -> ParameterOrder:
    """``listed``, the user's list, with the optimizer's groups if it says them (``groups_by_user``)."""
    position: dict[str, int] | None = None
    if of_model is not None:
        position = {name: index for index, name in enumerate(of_model.names) if name not in of_model.uncertain}
    groups = None if optim is None else groups_by_user(listed.names, divided, optim, position)
    if groups is None:
        return listed
    members = cut(range(len(listed.rows)), list(map(len, groups)))
    source = f"{listed.source}, in the optimizer's order"
    return replace(listed, members=members, in_model_order=False, source=source)


def groups_by_user(
    names: Sequence[str], divided: Groups, optim: Optimizer, position: Mapping[str, int] | None
) -> Groups | None:
    """The groups of ``optim`` if the user's list ``names`` is in the optimizer's order; None if it is the model's.

    It is the optimizer's if blank lines divide it into as many parts as there are groups (``divided``), or if it has
    exactly the optimizer's parameters in an order that is not the model's. ``position``: of the parameters in the
    model, None if that is not known. A list for ids that is sorted by name is nobody's order; for names it answers a
    warning, and is meant.
    """
    sizes, parts = _group_sizes(optim), tuple(map(len, divided))
    if len(parts) == len(sizes) > 1 and sum(parts) == len(names):
        return cut(names, parts)
    sorted_for_ids = optim.key_type != "name" and list(names) == sorted(names)
    if not sizes or sum(sizes) != len(names) or position is None or sorted_for_ids:
        return None
    groups = cut(names, sizes)
    if first_misplaced(names, position) is None or (optim.key_type == "name" and not _have_the_keys(groups, optim)):
        return None
    return groups


def cut(rows: Sequence[_Row], sizes: Sequence[int]) -> tuple[tuple[_Row, ...], ...]:
    """``rows`` in parts of these sizes."""
    return tuple(tuple(rows[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True))


def _group_sizes(optim: Optimizer) -> tuple[int, ...]:
    return tuple(map(len, optim.in_groups()))


def _of_reference(
    reference: Checkpoint, checkpoint: Checkpoint, names: ParameterOrder | None, of_model: ParameterOrder | None
) -> Iterator[ParameterOrder]:
    """The orders that a reference of the same job states beside that of its model: its units, and its optimizer's
    groups. One that does not fit the optimizer of ``checkpoint`` is of another job, and says nothing of this one.

    ``names``: those of the reference's model. ``of_model``: the order of the model, if that is known.
    """
    optim = checkpoint.optim
    if optim is None:
        return
    stated: list[ParameterOrder | None] = []
    if reference.units is not None:
        stated.append(from_units(reference.units, f"the units of {reference.origin.units_from}"))
    if reference.optim is not None:
        source = f"the param groups of {reference.source}"
        stated.append(from_param_names(reference.optim, _names_in(checkpoint)))
        listed = from_groups(reference.optim, source, _names_in(checkpoint))
        stated.append(_as_job_lists(listed.named_like(_names_in(checkpoint)), of_model) if listed is not None else None)
    for order in stated:
        if order is None:
            continue
        like = order.named_like(_names_in(checkpoint))
        with_shapes = like.with_shapes_of([each for each in (names, of_model) if each is not None])
        if _may_be_groups_of(optim, with_shapes):
            yield with_shapes


def from_groups(optim: Optimizer, source: str, names_to_match: Collection[str] = ()) -> ParameterOrder | None:
    """The groups of an optimizer that is keyed by name, each in its order. ``names_to_match``: as for
    ``from_param_names``. None for other optimizers.
    """
    if optim.key_type != "name" or optim.groups is None:
        return None
    groups = [[clean(str(key)) for key in keys] for keys in optim.in_groups()]
    names = without_module(chain(*groups), names_to_match)
    if not names or len(set(names)) != len(names) or any(map(is_flat_key, names)):
        return None
    remaining = map(Named, names)
    return ParameterOrder.of_groups(([next(remaining) for _ in group] for group in groups), source)


def _as_job_lists(order: ParameterOrder, of_model: ParameterOrder | None) -> ParameterOrder:
    """``order``, that of groups, in the model's order if their lists prove nothing of the job's (``listed_order``);
    without order if that of the model is not known.
    """
    groups = order.groups or ()
    position = {name: index for index, name in enumerate(of_model.names if of_model is not None else ())}
    known = bool(position) and all(name in position for name in chain(*groups))
    listed = listed_order(groups, position if known else None)
    if listed is not None and listed.own:
        return order
    if listed is None or of_model is None:
        return replace(order, ordered=False, authoritative=False)
    row_of = {row.name: row for row in order.rows}
    resorted = ([row_of[name] for name in in_model_order(group, position)] for group in groups)
    in_order = ParameterOrder.of_groups(resorted, f"{order.source}, in the order of {of_model.source}")
    return replace(in_order, caution=f"{order.source}: {listed.doubt}")


def _may_be_groups_of(optim: Optimizer, order: ParameterOrder) -> bool:
    """Whether the groups of ``order`` may be those of ``optim``: as large, with states of these shapes."""
    groups = order.groups
    if groups is None or optim.groups is None or tuple(map(len, groups)) != _group_sizes(optim):
        return False
    if optim.key_type != "id":
        return _have_the_keys(groups, optim)
    shown = ShownShapes(optim)
    keys = optim.grouped_keys()
    if order.ordered:
        return all(fits(order.shape(name), shown.of(key)) for key, name in zip(keys, chain(*groups), strict=True))
    candidates = chain.from_iterable(repeat({order.shape(name) for name in group}, len(group)) for group in groups)
    return all(
        any(fits(shape, shown.of(key)) for shape in shapes) for key, shapes in zip(keys, candidates, strict=True)
    )


def _have_the_keys(groups: Groups, optim: Optimizer) -> bool:
    """Whether each group of ``optim``, which is keyed by name, has the names of one of ``groups``, in any order."""
    of_optim = [{clean(str(key)) for key in keys} for keys in optim.in_groups()]
    return of_optim == [set(group) for group in groups]


def _names_in(checkpoint: Checkpoint) -> list[str]:
    """The names that the checkpoint itself uses."""
    if checkpoint.model is not None:
        return list(checkpoint.model.params)
    return [key for key in checkpoint.optim.state if isinstance(key, str)] if checkpoint.optim is not None else []


def _keyed_names(checkpoint: Checkpoint) -> set[str]:
    """The names that the optimizer has states or groups for."""
    if checkpoint.optim is None:
        return set()
    return {clean(key) for key in checkpoint.optim.all_keys() if isinstance(key, str)}


def from_units(units: Units, source: str) -> ParameterOrder:
    """The order in a units file, which also has shapes, groups and shared names."""
    listing = units_names(units, source)
    row_of = {name: row for row, name in enumerate(listing.names)}
    groups = units.named_groups()
    frozen = [row for row, param in enumerate(listing.params) if not param.requires_grad]
    return ParameterOrder(
        listing.rows,
        source,
        shared=listing.shared,
        authoritative=True,
        members=None if groups is None else tuple(tuple(map(row_of.__getitem__, names)) for names in groups),
        complete=True,
        doubts=dict.fromkeys(frozen, Doubt.OPTIMIZER),
        unit_order=tuple(map(row_of.__getitem__, units.listed_by_unit())),
    )


def from_param_names(optim: Optimizer, names_to_match: Collection[str] = ()) -> ParameterOrder | None:
    """The ``param_names`` of an optimizer built from ``named_parameters()``; None unless every key has one.

    Names of flat parameters do not count: each stands for many parameters. If the keys are names too, both must be the
    same set, because keys may have been renamed; their order may differ, because ``rekey_optim_state_dict`` sorts the
    keys and leaves ``param_names`` in the optimizer's order. A ``module.`` prefix on all names is removed unless
    ``names_to_match`` have it.
    """
    groups = [listed_param_names(group) for group in optim.groups or ()]
    names = without_module([name for group in groups for name in group or ()], names_to_match)
    if not names or None in groups or len(set(names)) != len(names):
        return None
    keys = optim.grouped_keys()
    if any(isinstance(key, str) for key in keys) and {clean(str(key)) for key in keys} != set(names):
        return None
    remaining = map(Named, names)
    listed = ([next(remaining) for _ in group or ()] for group in groups)
    return ParameterOrder.of_groups(listed, "param_names in the groups")


def listed_param_names(group: ParamGroup) -> list[str] | None:
    """The clean ``param_names`` of one group; None unless there is one for each key, and none is a flat parameter's."""
    names = [clean(word) for word in group.words() if isinstance(word, str)]
    return None if len(names) != len(group.members or ()) or any(map(is_flat_key, names)) else names


def from_list(names: Sequence[str], names_to_match: Collection[str] = ()) -> ParameterOrder:
    """The order listed by the user. ``names_to_match``: as for ``from_param_names``."""
    cleaned = without_module(dict.fromkeys(clean(name) for name in names), names_to_match)
    return ParameterOrder(tuple(map(Named, cleaned)), BY_USER, authoritative=True)


def from_model(
    checkpoint: Checkpoint,
    source: str,
    buffers: Sequence[str] = (),
    names_to_match: Collection[str] | None = None,
    keyed: Collection[str] = (),
    *,
    scalars: bool = False,
) -> ParameterOrder | None:
    """The order of a checkpoint's model section: a ``state_dict`` lists parameters in order, with buffers among them.

    ``buffers``: globs of keys that are not parameters. ``names_to_match``: as for ``from_param_names``; None keeps the
    prefix. ``keyed``: the names that have optimizer states or are in groups; they are parameters even if they are
    0-dim. ``scalars``: any 0-dim tensor may be a parameter. A key with the same bytes in the file as an earlier one is
    the same parameter under another name; one with the same shape and checksums may be. None without a model section of
    whole tensors.
    """
    if checkpoint.model is None:
        return None
    no_buffers = tuple(buffers) == NO_BUFFERS
    cleaned = [clean(name) for name in checkpoint.model.params]
    renamed = cleaned if names_to_match is None else without_module(cleaned, names_to_match)
    name_of = dict(zip(checkpoint.model.params, renamed, strict=True))
    tensors: dict[str, Tensor] = {}
    for key, leaf in whole_tensors(checkpoint.model):
        name = name_of[key]
        if (leaf.ndim or scalars or name in keyed) and _may_be_parameter(name, leaf, buffers):
            tensors[name] = leaf
    if not tensors:
        return None
    shared, uncertain = _repeats(tensors, checkpoint.checksums)
    alike = {name for name in uncertain if tensors[name].ndim < 2}
    names = [name for name in tensors if name not in shared]
    open_names = [] if buffers else [name for name in names if tensors[name].sharded is not True and name not in keyed]
    # Beside distributed tensors a plain one is a buffer. A DCP directory has small parameters in one piece, too.
    plain = {name for name in open_names if tensors[name].sharded is False and checkpoint.container == Container.TORCH}
    doubtful = {*uncertain, *open_names} - plain
    if not no_buffers and any(tensor.sharded for tensor in tensors.values()):
        uncertain.update(name for name in names if tensors[name].sharded is not True)
    excludes_buffers = bool(buffers) or any(tensor.sharded is not None for tensor in tensors.values())
    doubts: dict[RowNumber, Doubt] = {}
    for row, name in enumerate(names):
        doubt = Doubt.OPTIMIZER if name in uncertain else Doubt(0)
        if name in plain:
            doubt |= Doubt.PLAIN
        elif name in doubtful:
            doubt |= Doubt.MODEL
        doubt |= Doubt.ALIKE if name in alike else Doubt(0)
        if doubt:
            doubts[row] = doubt
    held = ((name, tensors[name]) for name in names)
    rows = tuple(Parameter(name, leaf.shape, leaf.dtype, sharded=leaf.sharded) for name, leaf in held)
    possible = [row.name for row in rows if row.possible]
    ordered = keeps_order(checkpoint, names) and not revisits_a_module(possible)
    return ParameterOrder(rows, source, ordered, excludes_buffers=excludes_buffers, doubts=doubts)


def _may_be_parameter(name: str, tensor: Tensor, buffers: Sequence[str]) -> bool:
    """Whether FSDP accepts ``tensor`` as a parameter (floating or complex), and no glob of ``buffers`` matches it."""
    if tuple(buffers) != NO_BUFFERS and matches_any(name, buffers):
        return False
    return tensor.dtype.kind in ("float", "complex") or tensor.sharded is True


def _repeats(tensors: Mapping[str, Tensor], checksums: Checksums) -> tuple[set[str], set[str]]:
    """The keys that have the bytes of an earlier key, and those that only have the checksums of one."""
    chunk_checksums = ChunkChecksums(checksums)
    same_bytes: set[str] = set()
    same_checksums: set[str] = set()
    locations: set[object] = set()
    contents: set[object] = set()
    for name, tensor in tensors.items():
        location = tensor.location()
        if location in locations:
            same_bytes.add(name)
        elif location is not None:
            locations.add(location)
            content = _content(tensor, chunk_checksums)
            if content in contents:
                same_checksums.add(name)
            elif content is not None:
                contents.add(content)
    return same_bytes, same_checksums


def _content(tensor: Tensor, checksums: ChunkChecksums) -> tuple[object, ...] | None:
    """The shape, dtype, chunks and checksums of a tensor; None if some checksum is not known."""
    chunks = tensor.chunks
    crcs = np.where(chunks.size.all(axis=1), checksums.of(tensor), 1)
    if (crcs <= 0).any():  # a CRC of 0 may be one that was not computed
        return None
    columns = (chunks.start, chunks.size, chunks.stride, crcs)
    return tensor.shape, tensor.dtype.name, *(column.tobytes() for column in columns)


def contradictions(used: ParameterOrder, other: ParameterOrder, keyed: Collection[str]) -> list[str]:
    """Everything in which ``other`` contradicts the order in use. ``keyed``: the optimizer's names."""
    other_names = {*other.names, *(later for later, _ in other.shared)}
    result = [f"{name} is not in {other.source}" for name in keyed if name not in other_names]
    result += _differing_shapes(used, other)
    if used.complete and other.excludes_buffers:
        used_names = {*used.names, *(later for later, _ in used.shared)}
        missing = [name for name in other.names if name not in used_names and name not in other.uncertain]
        result += [f"{name} of {other.source} is not in {used.source}" for name in missing]
    if used.groups is not None and other.groups is not None:
        result += _differing_groups(used, other)
    if used.ordered and other.ordered and used.in_model_order and other.in_model_order:
        result += _first_difference_in_order(used, other)
    return result


def _differing_shapes(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    return [
        f"{name} has shape {list(shape)} in {used.source}, {list(other_shape)} in {other.source}"
        for name in used.names
        if (shape := used.shape(name)) is not None
        and (other_shape := other.shape(name)) is not None
        and shape != other_shape
    ]


def _differing_groups(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    groups, other_groups = used.groups or (), other.groups or ()
    if len(groups) != len(other_groups):
        return [f"{used.source} has {len(groups)} groups, {other.source} {len(other_groups)}"]
    assumed = used.caution is not None or other.caution is not None
    by_unit = used.by_unit or other.by_unit  # flat parameters have an order, and those in them have not
    order_counts = used.ordered and other.ordered and not assumed and not by_unit
    return [
        f"group {number}: {used.source} and {other.source} list different parameters, or list them in a different order"
        for number, (group, other_group) in enumerate(zip(groups, other_groups, strict=True))
        if (group != other_group if order_counts else {*group} != {*other_group})
    ]


def _first_difference_in_order(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    """The first place where two orders differ, a list of one line; empty if they do not.

    Skips names that either is uncertain of: FSDP1 registers the parameters it manages again, after those it ignores.
    """
    uncertain = used.uncertain | other.uncertain
    position = {name: index for index, name in enumerate(other.names) if name not in uncertain}
    misplaced = first_misplaced((name for name in used.names if name not in uncertain), position)
    if misplaced is None:
        return []
    name, expected = misplaced
    return [f"{used.source} and {other.source} differ in order: one has {name} where the other has {expected}"]
