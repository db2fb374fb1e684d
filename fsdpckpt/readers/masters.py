"""Ties the master weights of a mixed-precision wrapper around an optimizer to the parameters of the model.

Such a wrapper saves ``{<masters>: [[tensor, ...], ...], <inner>: optimizer.state_dict(), ...}``: a list for each param
group, with the float32 weight of each parameter that the model holds in another dtype, in the order of the group.
DeepSpeed's ``FP16_UnfusedOptimizer`` (ZeRO 0 in fp16 or bf16), Megatron-LM's ``Float16OptimizerWithFloat16Params`` and
apex's ``FP16_Optimizer`` do. DeepSpeed's ``FP16_Optimizer``, which it takes for its fused Adam, has one flat tensor for
each param group instead, and the optimizer that it wraps has one parameter for each group.

The lists have no names, and an optimizer may have another order than the model: what ties a master to a parameter is
proved by value (``same_weights``). Where the order differs, the values say which parameter each optimizer id is, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, Problem, Section
from fsdpckpt.ir.frame import remainder
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import OwnValue, ParamKey
from fsdpckpt.ir.placements import Flattened
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, Value, find_value, replaced
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import dotted
from fsdpckpt.readers.same_weights import KnownCopies, first_different, names_by_value
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural
from fsdpckpt.transform.rekey import find_named

_MASTERS = ("fp32_groups", "fp32_from_fp16_params", "fp32_from_fp16_groups", "fp32_from_fp16")
_FLAT_MASTERS = "fp32_groups_flat"
_MASTER_DTYPE = "float32"

_Place: TypeAlias = tuple[bytes, bytes, bytes, tuple[int, ...]]


def with_masters(checkpoint: Checkpoint, sources: Sources) -> Checkpoint:
    """``checkpoint`` with the optimizer's master weights as its trained parameters, if a wrapper holds them.

    Masters that nothing ties to parameters stay extras, with a note; those of other shapes are a fatal problem, and so
    are those that round to other values than the model's copies.
    """
    without_untied = _with_untied(checkpoint, "")
    place, wrapper = _wrapper(without_untied)
    if without_untied.model is None or not wrapper:
        return without_untied
    wrapped = replace(without_untied, origin=replace(without_untied.origin, has_masters=True))
    divided = _with_flat_ones_divided(wrapped, place, wrapper, sources)
    if divided is None:
        return _with_untied(wrapped, dotted((*place, _FLAT_MASTERS)))
    place, wrapper = _wrapper(divided)
    found = _masters(wrapper)
    if found is None:
        return divided
    key, groups = found
    return _with_tied(wrapped, divided, (*place, key), groups, sources)


def _with_flat_ones_divided(
    checkpoint: Checkpoint, place: tuple[Key, ...], wrapper: dict[Key, Value], sources: Sources
) -> Checkpoint | None:
    """``checkpoint``, whose master weights have no flat tensors any more; None if nothing proves what is in them."""
    if _FLAT_MASTERS not in wrapper:
        return checkpoint
    by_length = _divided(checkpoint, place, wrapper)
    return by_length if by_length is not None else _divided_by_value(checkpoint, place, wrapper, sources)


def has_untied_masters(checkpoint: Checkpoint) -> bool:
    """Whether master weights are among the extras, because nothing said whose they are."""
    return checkpoint.model is not None and _masters(_wrapper(checkpoint)[1]) is not None


def _with_tied(
    saved: Checkpoint, checkpoint: Checkpoint, path: tuple[Key, ...], groups: list[list[Tensor]], sources: Sources
) -> Checkpoint:
    """``checkpoint`` with the masters in ``groups``, which are extras at ``path``, as parameters. ``saved``: the
    checkpoint before a flat tensor was divided.
    """
    wrong = _lists_that_do_not_fit(checkpoint, path, groups)
    if wrong:
        return checkpoint.with_problems(*wrong)
    names, pairs = _member_names(checkpoint), None
    if names is not None and checkpoint.model is not None:
        pairs = _pairs(names, groups, checkpoint.model)
    if pairs is None:
        copies = {name: leaf for name, leaf in _trained(checkpoint) if leaf.dtype.name != _MASTER_DTYPE}
        return _tied_by_value(checkpoint, path, groups, copies, sources) or _with_untied(checkpoint, dotted(path))
    misfits = [
        Problem(
            "state",
            f"model {name} is {list(copy.shape)}, and its master weight in {dotted(path)} is {list(master.shape)}",
            key=name,
            section=Section.MODEL,
        )
        for name, copy, master in pairs
        if copy.shape != master.shape
    ]
    if misfits:
        return checkpoint.with_problems(*misfits)
    different = first_different(pairs, checkpoint.files, sources)
    if different is not None:
        path = (*path[:-1], _FLAT_MASTERS) if checkpoint is not saved else path
        return _in_another_order(saved, path, groups, pairs, different, sources)
    return _with_params(checkpoint, path, pairs)


def _lists_that_do_not_fit(
    checkpoint: Checkpoint, path: tuple[Key, ...], groups: Sequence[Sequence[Tensor]]
) -> list[Problem]:
    """A fatal problem for each param group that has more or fewer master weights than parameters.

    A wrapper keeps none of a parameter that is frozen, which has no states, or float32 itself.
    """
    optim, model = checkpoint.optim, checkpoint.model
    if optim is None or model is None or optim.groups is None:
        return []
    what = f"{dotted(path)}, the optimizer's {_MASTER_DTYPE} weights,"
    members = optim.in_groups()
    if len(members) != len(groups):
        count = f"{plural(len(groups), 'list')}, and the optimizer {plural(len(members), 'param group')}"
        return [Problem("master", f"{what} has {count}", section=Section.OPTIM)]
    themselves = sum(leaf.dtype.name == _MASTER_DTYPE for _, leaf in _trained(checkpoint))
    wrong: list[Problem] = []
    for number, (keys, masters) in enumerate(zip(members, groups, strict=True)):
        trained = sum(bool(optim.state.get(key)) for key in keys)
        if len(masters) > len(keys) or len(masters) < trained - themselves:
            held = f"{len(masters)} for the {plural(len(keys), 'parameter')} of group {number}"
            wrong.append(Problem("master", f"{what} has {held}", section=Section.OPTIM))
    return wrong


def _in_another_order(
    checkpoint: Checkpoint,
    path: tuple[Key, ...],
    groups: Sequence[Sequence[Tensor]],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    different: str,
    sources: Sources,
) -> Checkpoint:
    """``checkpoint`` with the masters in ``groups`` at ``path`` tied by their values, which say what each optimizer id
    is; with a fatal problem if they do not say it of all. ``pairs``: as the order of the model ties them, which is
    wrong for the parameter ``different``.
    """
    if path[-1] != _FLAT_MASTERS:
        copies = {name: copy for name, copy, _ in pairs}
        tied = _tied_by_value(checkpoint, path, groups, copies, sources)
        if tied is not None:
            return tied
    message = (
        f"{dotted(path)} contradicts the model: the {_MASTER_DTYPE} weight in the place of {different} does not round "
        "to the model's copy of it. The optimizer may list its parameters in an order other than the model's; "
        f"{flags.only('model')} takes the copies that the model computed with"
    )
    problem = Problem("parameter-order", message, key=different, section=Section.OPTIM)
    return checkpoint.with_problems(problem)


def _tied_by_value(
    checkpoint: Checkpoint,
    path: tuple[Key, ...],
    groups: Sequence[Sequence[Tensor]],
    copies: Mapping[str, Tensor],
    sources: Sources,
) -> Checkpoint | None:
    """``checkpoint`` with the masters in ``groups`` at ``path`` tied to the ``copies`` that they round to, which say
    what each optimizer id is; None if they do not say it of all.
    """
    optim, masters = checkpoint.optim, [master for group in groups for master in group]
    keys = optim.in_groups() if optim is not None else []
    as_many = [len(group) for group in keys] == [len(group) for group in groups]
    if optim is None or optim.key_type != "id" or not as_many:
        return None
    names = names_by_value(copies, masters, checkpoint.files, sources)
    if names is None:
        return None
    ids = [key for group in keys for key in group]
    message = (
        f"{plural(len(ids), 'optimizer id')} became names by the values of {dotted(path)}, each of which rounds to one "
        "parameter's copy: the order of the model does not fit"
    )
    checkpoint = replace(checkpoint, optim=optim.renamed(dict(zip(ids, names, strict=True)))).noted(
        Note("master-weights", message, dotted(path))
    )
    tied = [(name, copies[name], master) for name, master in zip(names, masters, strict=True)]
    return _with_params(checkpoint, path, tied)


def _trained(checkpoint: Checkpoint) -> list[tuple[str, Tensor]]:
    """The tensors of the model that may have masters, a shared one under its first name."""
    trained: dict[_Place, tuple[str, Tensor]] = {}
    for name, leaf in checkpoint.params.items():
        if isinstance(leaf, Tensor) and leaf.sharded is not False:  # the file lists the buffers
            trained.setdefault(_place(leaf), (name, leaf))
    return list(trained.values())


def _with_params(
    checkpoint: Checkpoint, path: tuple[Key, ...], pairs: Sequence[tuple[str, Tensor, Tensor]]
) -> Checkpoint:
    """``checkpoint`` with the masters of ``pairs``, which are extras at ``path``, as parameters."""
    params = checkpoint.params
    metadata = checkpoint.model.metadata if checkpoint.model is not None else None
    masters = {_place(copy): master for _, copy, master in pairs}
    changed: dict[str, Tensor | Value] = {}
    copies: dict[str, Tensor] = {}
    for name, leaf in params.items():  # also the other names of a parameter
        master = masters.get(_place(leaf)) if isinstance(leaf, Tensor) else None
        changed[name] = leaf
        if isinstance(leaf, Tensor) and master is not None:
            copies[name] = leaf
            changed[name] = master if leaf.sharded is None else master.with_sharded(leaf.sharded)
    dtypes = {copy.dtype.name for copy in copies.values()} - {_MASTER_DTYPE}
    checkpoint = replace(checkpoint, model=ModelState(changed, metadata), copies={**checkpoint.copies, **copies})
    checkpoint = checkpoint.noted(*notes_on_copies(dtypes))
    return checkpoint.with_extras(lambda extra: remainder(extra, [path]))


def _with_untied(checkpoint: Checkpoint, place: str) -> Checkpoint:
    """``checkpoint`` with master weights at ``place`` that stay an extra; "" if there are none."""
    return replace(checkpoint, origin=replace(checkpoint.origin, untied_masters=place))


def _wrapper(checkpoint: Checkpoint) -> tuple[tuple[Key, ...], dict[Key, Value]]:
    """The place among the extras of what is beside the optimizer in a dict of its own; and that, empty without any."""
    place = checkpoint.origin.nesting.get(Section.OPTIM, ())[:-1]
    wrapper = find_value(checkpoint.extra, place) if place else None
    return place, wrapper if isinstance(wrapper, dict) else {}


def _divided(checkpoint: Checkpoint, place: tuple[Key, ...], wrapper: dict[Key, Value]) -> Checkpoint | None:
    """``checkpoint`` with parameters in place of one flat tensor: its part of the masters and of each state.

    None if nothing proves which parameters are in it: with several param groups the file does not say who is in which.
    Those of one group are all that the model trains, in its order, one after the other; their lengths prove it.
    """
    model, optim, flat = checkpoint.model, checkpoint.optim, wrapper.get(_FLAT_MASTERS)
    if model is None or optim is None or not isinstance(flat, (list, tuple)) or len(flat) != 1:
        return None
    groups, (master,) = optim.groups or (), flat
    members = _trained(checkpoint)
    if len(groups) != 1 or not isinstance(master, Tensor) or master.ndim != 1:
        return None
    if master.shape != (sum(leaf.numel for _, leaf in members),):
        return None
    return _in_parts(checkpoint, place, wrapper, [members], [master])


def _divided_by_value(
    checkpoint: Checkpoint, place: tuple[Key, ...], wrapper: dict[Key, Value], sources: Sources
) -> Checkpoint | None:
    """What ``_divided`` returns, for a flat tensor for each of several param groups: the part at each place rounds to
    the copy of exactly one parameter. None if not every part does.
    """
    flat = wrapper.get(_FLAT_MASTERS)
    masters = [leaf for leaf in flat if isinstance(leaf, Tensor)] if isinstance(flat, (list, tuple)) else []
    if not isinstance(flat, (list, tuple)) or len(masters) != len(flat):
        return None
    copies = dict(_trained(checkpoint))
    known = KnownCopies(copies, checkpoint.files, sources)
    groups: list[list[tuple[str, Tensor]]] = []
    used: set[str] = set()
    for master in masters:
        if master.ndim != 1 or not _is_plain(master):
            return None
        members: list[tuple[str, Tensor]] = []
        at = 0
        while at < master.numel:
            shapes = [shape for shape in known.shapes if at + prod(shape) <= master.numel]
            found = {known.of(_part(master, at, shape)) for shape in shapes} - {None} - used
            if len(found) != 1:
                return None
            name = str(found.pop())
            used.add(name)
            members.append((name, copies[name]))
            at += copies[name].numel
        groups.append(members)
    return _in_parts(checkpoint, place, wrapper, groups, masters)


def _in_parts(
    checkpoint: Checkpoint,
    place: tuple[Key, ...],
    wrapper: dict[Key, Value],
    members: Sequence[Sequence[tuple[str, Tensor]]],
    flat: Sequence[Tensor],
) -> Checkpoint | None:
    """``checkpoint`` with the ``members`` of each param group in place of its one flat tensor. None if a state has
    another length.
    """
    optim = checkpoint.optim
    if optim is None or optim.groups is None or len(optim.groups) != len(flat):
        return None
    parts: dict[ParamKey, dict[str, Tensor | Value]] = {}
    masters: list[Value] = []
    groups: list[dict[Key, Value]] = []
    for group, keys, of_group, master in zip(optim.groups, optim.in_groups(), members, flat, strict=True):
        states = optim.state.get(keys[0], {}) if len(keys) == 1 else {}
        vectors = [leaf for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim]
        if any(leaf.shape != master.shape or not _is_plain(leaf) for leaf in (master, *vectors)):
            return None
        at = 0
        of_members: list[Value] = []
        for name, copy in of_group:
            of_members.append(_part(master, at, copy.shape))
            if states:
                parts[name] = {
                    state: _part(leaf, at, copy.shape) if isinstance(leaf, Tensor) and leaf.ndim else leaf
                    for state, leaf in states.items()
                }
            at += copy.numel
        masters.append(of_members)
        names: list[Value] = [name for name, _ in of_group]
        groups.append({**group.settings, "params": names})
    own = {key: entry for key, entry in optim.items() if isinstance(entry, OwnValue)}
    by_name = optim.remade({**parts, **own}, groups, optim.extra)
    rest = {name: value for name, value in wrapper.items() if name != _FLAT_MASTERS}
    beside: dict[Key, Value] = {**rest, _MASTERS[0]: masters}
    checkpoint = replace(checkpoint, optim=by_name)
    return checkpoint.with_extras(lambda extra: _with(extra, place, beside))


def _with(extra: dict[Key, Value], place: tuple[Key, ...], beside: dict[Key, Value]) -> dict[Key, Value]:
    changed = replaced(extra, place, beside)
    return changed if isinstance(changed, dict) else extra


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is one run of bytes in a file."""
    chunks = tensor.chunks
    return len(chunks) == 1 and chunks.stride[0].tolist() == [1]


