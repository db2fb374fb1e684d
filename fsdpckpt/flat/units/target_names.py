"""Finds the parameters of a flattened target, in the order of ``model.parameters()``: what its units are made of.

They come from the checkpoint's own model, else from its optimizer or ``--reference``; ``--buffers`` and
``--parameters`` settle which names are parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.flat.units.architectures import units_command
from fsdpckpt.flat.units.groups import given_groups
from fsdpckpt.flat.units.request import UnitsRequest, order_unknown, target_reference
from fsdpckpt.globs import matches, matches_any
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural
from fsdpckpt.transform.listings import listed_names, model_names, optimizer_names
from fsdpckpt.transform.selection import parameter_names

REFERENCE = f"{flags.reference('PATH')} of a checkpoint of this model that PyTorch wrote"


def target_names(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, left_out: Listing | None = None
) -> Listing:
    """The parameters in the order of ``model.parameters()``. ``left_out``: as for ``target_units``.

    Raises NeedsInformationError if they are not certain.
    """
    checkpoint_names = model_names(checkpoint, "the model section") or left_out
    if checkpoint_names is None and not checkpoint.beside:  # one of several optimizers lists a part of the model
        checkpoint_names = optimizer_names(checkpoint, "the optimizer's own names")
    reference = target_reference(request, parameter_names(checkpoint), sources)
    has_order = checkpoint_names is not None and checkpoint_names.ordered and checkpoint_names.in_model_order
    chosen = checkpoint_names
    if reference is not None and not has_order:
        chosen = _with_reference(checkpoint_names, reference)
    if chosen is None:
        raise NeedsInformationError(
            f"{checkpoint.source} has no names and shapes to make units from",
            next_step=f"add {flags.units('FILE')}, or {flags.reference('PATH')} of a full or sharded checkpoint of "
            "this model",
        )
    in_order = chosen.ordered and chosen.in_model_order
    of_optimizer = given_groups(checkpoint, request, chosen.names, ordered=in_order)
    if of_optimizer is not None and not in_order:
        raise NeedsInformationError(
            f"the order of the parameters of {checkpoint.source} is not known: {chosen.source} does not keep it",
            why=f"{flags.parameters} lists the optimizer's groups, which ids follow; flat parameters follow "
            "model.parameters()",
            next_step=f"add {REFERENCE}, or {flags.units('FILE')} that save_units wrote",
        )
    if of_optimizer is None and request.parameters is not None:
        listed = request.names_in(request.parameters, chosen.names)
        return _listed_only(chosen, tuple(listed.values()), checkpoint)
    return _require_settled(separate_buffers(chosen, request.buffers), checkpoint)


def separate_buffers(names: Listing, buffers: Sequence[str], *, all_match: bool = True) -> Listing:
    """Names that nothing else decides: buffers if a ``--buffers`` glob matches, parameters otherwise.

    Raises UsageError for a glob that matches nothing, unless not ``all_match``.
    """
    if not buffers:
        return names
    globs = [glob for glob in buffers if tuple(buffers) != NO_BUFFERS]
    for glob in globs if all_match else ():
        if not any(matches(param.name, glob) for param in names.params):
            raise UsageError(
                f"{flags.buffers(glob)} matches no name of {names.source}",
                next_step=f"{flags.buffers} with the names of the buffers, or {flags.buffers('none')}",
            )
    return replace(
        names,
        rows=tuple(
            replace(param, sharded=not matches_any(param.name, globs))
            if param.sharded is None and param.possible
            else param
            for param in names.params
        ),
    )


def _with_reference(stored: Listing | None, reference: Listing) -> Listing:
    """The reference's names and order, with the dtypes and other facts from the checkpoint itself."""
    by_name = {param.name: param for param in stored.params} if stored is not None else {}
    params = tuple(
        replace(param, dtype=by_name[param.name].dtype, stride=by_name[param.name].stride or param.stride)
        if param.name in by_name
        else param
        for param in reference.params
        if stored is None or param.name in by_name
    )
    return replace(reference, rows=params)


