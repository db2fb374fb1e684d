"""Finds the order of an optimizer's parameters, which maps its ids to names and back.

Several sources may state it: a units file, ``param_names``, ``--parameters``, the units or the groups of a reference of
the same job; a model section has that of ``model.parameters()``. The first is used, and the others must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat

import numpy as np

from fsdpckpt import flags
from fsdpckpt.globs import matches_any
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ChunkChecksums, Container
from fsdpckpt.ir.names import clean, keeps_order, without_module
from fsdpckpt.ir.optimizer import Group, Optimizer
from fsdpckpt.ir.state_shapes import Shape, ShownShapes, fits, has_scalars
from fsdpckpt.ir.tensors import Slices, Tensor
from fsdpckpt.ir.units import Groups, Units, first_misplaced
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.transform.id_order import in_model_order, listed_order

BY_USER = f"{flags.parameters}"
"""The source of the order that the user gives."""


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """Parameter names in the order of ``model.parameters()``, and how much is known about them.

    ``names``: without wrapper prefixes; a shared parameter once if that is known. ``source``: where they are from, for
    messages. ``ordered``: False if the source does not preserve the order. ``authoritative``: True for a source whose
    purpose is this order (``--parameters``, a units file), False for a model section. ``shapes``: those that are known.
    ``uncertain``: names that the optimizer may lack (buffers, frozen parameters). ``groups``: the optimizer's groups,
    each in the order of its ids (in none if not ``ordered``), if known. ``shared``: later names of shared parameters;
    None if the source cannot say.
    ``excludes_buffers``: False if buffers may be among ``names``. ``in_model_order``: False if ``names`` are in the
    optimizer's order, which may differ from the model's. ``caution``: a warning for whoever uses this order.
    ``doubtful``: names that ``model.parameters()`` may lack: buffers, and later names of shared parameters.
    ``plain``: names of plain tensors beside distributed ones: buffers, unless FSDP ignored a frozen parameter.
    ``by_unit``: the names as FSDP1 lists those of flat parameters, () if it has none.
    """

    names: tuple[str, ...]
    shapes: Mapping[str, Shape] | None = None
    source: str = "the parameter order"
    ordered: bool = True
    authoritative: bool = False
    uncertain: frozenset[str] = frozenset()
    groups: tuple[tuple[str, ...], ...] | None = None
    shared: frozenset[str] | None = None
    excludes_buffers: bool = True
    in_model_order: bool = True
    caution: str | None = None
    doubtful: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    by_unit: tuple[str, ...] = ()

    def shape(self, name: str) -> Shape | None:
        return None if self.shapes is None else self.shapes.get(name)

    def with_shapes_of(self, others: Sequence[ParameterOrder]) -> ParameterOrder:
        """Add the shapes that this source lacks from the first of ``others`` that has them."""
        shapes: dict[str, Shape] = {}
        for order in (*reversed(others), self):
            shapes.update(order.shapes or {})
        return replace(self, shapes={name: shapes[name] for name in self.names if name in shapes})

    def named_like(self, names: Collection[str]) -> ParameterOrder:
        """The order with ``module.`` (of DistributedDataParallel) before all names or before none, as ``names`` are."""
        distributed = "module."
        ours = {name.startswith(distributed) for name in self.names}
        theirs = {clean(name).startswith(distributed) for name in names}
        if len(ours) != 1 or len(theirs) != 1 or ours == theirs:
            return self
        if ours == {True}:
            return self._renamed(lambda name: name.removeprefix(distributed))
        return self._renamed(lambda name: distributed + name)

    def _renamed(self, new: Callable[[str], str]) -> ParameterOrder:
        def each(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(map(new, names))

        return replace(
            self,
            names=each(self.names),
            shapes=None if self.shapes is None else {new(name): shape for name, shape in self.shapes.items()},
            uncertain=frozenset(each(self.uncertain)),
            groups=None if self.groups is None else tuple(map(each, self.groups)),
            shared=None if self.shared is None else frozenset(each(self.shared)),
            doubtful=frozenset(each(self.doubtful)),
            plain=frozenset(each(self.plain)),
            by_unit=each(self.by_unit),
        )


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
        orders.append(from_param_names(checkpoint.optim, names))
    keyed = _keyed_names(checkpoint).union(*(order.names for order in orders if order is not None), parameters or ())
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
    if parameters is not None:
        listed = from_list(parameters, names).named_like(names)
        orders.append(_as_optimizer_lists(listed, parameter_groups, checkpoint.optim, of_model))
    if reference is not None:
        orders.extend(_of_reference(reference, checkpoint, models[0], of_model))
    orders.extend(models)
    return sorted((order for order in orders if order is not None), key=lambda order: not order.ordered)


def _as_optimizer_lists(
    listed: ParameterOrder, divided: Groups, optim: Optimizer | None, of_model: ParameterOrder | None
) -> ParameterOrder:
    """``listed``, the user's list, with the optimizer's groups if it says them.

    It does if blank lines divide it into as many parts as there are groups (``divided``), or if it has exactly the
    optimizer's parameters in an order that is not the model's: then it is the optimizer's own. A list for ids that is
    sorted by name is nobody's order; for names it answers a warning, and is meant.
    """
    sizes = () if optim is None else _group_sizes(optim)
    if not sizes:
        return listed
    names = listed.names
    parts = tuple(map(len, divided))
    if len(parts) == len(sizes) > 1 and sum(parts) == len(names):
        return replace(listed, groups=_cut(names, parts), in_model_order=False)
    by_name = optim is not None and optim.key_type == "name"
    sorted_for_ids = not by_name and list(names) == sorted(names)
    if sum(sizes) != len(names) or of_model is None or sorted_for_ids:
        return listed
    position = {name: index for index, name in enumerate(of_model.names) if name not in of_model.uncertain}
    if first_misplaced(names, position) is None:
        return listed
    cut = _cut(names, sizes)
    if optim is not None and optim.key_type == "name" and not _have_the_keys(cut, optim):
        return listed
    return replace(listed, groups=cut, in_model_order=False, source=f"{listed.source}, in the optimizer's order")


def _cut(names: tuple[str, ...], sizes: Sequence[int]) -> Groups:
    """``names`` in parts of these sizes."""
    return tuple(names[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True))


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
    remaining = iter(names)
    regrouped = tuple(tuple(next(remaining) for _ in group) for group in groups)
    return ParameterOrder(names=names, source=source, authoritative=True, groups=regrouped, in_model_order=False)


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
    resorted = tuple(tuple(in_model_order(group, position)) for group in groups)
    return replace(
        order,
        groups=resorted,
        names=tuple(chain(*resorted)),
        source=f"{order.source}, in the order of {of_model.source}",
        caution=f"{order.source}: {listed.doubt}",
    )


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
    params = units.params()
    names = tuple(name for name in units.parameters if name in params)
    return ParameterOrder(
        names=names,
        shapes={name: params[name].shape for name in names},
        source=source,
        authoritative=True,
        uncertain=frozenset(name for name in names if not params[name].requires_grad),
        groups=units.named_groups(),
        shared=frozenset(later for later, _ in units.shared),
        by_unit=units.listed_by_unit(),
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
    remaining = iter(names)
    regrouped = tuple(tuple(next(remaining) for _ in group or ()) for group in groups)
    keys = optim.grouped_keys()
    if any(isinstance(key, str) for key in keys) and {clean(str(key)) for key in keys} != set(names):
        return None
    source = "param_names in the groups"
    return ParameterOrder(names=names, source=source, authoritative=True, groups=regrouped, in_model_order=False)


def listed_param_names(group: Group) -> list[str] | None:
    """The clean ``param_names`` of one group; None unless there is one for each key, and none is a flat parameter's."""
    names = [clean(word) for word in group.words() if isinstance(word, str)]
    return None if len(names) != len(group.members or ()) or any(map(is_flat_key, names)) else names


