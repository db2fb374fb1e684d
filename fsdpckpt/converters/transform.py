"""Transforms a checkpoint between reading and writing: selects, unflattens, rekeys, fills, renames, shards."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fsdpckpt import flags
from fsdpckpt.converters.copies import with_equal_copies
from fsdpckpt.converters.mapping import after_mapping, before_mapping, mapped, refuse_ids
from fsdpckpt.converters.target_spec import TargetSpec, refuse_flat_options
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceError,
    SourceMissingError,
    SourceUnsupportedError,
    UsageError,
    of_option,
    to_copy,
)
from fsdpckpt.flat.flatten.states import require_equal_states
from fsdpckpt.flat.names import ParameterNames, model_names, name_contradictions
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units import any_module
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest, load_units
from fsdpckpt.flat.units.source import is_flattened, source_units
from fsdpckpt.flat.units.target import target_units
from fsdpckpt.ir import IdRule, section_of
from fsdpckpt.ir.buffers import NO_BUFFERS, trained_keys
from fsdpckpt.ir.checkpoint import Checkpoint, Container, KeyType, Layout, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.invariants import fatal
from fsdpckpt.ir.names import SourceNames, clean, leading_wrapper, normalise, under_first_names
from fsdpckpt.ir.quantized import unwrapped
from fsdpckpt.ir.table import Table
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.maps import AppliedMap
from fsdpckpt.option_fields import Scope, given
from fsdpckpt.options import ConvertOptions, MissingState
from fsdpckpt.producers.table import id_rule_of
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.missing_state import Choice, fill, require_complete
from fsdpckpt.transform.parameter_order import from_param_names
from fsdpckpt.transform.placements import (
    LikeCheckpoint,
    Rules,
    TargetMesh,
    apply_placements,
    place_remaining,
    warn_of_uneven_cuts,
)
from fsdpckpt.transform.rekey import apply_key_type, recounted
from fsdpckpt.transform.selection import (
    KEYS_IN_MESSAGE,
    is_selected,
    new_name,
    parameter_names,
    rename,
    select_keys,
    select_section,
    with_own_tensors,
)
from fsdpckpt.transform.sharded import (
    ShardingHints,
    decide_sharded,
    mark_sharded,
    refuse_casts,
    refuse_in_blocks,
    require_whole_blocks,
)
from fsdpckpt.transform.weight_decay import list_parameters, note_one_group


@dataclass(frozen=True, slots=True)
class TransformedCheckpoint:
    """The checkpoint to write, with whole tensors.

    ``units``: those of a flattened target. Its optimizer is keyed by name; the writer rekeys it to ``key_type``.
    ``applied_map``: what ``--map`` did, None without it.
    """

    checkpoint: Checkpoint
    units: Units | None = None
    key_type: KeyType | None = None
    applied_map: AppliedMap | None = None


def transform(opened: Checkpoint, spec: TargetSpec, sources: Sources, *, place: str = "") -> TransformedCheckpoint:
    """Select, unflatten, rekey, rename and shard ``opened`` as ``spec`` and its options ask. ``place``: the keys of a
    named section, which ``inspect`` shows before each of its names, and globs may therefore have.

    Raises SourceError for a source that is incomplete or contradicts itself, NeedsInformationError, UsageError.
    """
    options, request = spec.options, units_request(spec.options)
    _require_reference(options, sources)
    if options.map is not None:
        return _transform_mapped(opened, spec, sources, place=place)
    checkpoint = select_section(opened, section_of(options.only))
    _require_sound(checkpoint, section_of(options.only))
    checkpoint = _with_odd_states(checkpoint)
    _refuse_states(checkpoint, spec)
    if spec.layout is Layout.FLATTENED:
        checkpoint = _unwrap_quantized_states(checkpoint)
    checkpoint = list_parameters(checkpoint, options.no_weight_decay)
    if spec.flavor is not None and spec.flavor.two_groups:
        checkpoint = note_one_group(checkpoint)
    to_flattened = spec.layout is Layout.FLATTENED
    flattened = is_flattened(checkpoint, sources, request)
    refuse_flat_options(options, checkpoint, has_flat=to_flattened or flattened)
    source_keys = checkpoint.optim.key_type if checkpoint.optim is not None else None
    resolved: ResolvedUnits | None = None
    if flattened:
        resolved = _source_units(opened, checkpoint, request, sources, target_flattened=to_flattened)
        checkpoint = name_slices(checkpoint, resolved, sources)
        if not resolved.order_known:
            checkpoint = checkpoint.without_order()
    opened_names = list(opened.model.params) if opened.model is not None else ()
    leading = leading_wrapper(opened_names) if resolved is not None else ""
    checkpoint, source_names = normalise(checkpoint, leading=leading, like=opened_names)
    checkpoint, buffers_needed = with_equal_copies(checkpoint, trained_keys(opened), options.buffers, sources)
    if options.clean_names:
        checkpoint = _with_clean_words(checkpoint, wrapped=source_names.wrapped, to_flattened=to_flattened)
    rules = _id_rules(opened, spec)
    steps = _Steps(
        options, request, sources, _ordered_units(resolved, request, sources), source_names, opened, *rules, place
    )
    if to_flattened:
        keyed = steps.key(checkpoint, "name")
        selected = steps.select(keyed)
        renamed = source_names.noted(steps.finish(selected))
        changes = steps.name_changes(keyed, selected)
        return steps.flatten(renamed, resolved, changes, spec, source_keys)
    by_name = steps.needs_names(source_keys)
    weights = spec.form is not None and spec.form.weights
    if resolved is None:
        wanted: set[KeyType | str | None] = {options.key_type or source_keys, *(["name"] if by_name else [])}
        checkpoint = checkpoint if buffers_needed else _note_unused(checkpoint, spec, wanted)
    keyed = steps.key(checkpoint, "name" if by_name else options.key_type)
    checkpoint = steps.select(keyed)
    steps = steps.on_selected(keyed, checkpoint)
    checkpoint = steps.fill(checkpoint, resolved.units if resolved is not None else steps.units)
    checkpoint = steps.key(steps.apply_placements(checkpoint, spec.mesh), options.key_type or source_keys)
    _require_common_ids(checkpoint, steps.units, spec.layout)
    checkpoint = steps.cut(checkpoint, spec)
    # Rename last: sections are matched by names without wrapper prefixes.
    keep_names = not (options.clean_names or weights)
    named = source_names.restored(checkpoint) if keep_names else source_names.noted(checkpoint)
    return TransformedCheckpoint(steps.finish(named))


def _transform_mapped(opened: Checkpoint, spec: TargetSpec, sources: Sources, *, place: str) -> TransformedCheckpoint:
    """``transform`` of what ``--map`` makes of ``opened``: that is first read as whole tensors by name."""
    options = spec.options
    # Units, names and order are those of one of the two models: of the written one if its form needs them.
    to_flattened = spec.layout is Layout.FLATTENED
    of_target = to_flattened or (spec.form is not None and spec.form.weights)
    whole = TargetSpec(
        Layout.FULL, Container.TORCH, None, before_mapping(options, of_target=of_target), directory=False
    )
    named, names = normalise(transform(opened, whole, sources, place=place).checkpoint)
    named = names.noted(Table.of(named).with_plain_words().written(named))
    by_id = opened.optim is not None and opened.optim.key_type == "id"
    key_type: KeyType | None = options.key_type or ("id" if by_id else None)
    if key_type == "id" and not to_flattened:
        refuse_ids(named, options)
    checkpoint, applied = mapped(named, opened, options, sources)
    later = replace(after_mapping(options, of_target=of_target), key_type=key_type)
    return replace(transform(checkpoint, replace(spec, options=later), sources), applied_map=applied)


def _require_reference(options: ConvertOptions, sources: Sources) -> None:
    """Raises SourceMissingError for a ``--reference`` that does not exist, needed or not: it is a typing error."""
    path = options.reference
    if path is not None and sources.stat(path) is None:
        raise SourceMissingError(
            f"{flags.reference(path)} does not exist", file=path, next_step="give the path of a checkpoint, or drop it"
        )


def _id_rules(opened: Checkpoint, spec: TargetSpec) -> tuple[IdRule, IdRule]:
    """How the source and the target count ids."""
    return id_rule_of(opened), spec.form.id_rule if spec.form is not None else IdRule.GROUPS


def _source_units(
    opened: Checkpoint, selected: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool
) -> ResolvedUnits:
    """The units of ``opened``, proved by all of its sections; by the ``selected`` one alone if another one contradicts
    or leaves them open: a section never needs another to be understood.
    """
    try:
        return source_units(opened, request, sources, target_flattened=target_flattened)
    except (NeedsInformationError, SourceError):
        if (selected.model is None) == (opened.model is None) and (selected.optim is None) == (opened.optim is None):
            raise
        with suppress(NeedsInformationError, SourceError):  # what all sections together need is the better advice
            return source_units(selected, request, sources, target_flattened=target_flattened)
        raise


def _refuse_states(checkpoint: Checkpoint, spec: TargetSpec) -> None:
    """Raises UsageError or SourceUnsupportedError for states whose values the target, or an option, would change."""
    if spec.options.optim_dtype is not None:
        refuse_casts(checkpoint)
    if spec.options.missing_state is MissingState.ZEROS:
        refuse_in_blocks(checkpoint, "zeros in blocks are not made", f"drop {flags.missing_state('zeros')}")
    if Layout.FLATTENED in (spec.layout, checkpoint.layout):
        _refuse_prodigy_slices(checkpoint)
    if spec.layout is Layout.FLATTENED:
        refuse_in_blocks(checkpoint, "FSDP1 cuts flat parameters inside of its blocks")


def _refuse_prodigy_slices(checkpoint: Checkpoint) -> None:
    """Raises SourceUnsupportedError for states that cover only some of a rank's elements."""
    for group in (checkpoint.optim.param_groups if checkpoint.optim is not None else None) or ():
        step = group.get("slice_p")
        if isinstance(step, int) and step > 1 and "d_numerator" in group:
            raise SourceUnsupportedError(
                f"the states s and p0 of Prodigy (prodigyopt) with slice_p={step} cannot be cut like flat parameters",
                file=checkpoint.source,
                why=f"a rank keeps every {step}th element of its own slice, and other slices have others",
                next_step=f"{flags.only('model')} converts the model alone; Prodigy(slice_p=1) can be converted with "
                "its states",
            )


