"""Decides, for a sharded target, which tensors FSDP shards and which it replicates.

FSDP shards parameters and the optimizer states of their shape; buffers, 0-dim states and what FSDP does not manage are
replicated. A sharded source shows which is which by its placements and chunks. A full one may not: then the optimizer's
lists, a reference or ``--buffers`` decide. A tensor that none of them decides is an error; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, UsageError, to_copy
from fsdpckpt.globs import matches
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, Container, ModelState, Note
from fsdpckpt.ir.counters import is_counter
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.rows import undetermined
from fsdpckpt.ir.state_shapes import shown_shapes
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, with_tensors
from fsdpckpt.text import first_lines, plural, some_of

_KEYS_IN_MESSAGE = 12  # enough to recognise the model, few enough to read
_KEYS_IN_NOTE = 5


@dataclass(frozen=True, slots=True)
class ShardingHints:
    """The user's hints.

    ``buffers``: globs of replicated model keys, or ``("none",)``. ``reference``: ``Tensor.sharded`` by model key.
    ``written``: the name that will be written for each model key, which ``buffers`` and ``reference`` may use too.
    ``left_out``: the source's optimizer, if the target gets none: it lists the parameters all the same. ``all_keys``:
    the model keys of the source, also those that are not selected, whose buffers may be named, too.
    """

    buffers: tuple[str, ...] = ()
    reference: Mapping[str, bool | None] | None = None
    written: Mapping[str, str] = field(default_factory=dict)
    left_out: Optimizer | None = None
    all_keys: tuple[str, ...] = ()

    def is_buffer(self, name: str, glob: str) -> bool:
        return matches(name, glob) or matches(self.written.get(name, name), glob)

    def referenced(self, name: str) -> bool | None:
        """``Tensor.sharded`` of ``name`` in the reference; None if that does not have it, or does not know either."""
        reference = self.reference or {}
        return reference.get(name, reference.get(self.written.get(name, name)))


def decide_sharded(checkpoint: Checkpoint, hints: ShardingHints, *, strict: bool) -> Checkpoint:
    """Set every ``Tensor.sharded`` to True or False, and add notes on what was inferred.

    ``strict`` (rank files, where a wrong answer does not load): raises NeedsInformationError for tensors that remain
    undecided. Otherwise (DCP, where any sharding loads) they are sharded like parameters, and marked.
    """
    model, undecided, inferred, whole = _decide_model(checkpoint, hints)
    if undecided and strict:
        raise NeedsInformationError(
            f"{checkpoint.source} does not tell parameters (sharded) from buffers (whole on every rank): "
            f"{plural(len(undecided), 'model key')}",
            details=first_lines(undecided, _KEYS_IN_MESSAGE),
            why="the source stores both the same way, and it has no optimizer that lists the parameters"
            if checkpoint.optim is None
            else "the source stores both the same way, and the optimizer does not list these keys",
            next_step=f"add {flags.buffers('GLOB')} for the buffers ({flags.buffers('none')} when there are none), "
            f"{flags.reference('PATH')} of a sharded checkpoint of this model, or {flags.units('FILE')}, which "
            "save_parameter_order writes in the job",
        )
    optim, ambiguous = _decide_optim(checkpoint.optim, model)
    if ambiguous and strict:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say which states of {plural(len(ambiguous), 'parameter')} are sharded",
            details=first_lines(ambiguous, _KEYS_IN_MESSAGE),
            why="their states have several shapes, and no model key of the same name says which one is the parameter's",
            next_step=f"write a DCP directory ({flags.container('dcp')}), which loads either way, or add "
            f"{flags.only('model')}",
        )
    notes: list[Note] = []
    if strict and whole and checkpoint.container == Container.DCP:  # which does not say why they are in one piece
        message = (
            f"{plural(len(whole), 'parameter', 'are')} in one piece, which every rank gets, as if FSDP ignored "
            f"{'it' if len(whole) == 1 else 'them'}: {some_of(whole, _KEYS_IN_NOTE)}. If only tensor parallelism cut "
            f"the others, add {flags.like('PATH')} (per-rank DTensor files of this model), which says what FSDP shards"
        )
        notes.append(Note("inferred", message, keys=tuple(whole)))
    if inferred:
        are_parameters, them = ("key is a parameter", "it") if inferred == 1 else ("keys are parameters", "them")
        notes.append(Note("inferred", f"{inferred} model {are_parameters}: the optimizer lists {them}"))
    _require_buffers(checkpoint, hints)
    decided = replace(checkpoint, model=model, optim=optim).noted(*notes)
    return decided.with_extras(partial(with_tensors, change=_sharded_only_if_source_says))


def note_undetermined(checkpoint: Checkpoint, placements: str | None = None) -> Checkpoint:
    """``checkpoint`` with a note on the model keys that are cut without proof, under the names that they have now.

    ``placements``: the file of rules that cut them, if any.
    """
    keys = undetermined(checkpoint)
    if not keys:
        return checkpoint
    may_be, are = ("parameters or buffers", "are") if len(keys) > 1 else ("a parameter or a buffer", "is")
    message = f"{plural(len(keys), 'model key')} may be {may_be}, and {are} cut "
    message += f"as {placements} says; write null for buffers: " if placements is not None else "like parameters: "
    message += some_of(keys, _KEYS_IN_NOTE)
    return checkpoint.noted(Note("undetermined", message, keys=tuple(keys)))


def mark_sharded(checkpoint: Checkpoint, hints: ShardingHints) -> Checkpoint:
    """Set ``Tensor.sharded`` for the model's tensors where the source or ``hints`` decide it."""
    if checkpoint.model is None:
        return checkpoint
    params = dict(checkpoint.model.params)
    for name, leaf in checkpoint.model.params.items():
        if isinstance(leaf, Tensor):
            params[name] = leaf.with_sharded(_from_source_or_hints(leaf, name, hints))
    return replace(checkpoint, model=replace(checkpoint.model, params=params))