def _part(flat: Tensor, at: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` whose elements begin at element ``at`` of a flat one."""
    chunks = flat.chunks
    offset = int(chunks.offset[0]) + at * flat.dtype.itemsize
    place = Chunks.whole(file=int(chunks.file[0]), offset=offset, shape=shape, rank=int(chunks.rank[0]))
    return Tensor(flat.dtype, shape, place, cut=Flattened())


def _masters(wrapper: Mapping[Key, Value]) -> tuple[Key, list[list[Tensor]]] | None:
    """The key of master weights in a wrapper around the optimizer, and the weights by param group."""
    for key in _MASTERS:
        value = wrapper.get(key)
        groups = [_only_tensors(group) for group in value] if isinstance(value, list) else []
        complete = [group for group in groups if group is not None]
        if any(complete) and len(complete) == len(groups):
            return key, complete
    return None


def _only_tensors(group: Value) -> list[Tensor] | None:
    """The tensors in a list; None if it is no list, or holds anything else."""
    if not isinstance(group, (list, tuple)):
        return None
    tensors = [leaf for leaf in group if isinstance(leaf, Tensor)]
    return tensors if len(tensors) == len(group) else None


def _member_names(checkpoint: Checkpoint) -> list[list[str]] | None:
    """The names of the parameters of each group, in its order; None if nothing proves them."""
    named = find_named(checkpoint)
    if isinstance(named, FsdpckptError):  # rekeying for the target asks again, and says what is missing
        return None
    optim = named.optim
    if optim is None or optim.groups is None:
        return None
    names: list[list[str]] = []
    for group, keys in zip(optim.groups, optim.in_groups(), strict=True):
        if group.members is not None:
            names.append(list(map(str, keys)))
    return names


def _pairs(
    names: Sequence[Sequence[str]], groups: Sequence[Sequence[Tensor]], model: ModelState
) -> list[tuple[str, Tensor, Tensor]] | None:
    """Each parameter with its copy in the model and its master; None if they are not as many.

    A wrapper keeps no master of a parameter that is float32 itself.
    """
    keys = {clean(name): name for name in model.params}
    copies: Mapping[str, Tensor] = {
        name: leaf for name, key in keys.items() if isinstance(leaf := model.params[key], Tensor)
    }
    if len(names) != len(groups) or any(clean(name) not in copies for group in names for name in group):
        return None
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for members, masters in zip(names, groups, strict=True):
        of_group = [clean(name) for name in members]
        if len(of_group) != len(masters):
            of_group = [name for name in of_group if copies[name].dtype.name != _MASTER_DTYPE]
        if len(of_group) != len(masters):
            return None
        pairs += [(keys[name], copies[name], master) for name, master in zip(of_group, masters, strict=True)]
    return pairs


def _place(tensor: Tensor) -> _Place:
    """Where its bytes are, or the items that hold them: tied parameters share them."""
    chunks = tensor.chunks
    item = chunks.item.tobytes() if chunks.item is not None else b""
    return chunks.file.tobytes(), chunks.offset.tobytes(), item, tensor.shape
