"""Finds the units of a flattened target: given, the source's, or made of names and ``--unit``.

They are checked against the names, shapes, dtypes and order of what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError, UsageError, required
from fsdpckpt.flat.names import order_contradictions
from fsdpckpt.flat.units.build import (
    Settings,
    build_units,
    expand_globs,
    keyed_groups,
    layers_glob,
    listed_keys,
    regrouped,
)
from fsdpckpt.flat.units.groups import given_groups, optimizer_groups
from fsdpckpt.flat.units.inference import describe_settings, possibly_channels_last
from fsdpckpt.flat.units.request import (
    ResolvedUnits,
    UnitsRequest,
    contradictions,
    find_disagreement,
    require_model_order,
    target_file,
)
from fsdpckpt.flat.units.target_names import REFERENCE, order_matters, require_known_order, target_names
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import revisits_a_module
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.row_names import rename_shared_states
from fsdpckpt.ir.unit_lists import flaws
from fsdpckpt.ir.units import Strategy, Unit, Units, state_dict_order
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.listings import listed_names, units_names, unwrapped_names
from fsdpckpt.transform.selection import parameter_names


def target_units(
    checkpoint: Checkpoint,
    request: UnitsRequest,
    source: ResolvedUnits | None,
    world_size: int | None,
    sources: Sources,
    *,
    dtype: DType | None = None,
    left_out: Listing | None = None,
) -> ResolvedUnits:
    """The units of a flattened target of ``checkpoint`` (whole tensors, its optimizer keyed by name).

    ``source``: the units of a flattened source; the target is wrapped like it unless ``request`` says otherwise.
    ``dtype``: what the model section is cast to. ``left_out``: the names of the source's model, if the target gets only
    the optimizer. Raises NeedsInformationError if wrapping or ``use_orig_params`` are not known, SourceCorruptError if
    the units are those of a different model, UsageError for what FSDP1 cannot wrap, SourceUnsupportedError if param
    groups divide a flat parameter.
    """
    wrapped, how = _wrapping(checkpoint, request, source, sources, left_out)
    checkpoint = rename_shared_states(checkpoint, wrapped)
    units = wrapped
    if dtype is not None and request.file is None and checkpoint.model is not None:
        units = _cast(units, dtype)
    units = request.applied_to(units)
    unknown = _lost_strategy(units, request, world_size)
    if unknown:
        units = Settings(strategy=Strategy.FULL_SHARD).applied_to(units)
    units = _sharding(units, request, world_size)
    _require_orders(wrapped, units, world_size, checkpoint, given=request.file is not None)
    source_units = source.units if source is not None else checkpoint.units
    units = _without_groups_of_another(units, checkpoint)
    listed = given_groups(checkpoint, request, units.parameters)
    grouped = optimizer_groups(units, checkpoint, source_units, listed, by_user=request.parameters is not None)
    units = replace(units.with_groups(grouped.groups), world_size=world_size, by_optimizer=())
    _require_same_model(units, checkpoint, request, dtype)
    described = f"the units of {request.file}" if request.file is not None else "the target's units"
    required(find_disagreement(units, request, sources, described))
    in_list = request.parameters is not None and request.file is None and listed is None
    listed_by = f"{flags.parameters}" if in_list else described
    _require_order_of_a_model(units, checkpoint, listed_by, in_list=in_list, flattened=source is not None)
    recorded = any((request.file, source, checkpoint.units))
    _require_possible(units, recorded=recorded)
    _require_undivided(units, checkpoint)
    # With use_orig_params=False nothing is aligned, so the alignment is not known.
    notes = [
        *unknown,
        *_settings_notes(units, request, aligned=wrapped.use_orig_params and recorded),
        *(grouped.notes if source is None else ()),
    ]
    return ResolvedUnits(units, None, (how, *notes), doubts=grouped.doubts if source is None else ())


def _wrapping(
    checkpoint: Checkpoint,
    request: UnitsRequest,
    source: ResolvedUnits | None,
    sources: Sources,
    left_out: Listing | None,
) -> tuple[Units, str]:
    """Which parameters are in which unit, and how that is known."""
    from_file = target_file(request, parameter_names(checkpoint), sources)
    if from_file is not None and from_file.flat:
        return from_file, f"target units: from {request.file}"
    source_units, label = checkpoint.units, f"the units of {checkpoint.origin.units_from}"
    if source is not None:
        require_model_order(source, checkpoint.source)
        source_units, label = source.units, "the source's units"
        if request.use_orig_params is None and "use_orig_params" in source.open_settings:
            raise _orig_params_unknown(checkpoint, "the source's bytes are the same with both")
    elif from_file is not None:  # it has names and groups, and no units
        source_units, label = from_file, str(request.file)
    if source_units is not None and source_units.flat and not request.globs:
        return source_units, f"target units: {label}"
    if not request.globs:
        raise NeedsInformationError(
            f"cannot tell which modules of {checkpoint.source} become FSDP units",
            why="wrapping is never guessed: a different wrapping gives different files",
            next_step=f"add {flags.units('FILE')} (save_units or `fsdpckpt units` makes one), or {flags.unit('GLOB')} "
            "(repeatable) for the wrapped modules, for example "
            f"{flags.unit(layers_glob(checkpoint.params))} "
            f"({flags.unit('none')} when only the root is wrapped)",
        )
    wrapped = source_units is not None and source_units.flat
    if not wrapped and request.use_orig_params is None:
        raise _orig_params_unknown(checkpoint, "the source is not flattened")
    if source_units is None:
        names = target_names(checkpoint, request, sources, left_out)
    else:
        names = units_names(source_units, label) if wrapped else unwrapped_names(source_units, label)
    prefixes = {"", *expand_globs(request.globs, [param.name for param in names.params])}
    settings = Settings(
        source_units.use_orig_params if source_units is not None and wrapped else bool(request.use_orig_params)
    )
    units = build_units(
        names.params,
        prefixes,
        settings,
        unmanaged=[param.name for param in names.params if param.sharded is False],
        shared=names.shared,
    )
    if source_units is not None and source_units.groups is not None:
        # With original parameters the order is the optimizer's own; flat parameters have one of their own.
        grouped = regrouped if units.use_orig_params else keyed_groups
        units = units.with_groups(grouped(units, source_units.named_groups() or ()))
    if source_units is not None and source_units.units:
        first = source_units.units[0]
        settings = Settings(None, first.strategy, first.param_dtype, source_units.shard_size)
        units = replace(settings.applied_to(units), world_size=source_units.world_size)
    require_known_order(units, names, checkpoint, request, sources)
    wrapping = " ".join(f"{flags.unit(glob)}" for glob in request.globs)
    return units, f"target units: names from {names.source}, wrapping from {wrapping}"


def _require_same_model(units: Units, checkpoint: Checkpoint, request: UnitsRequest, dtype: DType | None) -> None:
    wrong = contradictions(units, checkpoint, dtype=dtype)
    if not wrong:
        return
    listed = request.file is None and request.parameters is not None
    raise SourceCorruptError(
        f"the units do not describe the model of {checkpoint.source}",
        details=wrong,
        why=f"they have the names and the order of {flags.parameters}"
        if listed
        else "they are those of a different model, or of another version of this one",
        next_step=f"write the names of model.named_parameters() into the {flags.parameters} file, one per line, in "
        "that order"
        if listed
        else f"give this model's: {flags.units('FILE')} (save_units or `fsdpckpt units` makes one)",
        file=request.file,
    )


def _require_order_of_a_model(
    units: Units, checkpoint: Checkpoint, listed_by: str, *, in_list: bool, flattened: bool
) -> None:
    """Raises NeedsInformationError if no model lists its parameters as ``units`` does, and the target depends on it.

    ``listed_by``: where the order comes from, in words. ``in_list``: from ``--parameters``. ``flattened``: so was the
    source, and new names have put its parameters into other modules.
    """
    shared = {name for names in units.shared for name in names}  # listed where the first module that has it is
    own = [name for name in units.parameters if name not in shared]
    if not order_matters(units, checkpoint):
        return
    written = state_dict_order([*units.parameters, *(later for later, _ in units.shared)], units)
    if not revisits_a_module(own) and not any(order_contradictions(units, written, "the target", across=False)):
        return
    in_order = f"{flags.parameters('FILE')} that has the names of model.named_parameters() in that order"
    if in_list:
        in_order = f"{REFERENCE}, {in_order}"
    raise NeedsInformationError(
        f"the order of the parameters of the model that loads this is not known: no model lists them like {listed_by}",
        details=[f"parameter {number} is {name}" for number, name in enumerate(units.parameters)],
        most_shown=8,
        why="a model lists a module's own parameters first, then one child after the other, and flat parameters follow "
        "that order; the optimizer may have another one, and that does not say the model's",
        next_step=f"{flags.to('full')} with the new names, and then {flags.to('flattened')} of that with {in_order}"
        if flattened
        else f"add {in_order}, or {flags.units('FILE')} that save_units wrote",
    )


def _require_orders(
    from_file: Units, units: Units, world_size: int | None, checkpoint: Checkpoint, *, given: bool
) -> None:
    """If optimizers differ by rank, the units are valid only for the number of ranks they were recorded on.

    ``given``: ``from_file`` are those of ``--units``.
    """
    same = from_file.world_size == world_size and from_file.use_orig_params == units.use_orig_params
    optim = checkpoint.optim
    lost = not from_file.orders and not given and optim is not None and optim.orders  # only param_names said it
    if optim is not None and (lost or (from_file.orders and not same)):
        raise NeedsInformationError(
            f"the optimizers of the ranks list their parameters in different orders, and the orders of the "
            f"{world_size} ranks that load {checkpoint.source} are not recorded",
            expected=f"units of {world_size} ranks",
            found=f"units of {from_file.world_size} ranks",
            why="an id is the position of a parameter in the optimizer of one rank",
            next_step=f"add {flags.units('FILE')} that save_units wrote on every rank of the job that will load it, or "
            "give the optimizer its parameters in the same order on every rank and save units again",
        )


def _cast(units: Units, dtype: DType) -> Units:
    """The same with the floating dtype that the model is cast to, which decides the alignment."""

    def cast(params: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(replace(param, dtype=dtype) if param.dtype.floating else param for param in params)

    changed = tuple(replace(unit, params=cast(unit.params)) for unit in units.units)
    return replace(units, units=changed, unmanaged=cast(units.unmanaged))


def _orig_params_unknown(checkpoint: Checkpoint, why: str) -> NeedsInformationError:
    return NeedsInformationError(
        f"cannot tell whether the job that loads {checkpoint.source} uses use_orig_params",
        details=[
            "use_orig_params=False: states by flat parameter",
            "use_orig_params=True: states by parameter, aligned",
        ],
        why=why,
        next_step=f"add {flags.use_orig_params} or {flags.use_orig_params.off}",
    )


# Settings.


def _lost_strategy(units: Units, request: UnitsRequest, world_size: int | None) -> list[str]:
    """A note if nothing says which strategy ``units`` have on ``world_size`` ranks; none if they say it."""
    no_shard = any(unit.strategy is Strategy.NO_SHARD for unit in units.units)
    if request.strategy is not None or units.world_size != 1 or world_size == 1 or not no_shard:
        return []
    return [
        f"full-shard is assumed: on 1 rank FSDP1 turns every strategy into no-shard; {flags.strategy} chooses another"
    ]


def _sharding(units: Units, request: UnitsRequest, world_size: int | None) -> Units:
    """The units with their sharding group decided: HYBRID_SHARD needs its size, every other strategy has none."""
    hybrid = any(unit.strategy is Strategy.HYBRID_SHARD for unit in units.units)
    if hybrid and request.one_group:
        return Settings(strategy=Strategy.FULL_SHARD).applied_to(units)
    if request.shard_size is not None and not hybrid:
        raise UsageError(
            f"{flags.shard_size} is the size of a sharding group, which only hybrid-shard has",
            next_step=f"add {flags.strategy('hybrid-shard')}, or drop {flags.shard_size}",
        )
    same_ranks = request.strategy is None and world_size is not None and world_size == units.world_size
    if hybrid and units.shard_size is None and not same_ranks:
        recorded = request.strategy is None and units.world_size is not None
        unknown = f"the units record one group of {plural(units.world_size or 0, 'rank')}, not how others are grouped"
        raise NeedsInformationError(
            "hybrid-shard shards within groups of ranks, and "
            + (unknown if recorded else "the size of a group is not recorded"),
            next_step=f"add {flags.shard_size('N')} (usually the GPUs of one node)",
        )
    size = units.shard_size
    if size is not None and world_size is not None and world_size % size:
        if request.shard_size is not None:
            raise UsageError(
                f"{flags.shard_size(size)} does not divide the {plural(world_size, 'rank')} of the target",
                why="every sharding group has the same number of ranks",
                next_step=" or ".join(
                    f"{flags.shard_size(divisor)}" for divisor in range(2, world_size + 1) if world_size % divisor == 0
                ),
            )
        raise NeedsInformationError(
            f"sharding groups of {plural(size, 'rank')}, as the units have, do not divide {plural(world_size, 'rank')}",
            next_step=f"add {flags.shard_size('N')}, or {flags.strategy('full-shard')}",
        )
    return units


def _without_groups_of_another(units: Units, checkpoint: Checkpoint) -> Units:
    """``units`` without groups of parameters that ``checkpoint``'s optimizer, one of several of the model, does not
    list: they were recorded with another one.
    """
    optim = checkpoint.optim
    if units.groups is None or optim is None or not checkpoint.beside or optim.key_type == "id":
        return units
    own = {key for keys in listed_keys(units, listed_names(optim)) for key in keys}
    recorded = {key for group in units.groups for key in group}
    return units if recorded == own else replace(units, trained=None, by_rank=())


def _require_undivided(units: Units, checkpoint: Checkpoint) -> None:
    """Raises SourceUnsupportedError for flat parameters that would be in several param groups, or partly in one."""
    optim = checkpoint.optim
    if optim is None or optim.param_groups is None or units.use_orig_params:
        return
    group_of = {name: number for number, names in enumerate(listed_names(optim)) for name in names}
    in_none = "in no group of this optimizer" if checkpoint.beside else "in no group"
    wrong = [text for unit in units.units if (text := _division(unit, group_of, in_none))]
    if wrong:
        raise SourceUnsupportedError(
            "a flat parameter has to be in one param group, and these are divided among several",
            details=wrong,
            why="use_orig_params=False gives the optimizer one parameter per unit",
            next_step=f"add {flags.use_orig_params}, or wrap so that the parameters of a unit are in one group",
        )


def _division(unit: Unit, group_of: Mapping[str, int], in_none: str) -> str | None:
    """How the parameters of ``unit`` are divided among several groups, or among a group and none (``in_none``)."""
    by_group: dict[int | None, list[str]] = {}
    for param in unit.params:
        by_group.setdefault(group_of.get(param.name), []).append(param.name)
    if len(by_group) < 2:
        return None
    parts = [
        f"{some_of(names)} {in_none if number is None else f'in group {number}'}" for number, names in by_group.items()
    ]
    return f"{unit}: {'; '.join(parts)}"


def _require_possible(units: Units, *, recorded: bool) -> None:
    """Raises UsageError for what FSDP1 refuses. ``recorded``: it was wrapped like this (torch 2.4 takes scalars)."""
    wrong = flaws(units)
    scalars = () if recorded else [param.name for unit in units.units for param in unit.params if not param.shape]
    wrong += [f"{name} has no dimensions: a job has to ignore it, and its units file says so" for name in scalars]
    if wrong:
        raise UsageError(
            "FSDP1 cannot wrap this model like this",
            details=wrong,
            why="a flat parameter has elements, all of one dtype, and with use_orig_params=False of one requires_grad",
            next_step=f"wrap it differently ({flags.unit('GLOB')} or {flags.units('FILE')}), or add "
            f"{flags.use_orig_params}",
        )


def _settings_notes(units: Units, request: UnitsRequest, *, aligned: bool) -> list[str]:
    """``aligned``: the alignment is recorded in a file, or proved by the source's own slices."""
    lines = [f"target units: {describe_settings(units)}"]
    if units.use_orig_params and not aligned and any(unit.param_dtype is None for unit in units.units):
        lines.append(
            f"MixedPrecision.param_dtype is not recorded: if the job uses it, add {flags.param_dtype('DTYPE')}"
        )
    kernels = possibly_channels_last(units)
    if kernels and request.globs:
        lines.append(
            f"{plural(len(kernels), 'kernel', 'are')} assumed to be row-major: channels_last models need "
            f"{flags.units('FILE')}"
        )
    return lines
