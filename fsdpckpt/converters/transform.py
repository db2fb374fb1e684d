"""What happens to a checkpoint between reading and writing, in the order in which a user thinks of it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdpckpt.converters.applicability import refuse_flat_options
from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceMissingError, UsageError
from fsdpckpt.flat.flatten.states import require_equal_scalars
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units.source import (
    ORDER,
    ResolvedUnits,
    UnitsRequest,
    is_flattened,
    load_units,
    source_units,
    target_units,
)
from fsdpckpt.ir.checkpoint import UNORDERED, Checkpoint, KeyType, Layout, Note, OptimState, Section, group_params
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.invariants import fatal
from fsdpckpt.ir.names import clean, normalise
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.missing_state import Choice, fill, note_elementless, require_complete
from fsdpckpt.transform.parameter_order import ParameterOrder, from_list, from_model, from_param_names, from_units
from fsdpckpt.transform.rekey import is_keyed_by_id, to_ids, to_names
from fsdpckpt.transform.selection import differing_copies, rename, select_keys, select_section, with_own_tensors
from fsdpckpt.transform.sharded import ShardingHints, decide_sharded

__all__ = ["TransformedCheckpoint", "apply_key_type", "fill_missing", "parameter_orders", "transform", "units_request"]


@dataclass(frozen=True, slots=True)
class TransformedCheckpoint:
    """What is to be written: whole tensors. ``units``: those of a flattened target, whose optimizer is keyed by name
    until the writer gives it keys of ``key_type``."""

    checkpoint: Checkpoint
    units: Units | None = None
    key_type: KeyType | None = None


def transform(opened: Checkpoint, options: ConvertOptions, spec: TargetSpec, sources: Sources) -> TransformedCheckpoint:
    """All passes: what to take, what it is, how it is keyed, how to name it, how it is sharded."""
    request = units_request(options)
    checkpoint = select_section(opened, options.only)
    _refuse(checkpoint, options.only)
    refuse_flat_options(
        options,
        checkpoint.source,
        has_flat=lambda: spec.layout is Layout.FLATTENED or is_flattened(checkpoint, sources, request),
    )
    own_keys = checkpoint.optim.key_type if checkpoint.optim is not None else None
    found: ResolvedUnits | None = None
    flattened = spec.layout is Layout.FLATTENED
    if is_flattened(checkpoint, sources, request):
        found = source_units(opened, request, sources, target_flattened=flattened)
        checkpoint = name_slices(checkpoint, found, sources)
        if ORDER in found.unsettled:
            checkpoint = replace(checkpoint, evidence=(*checkpoint.evidence, UNORDERED))
    checkpoint = normalise(checkpoint)
    _refuse_differing(checkpoint)
    units = _recorded(found, request, sources)
    keying = _Keying(units, request, options, sources)
    if flattened:
        checkpoint = _renamed(keying.to(checkpoint, "name"), options)
        return _to_flattened(checkpoint, found, request, options, spec, own_keys, sources)
    by_name = bool(options.include or options.exclude or options.missing_state)
    checkpoint = keying.to(checkpoint, "name" if by_name else options.key_type)
    checkpoint = select_keys(checkpoint, include=options.include, exclude=options.exclude)
    checkpoint = _filled(checkpoint, options, found.units if found is not None else units, sources)
    # Names change last: what says which id is which parameter says it in the source's names.
    checkpoint = _renamed(keying.to(checkpoint, options.key_type or own_keys), options, selected=True)
    if spec.layout is not Layout.SHARDED:
        return TransformedCheckpoint(checkpoint)
    return TransformedCheckpoint(_to_sharded(checkpoint, options, spec, sources))


def _filled(checkpoint: Checkpoint, options: ConvertOptions, units: Units | None, sources: Sources) -> Checkpoint:
    """As ``--missing-state`` says; without it nothing is made, and what has no state is noted."""
    choice: Choice = options.missing_state.value if options.missing_state is not None else "skip"
    return fill_missing(checkpoint, choice, units=units, sources=sources)


def _recorded(found: ResolvedUnits | None, request: UnitsRequest, sources: Sources) -> Units | None:
    """The units that say which id is which parameter: the source's, or those of ``--units``."""
    if found is None:
        return load_units(request.file, sources) if request.file else None
    return None if ORDER in found.unsettled else found.units


@dataclass(frozen=True, slots=True)
class _Keying:
    """Brings an optimizer to ids or names, with all that says which is which."""

    units: Units | None
    request: UnitsRequest
    options: ConvertOptions
    sources: Sources

    def to(self, checkpoint: Checkpoint, key_type: KeyType | None) -> Checkpoint:
        optim = checkpoint.optim
        if optim is None or key_type is None or key_type == ("id" if is_keyed_by_id(optim) else "name"):
            return checkpoint
        return apply_key_type(
            checkpoint,
            key_type,
            units=self.units,
            reference=_reference(self.options, self.sources),
            parameters=self.request.parameters,
            buffers=self.options.buffers,
        )