def _require_buffers(checkpoint: Checkpoint, hints: ShardingHints) -> None:
    """Raises UsageError for a ``--buffers`` glob that matches nothing: a typo would shard a buffer."""
    names = (*checkpoint.model.params, *hints.all_keys) if checkpoint.model is not None else ()
    for glob in hints.buffers if names and hints.buffers != NO_BUFFERS else ():
        if not any(hints.is_buffer(name, glob) for name in names):
            raise UsageError(
                f"{flags.buffers(glob)} matches no model key of {checkpoint.source}",
                next_step=to_copy(
                    "see the names",
                    flags.command("inspect", checkpoint.source, flags.names_only, flags.section("model")),
                ),
            )


def _decide_model(checkpoint: Checkpoint, hints: ShardingHints) -> tuple[ModelState | None, list[str], int, list[str]]:
    """The model with every ``Tensor.sharded`` decided, the keys that nothing decides (they are True), how many the
    optimizer decided, and the trained parameters that the source has in one piece.
    """
    model = checkpoint.model
    if model is None:
        return None, [], 0, []
    first_names = _first_names(model)
    listed = _listed_by_optimizer(checkpoint.optim or hints.left_out, model, first_names)
    first_listed = {first_names.get(name, name) for name in listed}
    undecided: list[str] = []
    whole: list[str] = []
    inferred = 0
    params: dict[str, Tensor | Value] = {}
    for name, leaf in model.params.items():
        if not isinstance(leaf, Tensor):
            params[name] = leaf
            continue
        if leaf.ndim and leaf.sharded is False and name in listed:
            whole.append(name)
        sharded = _from_source_or_hints(leaf, name, hints)
        if sharded is None and first_names.get(name, name) in first_listed:
            sharded = True
            inferred += 1
        params[name] = leaf.with_sharded(True if sharded is None else sharded)
        if sharded is None:
            undecided.append(name)
            params[name] = replace(leaf, sharded=True, undetermined=True)
    return ModelState(params, model.metadata), undecided, inferred, whole