def _unwrap_quantized_states(checkpoint: Checkpoint) -> Checkpoint:
    """Turn the states that bitsandbytes wraps to keep FSDP from cutting them into ordinary states, which are cut."""
    optim = checkpoint.optim
    if optim is None:
        return checkpoint
    state = {key: unwrapped(entry) for key, entry in optim.state.items()}
    return replace(checkpoint, optim=optim.with_state(state))


def _require_sound(checkpoint: Checkpoint, only: Section | None) -> None:
    """Raises a SourceError that lists every fatal problem of the requested sections, present or not."""
    sections = {None, only} if only is not None else {None, *Section}
    problems = [problem for problem in checkpoint.problems if problem.fatal and problem.section in sections]
    if problems:
        raise fatal(problems, source=checkpoint.source)


def _with_odd_states(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with a warning about states that are in no group or lack a part of what others have: they are
    carried as they are. Parameters without any state have a note of their own.
    """
    optim = checkpoint.optim
    if optim is None:
        return checkpoint
    without_state = {str(key) for key in optim.all_keys() if not optim.state.get(key)}
    odd = [
        problem.message
        for problem in checkpoint.problems
        if problem.kind == "state" and not problem.fatal and problem.key not in without_state
    ]
    if not odd:
        return checkpoint
    count = plural(len(odd), "optimizer state", "are")
    message = f"{count} carried although something is odd about them: {some_of(odd, KEYS_IN_MESSAGE)}"
    return checkpoint.noted(Note("odd-states", message, warning=True))


def _note_unused(checkpoint: Checkpoint, spec: TargetSpec, key_types: set[KeyType | str | None]) -> Checkpoint:
    """Add a note on options that supply what the checkpoint states itself.

    ``key_types``: those that its optimizer will have.
    """
    options, model, optim = spec.options, checkpoint.model, checkpoint.optim
    unused = given(options, Scope.KNOWLEDGE)
    if spec.form is not None and spec.form.weights:  # the reference is the model's directory
        unused = tuple(option for option in unused if option != flags.reference)
    leaves = model.params.values() if model is not None and spec.layout is Layout.SHARDED else ()
    undecided = any(isinstance(leaf, Tensor) and leaf.ndim and leaf.sharded is None for leaf in leaves)
    rekeyed = optim is not None and key_types != {optim.key_type}
    # Named sections use them on their own.
    if not unused or undecided or rekeyed or options.missing_state is not None or checkpoint.named:
        return checkpoint
    why = f"{checkpoint.source} itself says all that this conversion needs"
    return _with_unused(checkpoint, f"{' and '.join(f'{option}' for option in unused)} had no effect: {why}")


def _with_clean_words(checkpoint: Checkpoint, *, wrapped: bool, to_flattened: bool) -> Checkpoint:
    """Clean ``param_names``, as the keys are already. ``wrapped``: whether any key was not."""
    groups = checkpoint.optim.param_groups if checkpoint.optim is not None else None
    has_words = any("param_names" in group for group in groups or ())
    cleaned = Table.of(checkpoint).with_plain_words().written(checkpoint) if has_words else checkpoint
    if to_flattened or not (wrapped or cleaned.optim != checkpoint.optim):
        names = "flat parameters" if to_flattened else f"the names in {checkpoint.source}"
        cleaned = _with_unused(cleaned, f"{flags.clean_names} had no effect: {names} have no prefixes of wrappers")
    return cleaned


def _with_unused(checkpoint: Checkpoint, message: str) -> Checkpoint:
    return checkpoint.noted(Note("unused", message))


def _require_common_ids(checkpoint: Checkpoint, units: Units | None, layout: Layout) -> None:
    """Raises NeedsInformationError if the target has ids and its ranks number parameters differently.

    A full checkpoint has rank 0's ids, as ``FSDP.rekey_optim_state_dict`` gives them there.
    """
    optim = checkpoint.optim
    known = (optim.orders if optim is not None else ()) or (units.orders if units is not None else ())
    differing = [order for order in known if layout is Layout.SHARDED or 0 in order.ranks]
    if optim is not None and optim.key_type == "id" and differing:
        raise NeedsInformationError(
            f"the optimizers of the ranks of {checkpoint.source} list their parameters in different orders, so an id "
            "would be another parameter on each rank that loads the target",
            why="one optimizer state for all ranks can only be keyed by what all ranks agree on",
            next_step=f"{flags.key_type('name')}",
        )


def _ordered_units(resolved: ResolvedUnits | None, request: UnitsRequest, sources: Sources) -> Units | None:
    """The units that map ids to parameters: the source's, or those of ``--units``."""
    if resolved is None:
        return load_units(request.file, sources) if request.file else None
    return resolved.units if resolved.order_known else None


@dataclass(frozen=True)
class _Steps:
    """The single steps. ``units``: see ``_ordered_units``; ``source_names``: the names in the source.

    ``opened``: the source with the sections that ``--only`` leaves out, which say what names and parameters are.
    ``source_ids``, ``target_ids``: how each counts ids. ``place``: see ``transform``.
    """

    options: ConvertOptions
    request: UnitsRequest
    sources: Sources
    units: Units | None
    source_names: SourceNames
    opened: Checkpoint
    source_ids: IdRule
    target_ids: IdRule
    place: str

    def select(self, checkpoint: Checkpoint) -> Checkpoint:
        options, names = self.options, self.source_names
        aliases: dict[str, tuple[str, ...]] = {}
        for name in parameter_names(checkpoint):
            aliases[name] = (names.of_model(name), names.of_optimizer(name))
            if self.place:
                aliases[name] += tuple(f"{self.place}.{each}" for each in (name, *aliases[name]))
        selected = select_keys(checkpoint, include=options.include, exclude=options.exclude, aliases=aliases)
        if selected.units is None or not (options.include or options.exclude):
            return selected
        return replace(selected, units=self.selection(checkpoint, selected).applied_to(selected.units))

    def key(self, checkpoint: Checkpoint, key_type: KeyType | None) -> Checkpoint:
        """Rekey the optimizer to ``key_type``; None keeps the keys. Ids are counted as the target counts them."""
        optim = checkpoint.optim
        if optim is None or key_type is None or optim.key_type in (None, key_type):
            group_by_group = self.source_ids is IdRule.MODEL and self.target_ids is IdRule.GROUPS
            return recounted(checkpoint) if group_by_group else checkpoint
        only_optimizer = checkpoint.model is None and self.opened.model is not None
        keyed = apply_key_type(
            replace(checkpoint, model=self.opened.model) if only_optimizer else checkpoint,
            key_type,
            units=self.units,
            reference=self._reference,
            parameters=self.request.parameters,
            parameter_groups=self.request.parameter_groups,
            buffers=self.options.buffers,
            rule=self.target_ids,
        )
        return replace(keyed, model=None) if only_optimizer else keyed

    def needs_names(self, source_keys: KeyType | None) -> bool:
        """Whether the optimizer has to be keyed by name on the way, whatever its keys are in the end."""
        options = self.options
        if options.include or options.exclude or options.missing_state or options.placements or options.like:
            return True
        # Only names say which ids the target gives the parameters that the source has ids of. Places in the model get
        # the order of the optimizer from whoever knows it.
        request, optim = self.request, self.opened.optim
        listed = optim is not None and from_param_names(optim) is not None
        knows_order = listed or any(each is not None for each in (request.file, request.reference, request.parameters))
        counts_otherwise = self.target_ids is not self.source_ids and (self.target_ids is IdRule.MODEL or knows_order)
        return source_keys == "id" and options.key_type != "name" and counts_otherwise

    def fill(self, checkpoint: Checkpoint, units: Units | None) -> Checkpoint:
        """Apply ``--missing-state``. Without it no state is made, and a note lists the parameters that have none."""
        missing = self.options.missing_state
        choice: Choice = missing.value if missing is not None else "skip"
        return fill_missing(checkpoint, choice, units=units, sources=self.sources)

    def rename(self, checkpoint: Checkpoint) -> Checkpoint:
        """Apply the options that change names."""
        options = self.options
        return rename(
            checkpoint, strip_prefix=options.strip_prefix, add_prefix=options.add_prefix, pairs=options.rename
        )

    def finish(self, checkpoint: Checkpoint) -> Checkpoint:
        """Rename, and give each key its own tensor if any is cast."""
        cast = self.options.dtype is not None or self.options.optim_dtype is not None
        return with_own_tensors(self.rename(checkpoint)) if cast else self.rename(checkpoint)

    def on_selected(self, keyed: Checkpoint, selected: Checkpoint) -> _Steps:
        """The steps that follow ``select``: the units that map ids lose the parameters that ``keyed`` lost."""
        if self.units is None or not (self.options.include or self.options.exclude):
            return self
        return replace(self, units=self.selection(keyed, selected).applied_to(self.units))

    def selection(self, keyed: Checkpoint, selected: Checkpoint) -> NameChanges:
        """What ``select`` made of ``keyed``, whose names stay as they are."""
        return replace(self.name_changes(keyed, selected), new_name=lambda name: name)

    def name_changes(self, keyed: Checkpoint, selected: Checkpoint) -> NameChanges:
        """What ``select`` made of ``keyed``, and what ``rename`` makes of names; both for any name."""
        options = self.options
        present, kept = set(parameter_names(keyed)), set(parameter_names(selected))

        def keeps(name: str) -> bool:
            if name in present:
                return name in kept
            return is_selected((name,), include=options.include, exclude=options.exclude)

        new = partial(new_name, strip_prefix=options.strip_prefix, add_prefix=options.add_prefix, pairs=options.rename)
        return NameChanges(keeps, new, tuple(parameter_names(keyed)))

    def apply_placements(
        self, checkpoint: Checkpoint, target: TargetMesh | None, *, renamed: bool = False
    ) -> Checkpoint:
        """Place every sharded tensor on the target's mesh, by the names it will have there.

        ``renamed``: whether ``checkpoint`` has these names already.
        """
        if target is None:
            return checkpoint
        if target.note is not None:
            checkpoint = checkpoint.noted(Note("inferred", target.note))
        if isinstance(target.placing, Rules | LikeCheckpoint):
            checkpoint = mark_sharded(checkpoint, self.hints(checkpoint))
        named, _ = normalise(checkpoint if renamed else self.written(checkpoint))
        return apply_placements(checkpoint, named, target)

    def written(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint`` with the names that will be written, which options and other checkpoints may use too."""
        return self.rename(checkpoint if self.options.clean_names else self.source_names.restored(checkpoint))

    def shard(self, checkpoint: Checkpoint, *, strict: bool) -> Checkpoint:
        """Decide which tensors are sharded, with ``--buffers`` and ``--reference``."""
        checkpoint = decide_sharded(checkpoint, self.hints(checkpoint), strict=strict)
        uncut = self.units.unit_of().keys() - self.units.cut_in_sharded() if self.units is not None else frozenset()
        keys = tuple(name for name in parameter_names(checkpoint) if name in uncut)
        if not keys:
            return checkpoint
        message = f"{plural(len(keys), 'parameter', 'are')} whole on every rank, as FSDP1 has those of NO_SHARD units: "
        note = Note("units", message + some_of(keys, KEYS_IN_MESSAGE), keys=keys)
        return checkpoint.noted(note)

    def cut(self, checkpoint: Checkpoint, spec: TargetSpec) -> Checkpoint:
        """Decide which tensors are sharded, and how, if the target is."""
        if spec.layout is Layout.SHARDED:
            # A cut that a DCP loader does not expect costs nothing; a DTensor in place of a buffer does not load.
            checkpoint = self.shard(checkpoint, strict=spec.container is Container.TORCH)
        if spec.mesh is not None:
            checkpoint = place_remaining(checkpoint, spec.mesh)
            if spec.container is Container.TORCH:  # DCP loads on any mesh
                checkpoint = warn_of_uneven_cuts(checkpoint)
        if spec.layout is Layout.SHARDED and spec.world_size is not None:
            require_whole_blocks(checkpoint, spec.world_size, placed=spec.mesh is not None)
        return checkpoint

    def hints(self, checkpoint: Checkpoint) -> ShardingHints:
        """The hints from ``--buffers``, and from ``--reference`` or the units of the source."""
        reference: Mapping[str, bool | None] | None = None
        opened, units = self._reference, self.units or checkpoint.units
        if opened is not None:
            params = opened.model.params if opened.model is not None else {}
            reference = {name: getattr(leaf, "sharded", None) for name, leaf in params.items()}
        elif units is not None and _describe_model(units, checkpoint):
            reference = _in_units(units, checkpoint)
        names, written = (
            list(each.model.params) if each.model is not None else [] for each in (checkpoint, self.written(checkpoint))
        )
        return ShardingHints(
            buffers=self.options.buffers,
            reference=reference,
            written=dict(zip(names, written, strict=True)),
            left_out=self.opened.optim if checkpoint.optim is None else None,
            all_keys=tuple(map(clean, self.opened.model.params)) if self.opened.model is not None else (),
        )

    def flatten(
        self,
        checkpoint: Checkpoint,
        source: ResolvedUnits | None,
        changes: NameChanges,
        spec: TargetSpec,
        source_keys: KeyType | None,
    ) -> TransformedCheckpoint:
        """Check that the whole tensors by name are complete and consistent within each unit of the target.

        ``changes``: of names, which were applied to ``checkpoint`` and are still to be applied to all units.
        """
        options = self.options
        if checkpoint.model is None and checkpoint.optim is None:
            raise UsageError(
                f"{checkpoint.source} has neither a model nor an optimizer to flatten",
                next_step=to_copy("see what it holds", f"fsdpckpt inspect {shlex.quote(checkpoint.source)}"),
            )
        buffers = changes.follow_globs(self.request.buffers, parameter_names(checkpoint))
        if self.request.buffers and not buffers:
            buffers = NO_BUFFERS  # all of those that were named are left out
        request = replace(self.request, changes=changes, buffers=buffers)
        if source is not None:
            old, new = source.units.parameters, parameter_names(checkpoint)
            if any_module(request.globs, old) and not any_module(request.globs, new):
                request = replace(request, globs=())  # they name the units of the source, which the target has too
            source = replace(source, units=changes.applied_to(source.units))
        if checkpoint.units is not None:
            checkpoint = replace(checkpoint, units=changes.applied_to(checkpoint.units))
        cast = DTYPES[options.dtype] if options.dtype is not None else None
        target = target_units(
            checkpoint,
            request,
            source,
            spec.world_size or 1,
            self.sources,
            dtype=cast,
            left_out=self._names_left_out(checkpoint, changes),
        )
        checkpoint = _under_all_names(under_first_names(checkpoint, target.units), target.units)
        checkpoint = checkpoint.noted(*(Note("units", line) for line in target.how))
        checkpoint = self.fill(checkpoint, target.units)
        key_type = options.key_type or source_keys or "id"
        if not target.units.use_orig_params:
            require_complete(checkpoint, target.units)
            require_equal_states(checkpoint, target.units, self.sources)
            if options.key_type == "name":
                raise UsageError(
                    f"{flags.key_type('name')} cannot key flat parameters: with use_orig_params=False one entry holds "
                    "many names",
                    next_step=f"drop {flags.key_type}, or add {flags.use_orig_params}",
                )
            key_type = "id"
        if spec.form is not None:  # which may shard one section and flatten the other
            hints = ShardingHints(reference=_in_units(target.units, checkpoint))
            checkpoint = decide_sharded(checkpoint, hints, strict=True)
            checkpoint = self.apply_placements(checkpoint, spec.mesh, renamed=True)
            checkpoint = place_remaining(checkpoint, spec.mesh) if spec.mesh is not None else checkpoint
        return TransformedCheckpoint(checkpoint, target.units, key_type)

    def _names_left_out(self, checkpoint: Checkpoint, changes: NameChanges) -> ParameterNames | None:
        """The names of the model that ``--only optim`` leaves out, as the target has them; None if nothing is."""
        names = model_names(self.opened, "the model section, which is left out") if checkpoint.model is None else None
        if names is None:
            return None
        kept = [param.name for param in names.params if changes.keeps(param.name)]
        return names.renamed({name: changes.new_name(name) for name in kept})

    @cached_property
    def _reference(self) -> Checkpoint | None:
        path = self.options.reference
        if path is None:
            return None
        with of_option(flags.reference):
            return open_checkpoint(path, sources=self.sources, locate=Locate.NOTHING)


def _under_all_names(checkpoint: Checkpoint, units: Units) -> Checkpoint:
    """``checkpoint`` with the shared parameters of its model under all their names, as FSDP saves them. An export has
    them under one.
    """
    model = checkpoint.model
    params = model.params if model is not None else {}
    missing = {later: first for later, first in units.shared if first in params and later not in params}
    if model is None or not missing:
        return checkpoint
    notes = (Note("tied", f"{later} is added: it is tied to {first}", later) for later, first in missing.items())
    both = {**params, **{later: params[first] for later, first in missing.items()}}
    return replace(checkpoint, model=replace(model, params=both)).noted(*notes)


def _in_units(units: Units, checkpoint: Checkpoint) -> dict[str, bool]:
    """Each model key (without wrapper prefixes) to whether it names a parameter that FSDP1 shards."""
    sharded, first_names = units.cut_in_sharded(), dict(units.shared)
    params = checkpoint.model.params if checkpoint.model is not None else {}
    return {name: first_names.get(name, name) in sharded for name in params}


def _describe_model(units: Units, checkpoint: Checkpoint) -> bool:
    """Whether all parameters of ``units`` are in the model section, with their shapes."""
    names = model_names(checkpoint, "the model section")
    return names is not None and not any(name_contradictions(units, names, whole_model=False))


def units_request(options: ConvertOptions) -> UnitsRequest:
    """The options about units. Raises SourceMissingError if the file of parameter names cannot be read."""
    parts = _listed(options.parameters) if options.parameters is not None else ()
    return UnitsRequest(
        file=options.units,
        globs=options.unit,
        use_orig_params=options.use_orig_params,
        strategy=options.strategy,
        param_dtype=DTYPES[options.param_dtype] if options.param_dtype is not None else None,
        shard_size=options.shard_size,
        reference=options.reference,
        parameters=tuple(name for part in parts for name in part) if parts else None,
        parameter_groups=parts,
        buffers=options.buffers,
        one_group=bool(options.mesh) and options.strategy is None and options.shard_size is None,
    )


def _listed(path: str) -> Groups:
    """The names in the file of ``--parameters``, as blank lines divide them."""
    next_step = "write the names of model.named_parameters() into a text file, one per line"
    parts: list[list[str]] = [[]]
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    parts[-1].append(line.strip())
                elif parts[-1]:
                    parts.append([])
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path, bytes that are no text
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise SourceMissingError(f"{flags.parameters(path)}: {reason}", file=path, next_step=next_step) from error
    names = [name for part in parts for name in part]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if not names:
        raise UsageError(
            f"{flags.parameters(path)} names no parameter: the file is empty", file=path, next_step=next_step
        )
    if twice:
        raise SourceCorruptError(
            f"{flags.parameters(path)} names some parameters more than once",
            details=twice,
            file=path,
            next_step=next_step,
        )
    return tuple(tuple(part) for part in parts if part)


def fill_missing(checkpoint: Checkpoint, choice: Choice, *, units: Units | None, sources: Sources) -> Checkpoint:
    """``transform.missing_state.fill`` for a checkpoint keyed by name; reads 0-dim states from its files."""
    return fill(checkpoint, choice, units=units, read=lambda tensor: sources.read_elements(checkpoint.files, tensor))
