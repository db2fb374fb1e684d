"""Transforms every model and every optimizer of a checkpoint: the main ones, and each named one like the only one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import TransformedCheckpoint, transform, units_request
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from fsdpckpt.flat.units.source import is_flattened
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection, Note, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.placements import Rules
from fsdpckpt.transform.rekey import apply_key_type
from fsdpckpt.transform.selection import NoKeyMatchesError
from fsdpckpt.transform.sharded import note_undetermined


def transform_sections(
    opened: Checkpoint, spec: TargetSpec, sources: Sources, *, place: str = ""
) -> TransformedCheckpoint:
    """``transform`` for the main sections and for each named one. ``place``: where the section was that ``--only``
    names. Raises what that raises, NeedsInformationError for sections that a flattened target or source cannot tell
    apart.
    """
    if not opened.named or spec.options.only is not None:
        return _with_undetermined(transform(opened, spec, sources, place=place), spec)
    _refuse_flattened(opened, spec, sources)
    if spec.layout is Layout.SHARDED and opened.layout is not Layout.FLATTENED:
        opened = _with_listed_parameters(opened, spec.options)
    unmatched = _Unmatched(opened)
    main = unmatched.transform(replace(opened, named=()), "", spec, sources)
    main = None if main is None else _with_undetermined(main, spec)
    notes = list(main.checkpoint.ledger.notes if main is not None else opened.ledger.notes)
    lacking = dict.fromkeys(main.checkpoint.lacking if main is not None else opened.lacking)
    applied_map = main.applied_map if main is not None else None
    named: list[NamedSection] = []
    for section in opened.named:
        if spec.layout is Layout.FLATTENED:  # a model beside the flattened one: it stays as it is
            named.append(section)
            continue
        done = unmatched.transform(_view(opened, section), section.dotted, spec, sources)
        if done is None:
            notes.append(Note("dropped", f"{flags.include} and {flags.exclude} leave nothing of {section.label}"))
            continue
        content = done.checkpoint.model if section.section is Section.MODEL else done.checkpoint.optim
        if section.section is Section.MODEL:  # an optimizer comes with its model, of which its own section speaks
            done = _with_undetermined(done, spec)
        if content is not None:
            named.append(replace(section, content=content))
        applied_map = applied_map or done.applied_map
        added = [note for note in done.checkpoint.ledger.notes if note not in notes]
        notes += [replace(note, message=f"{section.label}: {note.message}") for note in added]
        lacking.update(dict.fromkeys(done.checkpoint.lacking))
    unmatched.require_none()
    if main is None:
        main = TransformedCheckpoint(replace(opened, model=None, optim=None))
    ledger = replace(main.checkpoint.ledger, notes=tuple(notes))
    whole = replace(main.checkpoint, named=tuple(named), ledger=ledger, lacking=tuple(lacking))
    return replace(main, checkpoint=_promoted(whole), applied_map=applied_map)


def _with_undetermined(done: TransformedCheckpoint, spec: TargetSpec) -> TransformedCheckpoint:
    """``done`` with a note on the keys of its model that are cut without proof."""
    rules = spec.mesh.placing if spec.mesh is not None else None
    noted = note_undetermined(done.checkpoint, rules.file if isinstance(rules, Rules) else None)
    return replace(done, checkpoint=noted)


def _view(opened: Checkpoint, section: NamedSection) -> Checkpoint:
    """``section`` alone. The model of an optimizer only says what its ids are: it has nothing that could be lost."""
    view = alone(opened, section)
    if section.section is Section.MODEL or view.model is None:
        return view
    return replace(view, model=ModelState(view.model.params))


def _with_listed_parameters(opened: Checkpoint, options: ConvertOptions) -> Checkpoint:
    """``opened`` with every tensor that one of its optimizers lists marked as a parameter.

    Each optimizer of several lists some: for the others' sake, what one says of the model is noted there.
    """
    listed: list[tuple[ModelState, set[str]]] = []
    views = [alone(opened, named) for named in opened.named if named.section is Section.OPTIM]
    for view in [replace(opened, named=()), *views]:
        if view.model is None or view.optim is None:
            continue
        with suppress(FsdpckptError):  # raised again if the conversion needs the names
            by_name = apply_key_type(
                view,
                "name",
                units=None,
                reference=None,
                parameters=None,
                buffers=options.buffers,
            )
            keys = by_name.optim.keys if by_name.optim is not None else ()
            listed.append((view.model, {clean(key) for key in keys if isinstance(key, str)}))
    contents = [opened.model, *(named.content for named in opened.named)]
    models = [_with_parameters(each, listed) for each in contents if isinstance(each, ModelState)]
    alike = iter([_like_another(model, models) for model in models])
    main = next(alike) if opened.model is not None else None
    sections = [
        replace(named, content=next(alike)) if isinstance(named.content, ModelState) else named
        for named in opened.named
    ]
    return replace(opened, model=main, named=tuple(sections))


def _with_parameters(model: ModelState, listed: Sequence[tuple[ModelState, set[str]]]) -> ModelState:
    """``model`` with its tensors among the ``listed`` names marked as parameters."""
    names = {name for of, keys in listed if of is model for name in keys}
    params = dict(model.params)
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.sharded is None and clean(name) in names:
            params[name] = replace(leaf, sharded=True)
    return ModelState(params, model.metadata)


def _like_another(model: ModelState, others: Sequence[ModelState]) -> ModelState:
    """``model`` with its tensors marked as those of another one with the same names and shapes: an average of its
    weights has no optimizer that lists them.
    """
    params = dict(model.params)
    for other in others:
        if {name: _shape(leaf) for name, leaf in params.items()} != {
            name: _shape(leaf) for name, leaf in other.params.items()
        }:
            continue
        for name, leaf in params.items():
            like = other.params[name]
            if isinstance(leaf, Tensor) and isinstance(like, Tensor) and leaf.sharded is None:
                params[name] = leaf.with_sharded(like.sharded)
    return ModelState(params, model.metadata)


def _shape(leaf: object) -> tuple[int, ...] | None:
    return leaf.shape if isinstance(leaf, Tensor) else None


def _promoted(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with its only model, and its only optimizer, as the main one, if options have left just one: that
    is how a reader finds it.
    """
    for section in (Section.MODEL, Section.OPTIM):
        main = checkpoint.model if section is Section.MODEL else checkpoint.optim
        of_kind = [named for named in checkpoint.named if named.section is section]
        if main is not None or len(of_kind) != 1:
            continue
        (only,) = of_kind
        if isinstance(only.content, ModelState):
            checkpoint = replace(checkpoint, model=only.content)
        else:
            checkpoint = replace(checkpoint, optim=only.content)
        rest = tuple(named for named in checkpoint.named if named is not only)
        origin = replace(checkpoint.origin, nesting={**checkpoint.origin.nesting, section: only.path})
        checkpoint = replace(checkpoint, origin=origin, named=rest)
    return checkpoint


