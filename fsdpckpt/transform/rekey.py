"""Rekeys an optimizer from ids to names and from names to ids, for every layout, by a proved parameter order.

``torch.optim`` numbers ids group by group, and within a group in the order of ``model.parameters()``, a shared
parameter once (``FSDP.rekey_optim_state_dict``). The proof: there are as many ids as parameters, and every state has a
shape that its parameter allows. An order that contradicts either is refused, and the error lists all contradictions; if
several maps are possible, the error lists the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note, OptimState, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.state_shapes import ShownShapes, fits
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.text import plural
from fsdpckpt.transform.naming import Ids, NewKeys, contradicted, does_not_fit, group_flaws, name_ids, shapes_text
from fsdpckpt.transform.parameter_order import (
    ParameterOrder,
    contradictions,
    listed_param_names,
    parameter_orders,
)


def apply_key_type(
    checkpoint: Checkpoint,
    key_type: KeyType | None,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    parameter_groups: Groups = (),
    buffers: Sequence[str] = (),
) -> Checkpoint:
    """Key the optimizer of ``checkpoint`` by ``key_type``; None keeps the keys.

    ``units``: those of the source or of ``--units``; None for those beside the checkpoint. ``reference``: a checkpoint
    whose model section states names, shapes and order, and whose optimizer the groups. ``parameters``: names in the
    order of ``model.parameters()``, or in the optimizer's own; ``parameter_groups``: how blank lines divide them.
    ``buffers``: globs of model keys that are not parameters.

    Raises NeedsInformationError if nothing states the order or several orders are possible, and SourceCorruptError if
    the sources contradict the optimizer or each other.
    """
    optim = checkpoint.optim
    if optim is None or key_type is None or optim.key_type in (None, key_type):
        return checkpoint
    orders = parameter_orders(
        checkpoint,
        units=units,
        reference=reference,
        parameters=parameters,
        parameter_groups=parameter_groups,
        buffers=tuple(buffers),
    )
    if not orders:
        raise NeedsInformationError(
            f"nothing in {checkpoint.source} says which parameter each optimizer "
            + ("id is" if key_type == "name" else "name's id is"),
            why="it has no model section, and its param groups have no param_names",
            next_step="add --reference PATH (a checkpoint of this model), --parameters FILE (the names of "
            "model.parameters(), one per line) or --units FILE",
        )
    first, *others = orders
    if first.caution is not None:
        caution = Note("rekeyed", first.caution, warning=True)
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, caution))
    return to_names(checkpoint, first, others) if key_type == "name" else to_ids(checkpoint, first, others)


def to_names(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by name. ``others``: further sources of the order, which must agree with it.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return checkpoint
    ids = Ids.of(optim, checkpoint.source)
    order = order.with_shapes_of(others)
    names = name_ids(ids, order)
    _require_agreement(checkpoint.source, order, others, [str(name) for name in names.values()])
    _require_param_names(checkpoint.source, optim, names, order)
    message = f"{plural(len(names), 'optimizer id')} became {plural(len(names), 'name')}, from {order.source}; the "
    with_shapes = sum(map(bool, ids.state_shapes))
    message += f"states of {plural(with_shapes, 'parameter')} have the shapes that this needs"
    return _with_keys(checkpoint, optim, names, message)


def to_ids(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by id; groups list their parameters in the order of their ids.

    Arguments and errors as for ``to_names``.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return checkpoint
    order = order.with_shapes_of(others)
    groups = _grouped_names(optim, order, checkpoint.source)
    _require_names_fit(optim, checkpoint.source, groups, order)
    _require_agreement(checkpoint.source, order, others, [clean(name) for name in chain(*groups)])
    names = chain(*(_in_id_order(group, index, order, checkpoint) for index, group in enumerate(groups)))
    ids: NewKeys = {name: number for number, name in enumerate(names)}
    if optim.param_groups is not None:
        optim = replace(optim, param_groups=[_sorted_group(group, ids) for group in optim.param_groups])
    message = f"{plural(len(ids), 'optimizer key')} became {plural(len(ids), 'id')}, in the order of {order.source}"
    return _with_keys(checkpoint, optim, ids, message)


def _require_agreement(source: str, used: ParameterOrder, others: Sequence[ParameterOrder], names: list[str]) -> None:
    """Raises SourceCorruptError if another order contradicts the one in use. ``names``: the optimizer's parameters."""
    for other in others:
        wrong = contradictions(used, other, names)
        if wrong:
            raise contradicted(f"{used.source} and {other.source} of {source} contradict each other", wrong)


