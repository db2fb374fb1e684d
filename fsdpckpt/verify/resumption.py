"""Checks whether a framework resumes from a checkpoint on a number of ranks: ``verify --for``.

The rules are those of the frameworks' loaders, as the table of producers states them: the form of the files, the keys
of the optimizer, what the loader opens, and what it does if that is absent. Reads names and headers only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.flags import Message
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Section
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.state_shapes import without_states
from fsdpckpt.ir.values import Value, find_value
from fsdpckpt.producers import Flavor, Form, RankFileName, extra_keys
from fsdpckpt.producers.recognition import flavor_named, forms_for, layout_of_form
from fsdpckpt.readers.side_files import files_below, missing_file_warnings
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import listed, plural

_SCHEDULER_FILE = re.compile(r"scheduler(_\d+)?\.(bin|pt)")
_NO_MODEL, _NO_OPTIMIZER = "the model is missing", "the optimizer is missing"
_CONFIGURATION = "config.json"  # ``from_pretrained`` reads the model's class and sizes from it


@dataclass(frozen=True, slots=True)
class Resumption:
    """Whether ``flavor`` resumes from a checkpoint on ``world_size`` ranks.

    ``missing``: what stops it, or makes it start fresh without a word. ``changes``: what it goes on without.
    ``command``: the conversion that makes a checkpoint that it resumes from, None if it resumes from this one.
    ``still_missing``: what that conversion cannot make. Without ``command``: why it is refused or, as in ``missing``,
    what no conversion makes.
    """

    flavor: str
    world_size: int
    missing: tuple[str, ...]
    changes: tuple[str, ...]
    command: str | None = None
    still_missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("missing", "changes", "still_missing"):
            object.__setattr__(self, name, tuple(map(Message, getattr(self, name))))

    @property
    def resumes(self) -> bool:
        return not self.missing

    @property
    def beyond_conversion(self) -> bool:
        """Whether no conversion makes anything of what is missing."""
        return bool(self.missing) and self.command is None and self.still_missing == self.missing


def check_resumption(checkpoint: Checkpoint, flavor: Flavor, world_size: int | None, sources: Sources) -> Resumption:
    """Compare ``checkpoint`` with what the loader of ``flavor`` needs. ``world_size``: None for that of the source."""
    names = names_beside(checkpoint, sources)
    ranks = world_size or ranks_that_saved(checkpoint, names) or checkpoint.world_size
    form = _own_form(checkpoint, flavor)
    if form is None:
        return Resumption(flavor.name, ranks, (_other_form(checkpoint, flavor),), ())
    of_ranks = (*_wrong_ranks(checkpoint, form, ranks), *_missing_rank_files(flavor, form, names, ranks))
    missing = [*lacking(checkpoint, flavor, form, names), *_missing_model_file(checkpoint, form), *of_ranks]
    changes = _changes(checkpoint, flavor, form, names, ranks)
    return Resumption(flavor.name, ranks, tuple(missing), tuple(changes))


def _missing_model_file(checkpoint: Checkpoint, form: Form) -> Iterator[Message]:
    """That the one file of an adapter is not there: its tensors are in others, which are not opened."""
    place = f"{checkpoint.origin.directory.rstrip('/')}/{form.model.file}"
    if form.adapter and checkpoint.model is not None and place not in paths_in(checkpoint.files):
        yield Message(f"no {form.model.file}, which has the adapter")


def lacking(checkpoint: Checkpoint, flavor: Flavor, form: Form, names: Collection[str]) -> list[Message]:
    """What ``checkpoint``, in ``form`` and with the files ``names``, does not have and the loader of ``flavor`` needs.

    The checkpoint may be one that a conversion would write.
    """
    reasons = (
        *form_refusals(flavor, form),
        *_missing_sections(checkpoint, flavor, form),
        *_missing_files(checkpoint, flavor, form, names),
        *_missing_extras(checkpoint, flavor, form),
    )
    return list(map(Message, reasons))


def form_refusals(flavor: Flavor, form: Form) -> Iterator[str]:
    """Why ``flavor`` does not load what it saves in ``form``, if it does not."""
    if form.not_loaded:
        remedy = f"convert with {flags.to(Layout.SHARDED)}"
        yield f"{flavor.name} does not load its own {form.layout} files: {form.not_loaded} ({remedy})"


def _own_form(checkpoint: Checkpoint, flavor: Flavor) -> Form | None:
    """The form of ``flavor`` that the checkpoint has; None if its loader looks for other names or keys."""
    saved_by = flavor_named(checkpoint.flavor)
    if saved_by is None:
        return _form_of_one_file(checkpoint, flavor)
    layout = layout_of_form(checkpoint, saved_by)
    loaded = (*flavor.forms, *flavor.also_loads)
    saved = [
        form
        for form in (*forms_for(saved_by, checkpoint), *saved_by.also_loads)
        if (form.layout, form.container) == (layout, checkpoint.container) and form in loaded
    ]
    alike = [form for form in saved if form.flattened is checkpoint.origin.flattened_keys] or saved
    return alike[0] if alike and _has_keys_of(alike[0], checkpoint) else None


def _form_of_one_file(checkpoint: Checkpoint, flavor: Flavor) -> Form | None:
    """The form of a framework whose full file is as anyone saves it, Fabric's: nothing in it shows whose it is."""
    if checkpoint.origin.directory or (checkpoint.layout, checkpoint.container) != (Layout.FULL, Container.TORCH):
        return None
    forms = [form for form in flavor.forms if form.layout is Layout.FULL and not (form.directory or form.defaults)]
    return forms[0] if forms else None