class _Unmatched:
    """Transforms section by section, and remembers which options that select or rename keys applied to none of one."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened
        self._sections = 0
        self._errors: dict[str, list[NoKeyMatchesError]] = {}

    def transform(
        self, checkpoint: Checkpoint, place: str, spec: TargetSpec, sources: Sources
    ) -> TransformedCheckpoint | None:
        """``checkpoint``, one section or the main ones, without the options that apply to nothing of it. None if it has
        no key that is selected.
        """
        options = spec.options
        if checkpoint.model is None and checkpoint.optim is None:
            return transform(checkpoint, replace(spec, options=_of_all_keys(options)), sources)
        self._sections += 1
        while True:
            try:
                return transform(checkpoint, replace(spec, options=options), sources, place=place)
            except NoKeyMatchesError as error:
                if error.given is None:
                    return None
                self._errors.setdefault(error.given, []).append(error)
                fewer = _without(options, error.given)
                if options.include and not fewer.include:
                    return None
                options = fewer

    def require_none(self) -> None:
        """Raises the error of an option that applied to no section at all."""
        for given, errors in self._errors.items():
            if len(errors) == self._sections:
                first = errors[0]
                meant = next((named for named in self._opened.named if given.startswith(f"{named.dotted}.")), None)
                if meant is not None:
                    first.next_step = f"{flags.only(meant.label)} takes that section alone"
                raise first


def _of_all_keys(options: ConvertOptions) -> ConvertOptions:
    return replace(options, include=(), exclude=(), rename=(), strip_prefix=None, add_prefix=None)


def _without(options: ConvertOptions, given: str) -> ConvertOptions:
    """``options`` without the glob or the prefix ``given``."""
    return replace(
        options,
        include=tuple(glob for glob in options.include if glob != given),
        exclude=tuple(glob for glob in options.exclude if glob != given),
        rename=tuple(pair for pair in options.rename if pair[0] != given),
        strip_prefix=None if options.strip_prefix == given else options.strip_prefix,
    )


def _refuse_flattened(opened: Checkpoint, spec: TargetSpec, sources: Sources) -> None:
    """Raises NeedsInformationError for several optimizers in a flattened target, and for named sections that hold
    slices of flat parameters: units describe one model and one optimizer.
    """
    flat = [
        named
        for named in opened.named
        if (spec.layout is Layout.FLATTENED and not isinstance(named.content, ModelState))
        or is_flattened(alone(opened, named), sources, units_request(spec.options))
    ]
    if flat:
        raise NeedsInformationError(
            f"{opened.source} has several models or optimizers, and flat parameters are those of one",
            details=[f"{flags.only(named.label)}" for named in flat],
            file=opened.source,
            why="the units of flat parameters describe one model and one optimizer",
            next_step=f"convert one at a time: {flags.only(flat[0].label)}",
        )