def _require_param_names(source: str, optim: OptimState, names: NewKeys, order: ParameterOrder) -> None:
    """Raises SourceCorruptError when a group has ``param_names`` that differ from ``names``."""
    wrong = [
        f"id {key} is {name} in param_names, {names[key]} in {order.source}"
        for group in optim.param_groups or ()
        for key, name in zip(group_params(group) or (), listed_param_names(group) or (), strict=False)
        if name not in (names[key], f"module.{names[key]}")
    ]
    if wrong:
        raise contradicted(f"the param_names of {source} contradict {order.source}", wrong)


def _grouped_names(optim: OptimState, order: ParameterOrder, source: str) -> list[list[str]]:
    """The names that each group lists; without groups, those of an authoritative order."""
    if optim.param_groups is not None:
        return [[str(key) for key in group_params(group) or ()] for group in optim.param_groups]
    if not order.authoritative:
        raise NeedsInformationError(
            f"the optimizer of {source} has no param_groups, so {order.source} does not say which ids its states get",
            why="ids count in the order of the groups, over parameters without state too",
            next_step="add --parameters FILE (the parameters of the optimizer, one name a line) or --units FILE",
        )
    return [list(group) for group in order.groups] if order.groups is not None else [list(order.names)]


def _require_names_fit(optim: OptimState, source: str, groups: Sequence[Sequence[str]], order: ParameterOrder) -> None:
    """Raises SourceCorruptError for a name that the order lacks, is grouped twice or never, or has other shapes."""
    names, in_order, shown = list(chain(*groups)), set(order.names), ShownShapes(optim)
    keys = dict.fromkeys((*names, *map(str, optim.param_keys())))
    wrong = [f"{name} is not in {order.source}" for name in keys if clean(name) not in in_order]
    wrong += group_flaws(names, [key for key in optim.state if clean(str(key)) in in_order])
    for name in names:
        state_shapes = shown.of(name)
        shape = order.shape(clean(name))
        if not fits(shape, state_shapes):
            text = shapes_text(state_shapes)
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise does_not_fit(source, order, wrong)


def _in_id_order(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """The names of group ``index`` in the order of their ids."""
    groups = order.groups
    in_order = order.names if groups is None else groups[index] if index < len(groups) else ()
    position = {name: at for at, name in enumerate(in_order)}
    wrong = [f"{name} is not in group {index} of {order.source}" for name in names if clean(name) not in position]
    if wrong:
        raise contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
    if groups is None and not order.ordered and len(names) > 1:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}",
            why=f"{order.source} does not keep the order of the parameters, and ids count in it",
            next_step="add --parameters FILE (model.parameters(), one name a line), --units FILE, or --reference PATH "
            "of a torch or DCP checkpoint of this model",
        )
    result = sorted(names, key=lambda name: position[clean(name)])
    rebuilt = any(note.kind == "groups-rebuilt" for note in checkpoint.notes)
    if groups is None and rebuilt and result != list(names):
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in a different order than {order.source}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step="add --units FILE, which says the parameters of every group",
        )
    return result


def _with_keys(checkpoint: Checkpoint, optim: OptimState, keys: NewKeys, message: str) -> Checkpoint:
    """``checkpoint`` with new ``keys`` in its optimizer, and a note. Entries that a user added keep theirs.

    Raises SourceCorruptError if such an entry has the new key of a parameter.
    """
    new = set(keys.values())
    both = [str(key) for key in optim.state if key not in keys and key in new]
    if both:
        raise contradicted(f"the optimizer of {checkpoint.source} has states under both kinds of key", both)
    optim = optim.renamed({key: keys.get(key, key) for key in optim.all_keys()})
    return replace(checkpoint, optim=optim, notes=(*checkpoint.notes, Note("rekeyed", message)))


def _sorted_group(group: dict[Key, Value], ids: NewKeys) -> dict[Key, Value]:
    """``group`` with its parameters in the order of their ids.

    ``param_names`` are sorted with ``params``, unless both list the same names in different orders: then ``params``
    alone had been sorted by name, by ``FSDP.rekey_optim_state_dict``.
    """
    params, names = group_params(group), group.get("param_names")
    if params is None:
        return group
    indices = sorted(range(len(params)), key=lambda index: ids[params[index]])
    result: dict[Key, Value] = {**group, "params": [params[index] for index in indices]}
    if isinstance(names, (list, tuple)) and len(names) == len(params):
        keys, param_names = [clean(str(key)) for key in params], [clean(str(name)) for name in names]
        if keys == param_names or sorted(keys) != sorted(param_names):
            result["param_names"] = type(names)(names[index] for index in indices)
    return result