def _listed_only(names: Listing, order: tuple[str, ...], checkpoint: Checkpoint) -> Listing:
    """Exactly the parameters that ``--parameters`` lists; a sharded name that it lacks can only be a shared one."""
    by_name = {param.name: param for param in names.params}
    absent = [name for name in order if name not in by_name]
    if absent:
        raise SourceCorruptError(
            f"{flags.parameters} lists names that {checkpoint.source} does not have",
            details=absent,
            next_step=f"{flags.parameters('FILE')} with the names of model.named_parameters(), one per line",
        )
    optim = checkpoint.optim
    with_state = [str(key) for key in optim.state if str(key) in by_name] if optim is not None else []
    absent = [name for name in with_state if name not in set(order)]
    if absent:
        raise SourceCorruptError(
            f"{flags.parameters} does not list {len(absent)} of the parameters that the optimizer has states of",
            details=absent,
            next_step=f"{flags.parameters('FILE')} with the names of model.named_parameters(), one per line",
        )
    listed, shared = set(order), list(names.shared)
    for name, param in by_name.items():
        if param.sharded and name not in listed:
            first = [
                listed_name
                for listed_name in order
                if (by_name[listed_name].shape, by_name[listed_name].dtype) == (param.shape, param.dtype)
            ]
            if len(first) != 1:
                raise NeedsInformationError(
                    f"{name} is a parameter that {flags.parameters} does not list, so it is a shared one",
                    details=[f"it may be {first_name}" for first_name in first],
                    next_step=f"add {flags.units('FILE')}, which says what is shared",
                )
            shared.append((name, first[0]))
    params = tuple(replace(by_name[name], sharded=by_name[name].sharded is not False) for name in order)
    return replace(
        names,
        rows=params,
        ordered=True,
        in_model_order=True,
        source=f"{names.source} and {flags.parameters}",
        shared=tuple(shared),
    )


def _require_settled(names: Listing, checkpoint: Checkpoint) -> Listing:
    """Only the parameters; raises NeedsInformationError for names that may be a parameter or a buffer, frozen or
    shared.
    """
    trained: set[str] = set()
    for optim in (checkpoint.optim, *checkpoint.beside):
        if optim is not None and optim.key_type == "name":
            trained.update(name for group in listed_names(optim) for name in group)
            trained.update(clean(str(key)) for key in optim.state)
    params: list[Parameter] = []
    undecided: list[str] = []
    for param in names.params:
        if param.name in trained:
            params.append(replace(param, sharded=param.sharded is not False))
        elif param.sharded and not trained:
            params.append(param)
        elif param.sharded:
            same_shape = next(
                (other.name for other in params if other.name in trained and other.shape == param.shape), None
            )
            if same_shape is not None:
                undecided.append(f"{param.name} has no optimizer state: it may be frozen, or shared with {same_shape}")
            params.append(replace(param, requires_grad=False))
        elif param.possible:
            undecided.append(f"{param.name} may be a parameter or a buffer")
    if undecided:
        raise NeedsInformationError(
            f"{len(undecided)} of the names in {checkpoint.source} are ambiguous, so it cannot be divided into units",
            details=undecided,
            why="a flat parameter holds every parameter once, frozen ones too, and no buffer",
            next_step=f"add {flags.buffers('GLOB')} for the buffers ({flags.buffers('none')} when there are none), "
            f"{flags.parameters('FILE')} (the names of model.named_parameters(), one per line), or "
            f"{flags.units('FILE')}",
        )
    return replace(names, rows=tuple(params))


def require_known_order(
    units: Units, names: Listing, checkpoint: Checkpoint, request: UnitsRequest, sources: Sources
) -> None:
    """Raises NeedsInformationError if ``names`` are in no model's order, and the target depends on it."""
    units_with_several = [unit for unit in units.units if len(unit.params) > 1]
    if order_matters(units, checkpoint) and not (names.ordered and names.in_model_order):
        details = [f"{unit} has {plural(len(unit.params), 'parameter')}" for unit in units_with_several]
        command = units_command(request.reference or checkpoint.origin.directory, None, sources)
        raise order_unknown(checkpoint.source, f"{names.source} does not keep it", details, command=command)


def order_matters(units: Units, checkpoint: Checkpoint) -> bool:
    """Whether files depend on the order: the content of a flat parameter does, and so do the optimizer's ids."""
    several = any(len(unit.params) > 1 for unit in units.units)
    return several or (checkpoint.optim is not None and len(units.parameters) > 1)