def _renamed(checkpoint: Checkpoint, options: ConvertOptions, *, selected: bool = False) -> Checkpoint:
    if not selected:
        checkpoint = select_keys(checkpoint, include=options.include, exclude=options.exclude)
    checkpoint = rename(
        checkpoint, strip_prefix=options.strip_prefix, add_prefix=options.add_prefix, pairs=options.rename
    )
    if options.dtype is not None or options.optim_dtype is not None:
        checkpoint = with_own_tensors(checkpoint)
    return checkpoint


def units_request(options: ConvertOptions) -> UnitsRequest:
    """What the options say about units. Raises SourceMissingError when the file of parameter names cannot be read."""
    return UnitsRequest(
        file=options.units,
        globs=options.unit,
        use_orig_params=options.use_orig_params,
        strategy=options.strategy,
        param_dtype=_dtype(options.param_dtype),
        shard_size=options.shard_size,
        reference=options.reference,
        parameters=_names_of(options.parameters) if options.parameters is not None else None,
        buffers=options.buffers,
    )


def _dtype(name: str | None) -> DType | None:
    if name is None:
        return None
    if name not in DTYPES or not DTYPES[name].floating:
        raise UsageError(
            f"--param-dtype {name} is not a floating-point dtype",
            found=name,
            expected=", ".join(key for key, dtype in DTYPES.items() if dtype.floating),
            next_step="--param-dtype bfloat16",
        )
    return DTYPES[name]


def _names_of(path: str) -> tuple[str, ...]:
    next_step = "write the names of model.named_parameters() into a text file, one a line"
    try:
        with open(path, encoding="utf-8") as file:
            names = tuple(line.strip() for line in file if line.strip())
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path, bytes that are no text
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise SourceMissingError(f"--parameters {path}: {reason}", file=path, next_step=next_step) from error
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice or not names:
        raise SourceCorruptError(
            f"--parameters {path} " + ("names some parameters more than once" if twice else "names no parameter"),
            details=twice,
            file=path,
            next_step=next_step,
        )
    return names


def _refuse(checkpoint: Checkpoint, only: Section | None) -> None:
    """Raises a SourceError that lists every fatal problem of the sections that are asked for, there or not."""
    wanted = {None, only} if only is not None else {None, *Section}
    wrong = [problem for problem in checkpoint.problems if problem.fatal and problem.section in wanted]
    if wrong:
        raise fatal(wrong, source=checkpoint.source)


def _refuse_differing(checkpoint: Checkpoint) -> None:
    wrong = list(differing_copies(checkpoint))
    if wrong:
        raise fatal(wrong, source=checkpoint.source)


def _reference(options: ConvertOptions, sources: Sources) -> Checkpoint | None:
    if options.reference is None:
        return None
    return open_checkpoint(options.reference, sources=sources, locate=False)


def _to_flattened(
    checkpoint: Checkpoint,
    source: ResolvedUnits | None,
    request: UnitsRequest,
    options: ConvertOptions,
    spec: TargetSpec,
    own_keys: KeyType | None,
    sources: Sources,
) -> TransformedCheckpoint:
    """Whole tensors by name, complete and consistent within each unit of the target."""
    world_size = spec.world_size or 1
    if checkpoint.model is not None or checkpoint.optim is not None:
        cast = DTYPES[options.dtype] if options.dtype is not None else None
        found = target_units(checkpoint, request, source, world_size, sources, dtype=cast)
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *(Note("units", line) for line in found.how)))
    else:
        raise UsageError(
            f"{checkpoint.source} has neither a model nor an optimizer to flatten",
            next_step=f"fsdpckpt inspect {shlex.quote(checkpoint.source)}",
        )
    checkpoint = _filled(checkpoint, options, found.units, sources)
    if found.units.use_orig_params:
        checkpoint = note_elementless(checkpoint, found.units)
    else:
        require_complete(checkpoint, found.units)
        require_equal_scalars(checkpoint, found.units, sources)
    key_type = options.key_type or own_keys or "id"
    if not found.units.use_orig_params:
        if options.key_type == "name":
            raise UsageError(
                "--key-type name cannot key flat parameters: with use_orig_params=False one entry holds many names",
                next_step="drop --key-type, or add --use-orig-params",
            )
        key_type = "id"
    if spec.form is not None:  # which may shard one section where it flattens the other
        of_units = {name: name in found.units.params() for name in checkpoint.model.params} if checkpoint.model else {}
        checkpoint = decide_sharded(checkpoint, ShardingHints(reference=of_units), strict=True)
    return TransformedCheckpoint(checkpoint, found.units, key_type)