def _has_keys_of(form: Form, checkpoint: Checkpoint) -> bool:
    """Whether a DCP directory has its sections below the keys of ``form``. In torch files the names of the files, or
    the keys that identify the framework, have shown that already.
    """
    if form.keeps_source_keys or checkpoint.container != Container.DCP:
        return True
    if checkpoint.optim is not None and form.flattened != checkpoint.origin.flattened_keys:
        return False
    places, nesting = {Section.MODEL: form.model, Section.OPTIM: form.optim}, checkpoint.origin.nesting
    known = [(place, nesting[section]) for section, place in places.items() if section in nesting]
    return all(place is None or place.keys == keys for place, keys in known)


def _other_form(checkpoint: Checkpoint, flavor: Flavor) -> str:
    found = f"{checkpoint.layout}, {checkpoint.container}, flavor {checkpoint.flavor}"
    return f"{flavor.name} expects other file names or keys: {checkpoint.source} is {found}"


def _missing_sections(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Iterator[str]:
    named_models = [each for each in checkpoint.named if each.section is Section.MODEL]
    models = len(named_models) + (checkpoint.model is not None)
    if not models:
        yield _NO_MODEL
    elif models > 1 and checkpoint.model is None and not (form.keeps_source_keys or form.several):
        yield f"{flavor.name} has one model, and this checkpoint {models}"
    if form.optim is None:
        return
    named = [(f"{each.label}: ", each.content) for each in checkpoint.named]
    optimizers = [("", checkpoint.optim), *named]
    found = [(label, optim) for label, optim in optimizers if isinstance(optim, Optimizer)]
    if not found:
        yield _NO_OPTIMIZER
    elif len(found) > 1 and not (form.optimizers or form.keeps_source_keys or form.several):
        yield f"{flavor.name} has one optimizer, and this checkpoint {len(found)}"
    for label, optim in found:
        yield from (f"{label}{what}" for what in _missing_of_optimizer(optim, flavor, form))


def _missing_of_optimizer(optim: Optimizer, flavor: Flavor, form: Form) -> Iterator[str]:
    if optim.groups is None and not flavor.groups_without_params:
        yield "the optimizer has no param groups, so its learning rates are unknown"
    if form.key_type is not None and optim.key_type not in (None, form.key_type):
        yield f"the optimizer is keyed by {optim.key_type}; {flavor.name} loads only one keyed by {form.key_type}"
    if flavor.two_groups and optim.groups is not None and len(optim.groups) != 2:
        count = plural(len(optim.groups), "param group")
        hint = f" (if DeepSpeed made it, convert it with {flags.no_weight_decay('standard')})"
        one = len(optim.groups) == 1
        yield f"the optimizer has {count}; {flavor.name} makes two, and cannot load this one{hint if one else ''}"
    without = without_states(optim)  # PyTorch's loaders ask for the states of all
    if without:
        yield f"{plural(len(without), 'parameter')} of the optimizer have no state, {without[0]} first"


def _wrong_ranks(checkpoint: Checkpoint, form: Form, ranks: int) -> Iterator[str]:
    if _has_rank_files(form) and ranks != checkpoint.world_size:
        yield f"per-rank files load only on the {plural(checkpoint.world_size, 'rank')} that saved them, not on {ranks}"


def _has_rank_files(form: Form) -> bool:
    return form.container is Container.TORCH and form.layout is not Layout.FULL


def _missing_files(checkpoint: Checkpoint, flavor: Flavor, form: Form, names: Collection[str]) -> Iterator[str]:
    if form.directory and form.optim is not None:
        yield from missing_file_warnings("", flavor, names)
    saved_by, schedule = flavor_named(checkpoint.flavor), flavor.schedule_file
    if saved_by is not None and saved_by.schedule_file in names and schedule and schedule not in names:
        yield f"the LR schedule is in {saved_by.schedule_file}, and {flavor.name} opens {schedule}"
    if form.weights and _CONFIGURATION not in names:
        yield f"no {_CONFIGURATION}, which from_pretrained needs"
    for name, _ in form.small_files:
        if name not in names:
            yield f"no {name}"


def _missing_rank_files(flavor: Flavor, form: Form, names: Collection[str], ranks: int) -> Iterator[str]:
    for kind in flavor.rank_files:
        if form.optim is not None and kind.needed and (absent := _without_file(kind, names, ranks)):
            yield f"{absent}: no {kind.name.format(rank='N')}, without which {flavor.name} stops there"


def _missing_extras(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Iterator[str]:
    for key in (*(key for key, _ in form.defaults), *filter(None, [form.counter])):
        if not has_extra(checkpoint.extra, key):
            yield f"no {key}, which the loader of {flavor.name} needs"
    yield from missing_extra_warnings("", checkpoint, flavor)
    for key, needed in form.loader_opens:
        value = checkpoint.extra.get(key)
        if value is not None and not has_keys(value, needed):
            yield f"{key} is not what {flavor.name} keeps there: expected {', '.join(sorted(needed))}"


def missing_extra_warnings(where: str, checkpoint: Checkpoint, flavor: Flavor) -> Iterator[str]:
    """What the framework does without each extra that it needs and ``checkpoint`` lacks.

    ``where``, here and below: what a sentence about the absent begins with, "the target has " for what a conversion
    writes; "" where the checkpoint has just been named.
    """
    for key, what in flavor.needed_extras:
        if not has_extra(checkpoint.extra, key):
            yield f"{where}no {key}: without it {flavor.name} {what}"


def has_extra(extra: Value, name: str) -> bool:
    """Whether there is an extra of this ``name``, even if it is None."""
    *above, last = extra_keys(name)
    outer = find_value(extra, tuple(above))
    return isinstance(outer, dict) and last in outer


def has_keys(value: Value, keys: frozenset[str]) -> bool:
    """Whether ``value`` is a dict with all of ``keys``."""
    return isinstance(value, dict) and keys <= value.keys()


def _changes(checkpoint: Checkpoint, flavor: Flavor, form: Form, names: Collection[str], ranks: int) -> Iterator[str]:
    """What the framework goes on without, or counts differently."""
    devices = " and ".join(sorted(checkpoint.origin.mesh_devices - {form.mesh.device}))
    if _has_rank_files(form) and devices:
        yield (
            f"the DTensors are on a mesh of {devices} devices: a job on {form.mesh.device} cannot load them (convert "
            f"with {flags.mesh_device(form.mesh.device)} first)"
        )
    for kind in flavor.rank_files:
        if not kind.needed and (absent := _without_file(kind, names, ranks)):
            yield f"{absent}: no {kind.name.format(rank='N')}, so random states start anew there"
    yield from changes_without_extras("", checkpoint, flavor)
    yield from data_position_changes("", checkpoint, flavor, ranks)
    yield from changes_with_ranks(flavor, names, ranks_that_saved(checkpoint, names), ranks)


def _without_file(kind: RankFileName, names: Collection[str], ranks: int) -> str:
    """The ranks that have no file of this kind, if others have one; "" if none lacks it, or all do."""
    absent = [rank for rank in range(ranks) if kind.of(rank, ranks) not in names]
    saved_any = any(kind.rank_of(name) is not None or name == kind.single for name in names)
    if not absent or not saved_any:
        return ""
    return f"{'rank' if len(absent) == 1 else 'ranks'} {listed(absent)} of {ranks}"


def changes_without_extras(where: str, checkpoint: Checkpoint, flavor: Flavor) -> Iterator[str]:
    """What the framework does otherwise without each extra that it would like to have."""
    for key, what in flavor.wanted_extras:
        if not has_extra(checkpoint.extra, key) and checkpoint.has(Section.OPTIM):
            yield f"{where}no {key}: {flavor.name} {what}"


def data_position_changes(where: str, checkpoint: Checkpoint, flavor: Flavor, ranks: int) -> Iterator[str]:
    """What the framework does on ``ranks`` with the position in the data, which it keeps for each data-parallel rank
    and does not divide among other ranks.
    """
    key = flavor.data_position
    if not key or not checkpoint.has(Section.OPTIM):
        return
    stops = f"{flavor.name} stops, unless checkpoint.exclude_from_loading lists {key}; then it reads the data anew"
    position = checkpoint.extra.get(key)
    if not isinstance(position, dict) or not position:
        yield f"{where}no {key}: without it {stops}"
        return
    saved_on = position.get("world_size")
    if not isinstance(saved_on, int):
        saved_on = sum(str(name).startswith("dp_rank_") for name in position)
    if saved_on == checkpoint.world_size != ranks:
        yield f"{key} was saved on {plural(saved_on, 'rank')}: on {ranks} {stops}"
    elif checkpoint.world_size not in (saved_on, ranks):  # other ranks are tensor-parallel
        yield f"{key} was saved on {plural(saved_on, 'data-parallel rank')}: on any other number {stops}"


def names_beside(checkpoint: Checkpoint, sources: Sources) -> frozenset[str]:
    """The names in the directory of ``checkpoint``, and the paths of files in those directories that its framework
    keeps beside the state; none if it is one file.
    """
    directory, flavor = checkpoint.origin.directory, flavor_named(checkpoint.flavor)
    if not directory:
        return frozenset()
    names = [entry.name for entry in sources.list_directory(directory)]
    for side in flavor.side_directories if flavor is not None else ():
        names += files_below(directory, f"{side}/", sources)
    return frozenset(names)


def ranks_that_saved(checkpoint: Checkpoint, names: Collection[str]) -> int | None:
    """The number of ranks of the job that saved ``checkpoint``, beside which are ``names``; None if nothing shows it.

    A full checkpoint is one file whatever their number was: only the files that each rank has show that.
    """
    if checkpoint.layout is not Layout.FULL:
        return checkpoint.world_size
    saved_by = flavor_named(checkpoint.flavor)
    for kind in saved_by.rank_files if saved_by is not None else ():
        by_rank = [name for name in names if kind.rank_of(name) is not None]
        if by_rank or kind.single in names:
            return max(len(by_rank), 1)
    return None


def changes_with_ranks(flavor: Flavor, names: Collection[str], saved_on: int | None, ranks: int) -> Iterator[str]:
    """What a job of ``flavor`` does otherwise on ``ranks`` than on the ranks that saved. ``names``: its side files."""
    if saved_on is None or ranks == saved_on:
        return
    yield (
        f"saved on {plural(saved_on, 'rank')}, for {ranks}: with the same batch size per rank, the global batch "
        "changes, and with it the number of steps in an epoch and the position in the data"
    )
    if flavor.counts_processes and any(_SCHEDULER_FILE.fullmatch(name) for name in names):
        yield (
            f"{flavor.name} advances the LR schedule once per rank at each step: by {ranks} instead of {saved_on}, "
            "unless split_batches is set"
        )