def from_list(names: Sequence[str], names_to_match: Collection[str] = ()) -> ParameterOrder:
    """The order listed by the user. ``names_to_match``: as for ``from_param_names``."""
    cleaned = without_module(dict.fromkeys(clean(name) for name in names), names_to_match)
    return ParameterOrder(names=cleaned, source=BY_USER, authoritative=True)


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
    tensors = {
        name: leaf
        for name, leaf in zip(renamed, checkpoint.model.params.values(), strict=True)
        if isinstance(leaf, Tensor)
        and (leaf.ndim or scalars or name in keyed)
        and _may_be_parameter(name, leaf, buffers)
    }
    if not tensors:
        return None
    shared, uncertain = _repeats(tensors, checkpoint.checksums)
    names = tuple(name for name in tensors if name not in shared)
    open_names = [] if buffers else [name for name in names if tensors[name].sharded is not True and name not in keyed]
    # Beside distributed tensors a plain one is a buffer. A DCP directory has small parameters in one piece, too.
    plain = {name for name in open_names if tensors[name].sharded is False and checkpoint.container == Container.TORCH}
    doubtful = frozenset((*uncertain, *open_names)) - plain
    if not no_buffers and any(tensor.sharded for tensor in tensors.values()):
        uncertain.update(name for name in names if tensors[name].sharded is not True)
    excludes_buffers = bool(buffers) or any(tensor.sharded is not None for tensor in tensors.values())
    return ParameterOrder(
        names=names,
        shapes={name: tensors[name].shape for name in names},
        source=source,
        ordered=keeps_order(checkpoint, names),
        uncertain=frozenset(uncertain),
        excludes_buffers=excludes_buffers,
        doubtful=doubtful,
        plain=frozenset(plain),
    )


def _may_be_parameter(name: str, tensor: Tensor, buffers: Sequence[str]) -> bool:
    """Whether FSDP accepts ``tensor`` as a parameter (floating or complex), and no glob of ``buffers`` matches it."""
    if isinstance(tensor.cut, Slices) or is_flat_key(name):
        return False
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
    other_names = {*other.names, *(other.shared or ())}
    result = [f"{name} is not in {other.source}" for name in keyed if name not in other_names]
    result += _differing_shapes(used, other)
    if used.shared is not None and other.excludes_buffers:
        used_names = {*used.names, *used.shared}
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
    order_counts = used.ordered and other.ordered and not assumed
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
