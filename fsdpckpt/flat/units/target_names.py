"""The parameters of a checkpoint of whole tensors, in the order of the model: what units are made of for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.flat.units.agreement import listed_names
from fsdpckpt.flat.units.names import NamedParam, NameList, model_names, optimizer_names
from fsdpckpt.flat.units.request import UnitsRequest, reference_names
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources

__all__ = ["require_known_order", "target_names"]

NO_BUFFERS = ("none",)
"""What ``--buffers`` says when every model key that may be a parameter is one."""


def target_names(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> NameList:
    """The parameters in the order of ``model.parameters()``. Raises NeedsInformationError when they are not certain."""
    own = model_names(checkpoint, "the model section")
    if own is None:
        own = optimizer_names(checkpoint, "the optimizer's own names")
    chosen = own
    if request.reference is not None and (own is None or not (own.ordered and own.of_model)):
        chosen = _with_reference(own, reference_names(request.reference, sources))
    if chosen is None:
        raise NeedsInformationError(
            f"{checkpoint.source} has no names and shapes to make units of",
            next_step="add --units FILE, or --reference PATH of a full or sharded checkpoint of this model",
        )
    if request.parameters is not None:
        return _explicit(chosen, request.parameters, checkpoint)
    return _settled(_apart(chosen, request.buffers), checkpoint)


def _apart(names: NameList, buffers: Sequence[str]) -> NameList:
    """What nothing else says of a name, ``--buffers`` says: a buffer if a glob matches it, otherwise a parameter."""
    if not buffers:
        return names
    globs = [glob for glob in buffers if tuple(buffers) != NO_BUFFERS]
    useless = [glob for glob in globs if not any(fnmatchcase(param.name, glob) for param in names.params)]
    if useless:
        raise UsageError(
            f"--buffers {useless[0]} matches no name of {names.label}",
            next_step="--buffers with the names of the buffers, or --buffers none",
        )
    return replace(
        names,
        params=tuple(
            replace(param, sharded=not any(fnmatchcase(param.name, glob) for glob in globs))
            if param.sharded is None and param.possible
            else param
            for param in names.params
        ),
    )


def _with_reference(own: NameList | None, reference: NameList) -> NameList:
    """The reference's names and order, with the dtypes and what else the checkpoint itself says of them."""
    held = {param.name: param for param in own.params} if own is not None else {}
    params = tuple(
        replace(param, dtype=held[param.name].dtype, stride=held[param.name].stride or param.stride)
        if param.name in held
        else param
        for param in reference.params
        if own is None or param.name in held
    )
    return replace(reference, params=params)


def _explicit(names: NameList, order: tuple[str, ...], checkpoint: Checkpoint) -> NameList:
    """Exactly the parameters that ``--parameters`` lists; a sharded name that it lacks can only be a shared one."""
    held = {param.name: param for param in names.params}
    absent = [name for name in order if name not in held]
    if absent:
        raise SourceCorruptError(
            f"--parameters lists names that {checkpoint.source} does not have",
            details=absent,
            next_step="--parameters FILE with the names of model.named_parameters(), one a line",
        )
    optim = checkpoint.optim
    stated = [str(key) for key in optim.state if str(key) in held] if optim is not None else []
    absent = [name for name in stated if name not in set(order)]
    if absent:
        raise SourceCorruptError(
            f"--parameters does not list {len(absent)} of the parameters that the optimizer has states of",
            details=absent,
            next_step="--parameters FILE with the names of model.named_parameters(), one a line",
        )
    listed, shared = set(order), list(names.shared)
    for name, param in held.items():
        if param.sharded and name not in listed:
            first = [one for one in order if held[one].shape == param.shape and held[one].dtype == param.dtype]
            if len(first) != 1:
                raise NeedsInformationError(
                    f"{name} is a parameter that --parameters does not list, so it is a shared one",
                    details=[f"it may be {one}" for one in first],
                    next_step="add --units FILE, which says what is shared",
                )
            shared.append((name, first[0]))
    params = tuple(replace(held[name], sharded=held[name].sharded is not False) for name in order)
    return replace(
        names, params=params, ordered=True, of_model=True, label=f"{names.label} and --parameters", shared=tuple(shared)
    )


def _settled(names: NameList, checkpoint: Checkpoint) -> NameList:
    """Only the parameters; what may be a parameter or a buffer, frozen or shared, raises NeedsInformationError."""
    optim = checkpoint.optim
    by_name = optim is not None and optim.key_type == "name"
    trained = {name for group in listed_names(optim) for name in group} if optim is not None and by_name else set()
    if optim is not None and by_name:
        trained |= {str(key) for key in optim.state}
    params: list[NamedParam] = []
    open_: list[str] = []
    for param in names.params:
        if param.name in trained:
            params.append(replace(param, sharded=param.sharded is not False))
        elif param.sharded and not trained:
            params.append(param)
        elif param.sharded:
            alike = next((one.name for one in params if one.name in trained and one.shape == param.shape), None)
            if alike is not None:
                open_.append(f"{param.name} has no optimizer state: it may be frozen, or shared with {alike}")
            params.append(replace(param, requires_grad=False))
        elif param.possible:
            open_.append(f"{param.name} may be a parameter or a buffer")
    if open_:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say enough of {len(open_)} of its names to make units of them",
            details=open_,
            why="a flat parameter holds every parameter once, frozen ones too, and no buffer",
            next_step="add --buffers GLOB for the buffers (--buffers none when there are none), --parameters FILE (the "
            "names of model.named_parameters(), one a line), or --units FILE",
        )
    return replace(names, params=tuple(params))


def require_known_order(units: Units, names: NameList, checkpoint: Checkpoint) -> None:
    crowded = [unit for unit in units.units if len(unit.params) > 1]
    # A flat parameter is all about order, and so are the optimizer's ids.
    matters = bool(crowded) or (checkpoint.optim is not None and len(units.parameters) > 1)
    if (names.ordered and names.of_model) or not matters:
        return
    raise NeedsInformationError(
        f"the order of the parameters is not known: {names.label} has them in no order of the model's",
        details=[f"unit {unit.prefix!r} has {len(unit.params)} parameters" for unit in crowded],
        why="safetensors files and some DCP directories sort their keys, FSDP1 lists an optimizer's parameters unit by "
        "unit, and in a flat parameter and in ids the order is all there is",
        next_step="add --parameters FILE (the names of model.named_parameters(), one a line), --reference PATH of a "
        "checkpoint that PyTorch wrote, or --units FILE",
    )