def _to_sharded(checkpoint: Checkpoint, options: ConvertOptions, spec: TargetSpec, sources: Sources) -> Checkpoint:
    reference = None
    if options.reference is not None:
        opened = _reference(options, sources)
        model = opened.model if opened is not None else None
        reference = {name: getattr(leaf, "sharded", None) for name, leaf in model.params.items()} if model else {}
    hints = ShardingHints(buffers=options.buffers, reference=reference)
    # A cut that a DCP loader does not expect costs nothing; a DTensor where the model has a buffer does not load.
    return decide_sharded(checkpoint, hints, strict=spec.container == "torch")


def apply_key_type(
    checkpoint: Checkpoint,
    key_type: KeyType | None,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    buffers: Sequence[str] = (),
) -> Checkpoint:
    """``checkpoint`` with its optimizer keyed as ``key_type`` says; None leaves the keys as they are.

    ``units``: given, or found with the source; those beside the checkpoint count when None. ``reference``: a checkpoint
    whose model section states names, shapes and order. ``parameters``: names in the order of ``model.parameters()``.
    ``buffers``: globs of model keys that are no parameters. Raises NeedsInformationError when nothing states the
    order, or what does leaves several answers, and SourceCorruptError when the sources contradict the optimizer or each
    other.
    """
    optim = checkpoint.optim
    if optim is None or key_type is None or optim.key_type is None or key_type == _key_type(optim):
        return checkpoint
    orders = parameter_orders(
        checkpoint, units=units, reference=reference, parameters=parameters, buffers=tuple(buffers)
    )
    if not orders:
        raise NeedsInformationError(
            f"nothing in {checkpoint.source} says which parameter each optimizer "
            + ("id is" if key_type == "name" else "name's id is"),
            why="it has no model section, and its param groups have no param_names",
            next_step="add --reference PATH (a checkpoint of this model), --parameters FILE (the names of "
            "model.parameters(), one a line) or --units FILE",
        )
    first, *others = orders
    return to_names(checkpoint, first, others) if key_type == "name" else to_ids(checkpoint, first, others)


def _key_type(optim: OptimState) -> KeyType:
    return "id" if is_keyed_by_id(optim) else "name"


def parameter_orders(
    checkpoint: Checkpoint,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    buffers: tuple[str, ...] = (),
) -> list[ParameterOrder]:
    """Every source that states an order, the one to use first: those that do not keep the order come last."""
    held = units if units is not None else checkpoint.units
    like = _known_names(checkpoint)
    found: list[ParameterOrder | None] = []
    if held is not None:
        beside = held is checkpoint.units and checkpoint.units_from
        found.append(from_units(held, f"the units of {checkpoint.units_from}" if beside else "the units"))
    if checkpoint.optim is not None:
        found.append(from_param_names(checkpoint.optim, like))
    if parameters is not None:
        found.append(from_list(parameters, like=like))
    keyed = _keyed_names(checkpoint).union(*(order.names for order in found if order is not None))
    if reference is not None:
        found.append(from_model(reference, f"the reference {reference.source}", buffers, like, keyed))
    found.append(from_model(checkpoint, "the checkpoint's own model section", buffers, keyed=keyed))
    orders = [order for order in found if order is not None]
    return sorted(orders, key=lambda order: not order.ordered)


def _known_names(checkpoint: Checkpoint) -> list[str]:
    """The names that the checkpoint itself uses."""
    if checkpoint.model is not None:
        return list(checkpoint.model.params)
    return [key for key in checkpoint.optim.state if isinstance(key, str)] if checkpoint.optim is not None else []


def _keyed_names(checkpoint: Checkpoint) -> set[str]:
    """The names that the optimizer has states or groups for."""
    if checkpoint.optim is None:
        return set()
    listed = [key for group in checkpoint.optim.param_groups or () for key in group_params(group) or ()]
    return {clean(key) for key in (*checkpoint.optim.state, *listed) if isinstance(key, str)}


def fill_missing(checkpoint: Checkpoint, choice: Choice, *, units: Units | None, sources: Sources) -> Checkpoint:
    """``transform.missing_state.fill`` of a checkpoint keyed by name, 0-dim states read from its files."""

    def read(tensor: Tensor) -> bytes:
        chunks = tensor.chunks
        path = checkpoint.files[int(chunks.file[0])].path
        return sources.open(path).read(int(chunks.offset[0]), tensor.dtype.itemsize)

    return fill(checkpoint, choice, units=units, read=read)