def _from_source_or_hints(tensor: Tensor, name: str, hints: ShardingHints) -> bool | None:
    """Whether ``tensor`` is sharded, by the source itself, ``--buffers`` or the reference; None if none decides."""
    if tensor.ndim == 0:  # FSDP refuses to shard a 0-dim parameter, so it can only be a buffer
        return False
    if tensor.sharded is not None:
        return tensor.sharded
    if hints.buffers:
        return hints.buffers == NO_BUFFERS or not any(hints.is_buffer(name, glob) for glob in hints.buffers)
    if hints.reference is not None:
        return hints.referenced(name)
    return None


def _listed_by_optimizer(optim: Optimizer | None, model: ModelState, first_names: Mapping[str, str]) -> set[str]:
    """The names that the optimizer proves to be parameters: its keys, or all names if there are as many ids as model
    tensors.
    """
    if optim is None:
        return set()
    if optim.key_type == "name":
        return set(map(str, optim.all_keys()))
    tensors = [name for name, leaf in model.params.items() if isinstance(leaf, Tensor)]
    distinct = len({first_names.get(name, name) for name in tensors})
    return set(tensors) if distinct == len(set(optim.keys)) else set()


def _first_names(model: ModelState) -> dict[str, str]:
    """Each model key of a tensor that is stored somewhere, to the first key that shares its bytes. Not to all of these:
    any number of keys may share them, and that would take the square of their number.
    """
    first: dict[tuple[object, ...], str] = {}
    return {
        name: first.setdefault(location, name)
        for name, leaf in model.params.items()
        if isinstance(leaf, Tensor) and (location := leaf.location()) is not None
    }


def _decide_optim(optim: Optimizer | None, model: ModelState | None) -> tuple[Optimizer | None, list[str]]:
    """The optimizer with every ``Tensor.sharded`` decided, and the keys of the parameters that remain undecided."""
    if optim is None:
        return None, []
    ambiguous: list[str] = []
    state = {key: _decide_entry(key, entry, model, ambiguous) for key, entry in optim.state.items()}
    decided = optim.with_state(state).map_own_values(_sharded_only_if_source_says)
    if optim.groups is not None:
        groups = tuple(group.map_tensors(_sharded_only_if_source_says) for group in optim.groups)
        decided = replace(decided, groups=groups)
    return replace(decided, extra=with_tensors(optim.extra, _sharded_only_if_source_says)), ambiguous


def _decide_entry(
    key: ParamKey, entry: Mapping[str, Tensor | Value], model: ModelState | None, ambiguous: list[str]
) -> dict[str, Tensor | Value]:
    """One parameter's states: those in the parameter's shape are sharded if it is, all others are replicated, and so is
    a counter.
    """
    param = model.params.get(key) if model is not None and isinstance(key, str) else None
    shapes = {shown.name: shown.shape for shown in shown_shapes(entry)}
    # Without the parameter its states say what shape it has, if they agree.
    distinct = set(shapes.values())
    param_shape, param_sharded = distinct.pop() if len(distinct) == 1 else None, True
    if isinstance(param, Tensor):
        param_shape, param_sharded = param.shape, bool(param.sharded)
    decided = dict(entry)
    tensors: dict[str, Tensor] = {}
    for name, leaf in entry.items():
        if is_counter(name, leaf) and isinstance(leaf, Tensor):
            decided[name] = leaf.with_sharded(sharded=False)
        elif isinstance(leaf, Tensor):
            tensors[name] = leaf
    if param_shape is None and any(leaf.ndim and leaf.sharded is None for leaf in tensors.values()):
        ambiguous.append(str(key))
    for name, leaf in tensors.items():
        inferred = name in shapes and shapes[name] == param_shape and param_sharded
        decided[name] = leaf.with_sharded(leaf.ndim > 0 and (inferred if leaf.sharded is None else leaf.sharded))
    return decided


def _sharded_only_if_source_says(tensor: Tensor) -> Tensor:
    """For tensors outside the model and the states."""
    return tensor.with_sharded(tensor.sharded is True)
