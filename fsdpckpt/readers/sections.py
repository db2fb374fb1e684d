"""Splits a nested state dict into its sections: models, optimizers, and everything else.

Structure decides, and names only break ties. ``model_forms`` has the forms of a model, ``optimizer_forms`` those of an
optimizer. Every entry goes to exactly one place (``Sections.place_of``): nothing is dropped, and what is neither model
nor optimizer stays in ``extra`` under its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fsdpckpt.ir.checkpoint import ModelState, NamedSection, Note, Section
from fsdpckpt.ir.frame import Frame, frame_of, remainder
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.sections import section_names
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like, value_at
from fsdpckpt.readers.model_forms import (
    MODEL_NAMES,
    WEIGHTS,
    is_another_model,
    is_below,
    is_below_any,
    is_generator_state,
    is_model,
    is_model_entry,
    joined,
    metadata_of,
    modules_of,
    without_empty,
)
from fsdpckpt.readers.optimizer_forms import (
    FoundOptimizer,
    containers,
    flattened_beside,
    is_flattened,
    is_nested,
    optimizer_of,
)
from fsdpckpt.readers.protocol import KeyPath, dotted
from fsdpckpt.text import plural

_OPTIM_NAMES = frozenset({"optim", "optimizer", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "opt"})
_BUFFERS = "buffer_names"  # DeepSpeed's list of the buffers among a module's tensors


@dataclass(slots=True)
class Sections:
    """``model_path`` and ``optim_path``: where in the root they were (None: absent, () the root itself).

    ``model_keys``, ``optim_keys``: the root's keys that belong to the section if it has no container of its own, else
    None. ``named``: further models and optimizers, or all of several if none is the main one. ``flattened``: whether
    the optimizer's keys were ``state.<name>.<state>``. ``where``: notes on where the main sections were;
    ``repaired_ids``: for each optimizer how many of its ids were text, and are numbers here. ``frame``: the containers
    that the sections were in (``ir.frame``).
    """

    model: ModelState | None
    optim: Optimizer | None
    extra: dict[Key, Value]
    model_path: KeyPath | None = None
    optim_path: KeyPath | None = None
    model_keys: frozenset[Key] | None = None
    optim_keys: frozenset[Key] | None = None
    named: list[NamedSection] = field(default_factory=list)
    flattened: bool = False
    where: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    repaired_ids: list[int] = field(default_factory=list)
    frame: Frame = None

    def all_notes(self, *, ids_are_text: bool = False) -> list[Note]:
        """Every note. ``ids_are_text``: the container stores any id as text, so reading it back repairs no damage."""
        counts = [] if ids_are_text else [count for count in self.repaired_ids if count]
        repaired = [f"{plural(count, 'parameter id')} stored as text became numbers again" for count in counts]
        return [*self.where, *self.notes, *(Note("ids-repaired", message) for message in repaired)]

    def place_of(self, path: KeyPath) -> Section | NamedSection:
        """The one section that the value at ``path`` of the root went to."""
        if _is_in(path, self.optim_path, self.optim_keys):
            return Section.OPTIM
        if _is_in(path, self.model_path, self.model_keys):
            return Section.MODEL
        return next((named for named in self.named if is_below(path, named.path)), Section.EXTRA)

    def owns(self, path: KeyPath) -> bool:
        """Whether the value at ``path`` of the root went into a model or an optimizer."""
        return self.place_of(path) is not Section.EXTRA

    def overlaps(self, path: KeyPath) -> bool:
        """Whether the value at ``path`` of the root is part of a model or an optimizer, or contains one of them."""
        paths = (self.optim_path, self.model_path, *(named.path for named in self.named))
        return any(section is not None and is_below(section, path) for section in paths) or self.owns(path)

    def take_orders(self, orders: Mapping[KeyPath, Mapping[int, Sequence[Sequence[ParamKey]]]]) -> None:
        """Give each optimizer what ``Tree.orders`` has of the one at its place."""
        for path, by_rank in orders.items():
            place = self.place_of(path)
            if place is Section.OPTIM and self.optim is not None:
                self.optim = self.optim.with_orders(by_rank)
            elif isinstance(place, NamedSection) and isinstance(place.content, Optimizer):
                changed = replace(place, content=place.content.with_orders(by_rank))
                self.named = [changed if named is place else named for named in self.named]

    def has(self, section: Section) -> bool:
        """Whether it has a model, or an optimizer."""
        main = self.model if section is Section.MODEL else self.optim
        return main is not None or any(named.section is section for named in self.named)


def _is_in(path: KeyPath, section: KeyPath | None, keys: frozenset[Key] | None) -> bool:
    if section is None or not is_below(path, section):
        return False
    return keys is None or (len(path) > len(section) and path[len(section)] in keys)


def split(root: Value, *, called_model: bool = False, called_extra: bool = False) -> Sections:
    """Split ``root``, a state dict as its producer nested it, into sections. ``root`` is not changed.

    ``called_model``: the name of its file calls it a model. ``called_extra``: its name says that the main sections are
    elsewhere, so what it has is named. If it is not a mapping, all of it is ``extra`` under the key ``""``.
    """
    if not isinstance(root, dict):
        return Sections(None, None, {"": root})
    root = regroup(root)
    sections = Sections(None, None, {})
    optimizers = _find_optimizers(root, called_model=called_model)
    if len(optimizers) == 1 and not called_extra:
        ((path, found),) = optimizers.items()
        _take_optimizer(root, path, found, sections)
    elif optimizers:
        _name_optimizers(optimizers, sections)
    elif keys := flattened_beside(root):
        _take_optimizer_at_root(root, keys, sections)
    _find_models(root, sections, called_extra=called_extra)
    _mark_buffers(root, sections)
    _take_apart(root, sections)
    return sections


def regroup(root: dict[Key, Value]) -> dict[Key, Value]:
    """Nest flat keys ``optim.state.<fqn>.<name>`` under their first component: without planner data DCP keeps no
    nesting. ``root`` itself if it has none.
    """
    prefixes = {
        key.partition(".")[0]
        for key in root
        if isinstance(key, str) and key.partition(".")[2].startswith(("state.", "param_groups."))
    } & _OPTIM_NAMES
    if not prefixes:
        return root
    nested = {prefix: root.get(prefix, {}) for prefix in (*prefixes, "model")}
    groups = {prefix: like(value, value) for prefix, value in nested.items() if isinstance(value, dict)}
    regrouped: dict[Key, Value] = {}
    for key, value in root.items():
        first, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        if dot and first in groups:
            if rest in groups[first]:
                return root
            groups[first][rest] = value
            regrouped[first] = groups[first]
        else:
            regrouped[key] = groups.get(first, value)
    return regrouped


def regrouped(path: KeyPath, root: Mapping[Key, Value]) -> KeyPath:
    """Where in ``root``, the result of ``regroup``, the value is that was at ``path``."""
    first = path[0] if path else None
    if not isinstance(first, str) or first in root:
        return path
    prefix, _, rest = first.partition(".")
    return (prefix, rest, *path[1:])


_Optimizers: TypeAlias = dict[KeyPath, FoundOptimizer | None]
"""Optimizers by path; None for one whose states cannot be addressed by name."""


def _named_optimizer(path: KeyPath) -> bool:
    return any(isinstance(key, str) and (key in _OPTIM_NAMES or "optim" in key.lower()) for key in path[-2:])


def _find_optimizers(root: dict[Key, Value], *, called_model: bool) -> _Optimizers:
    """Every optimizer in ``root`` that is not inside another one. ``called_model``: keys like ``state.a.sum`` may be
    a model's too, and are one's if its file is called so.
    """
    optimizers: _Optimizers = {}
    for path, value in containers(root):
        if is_below_any(path, optimizers):
            continue
        named = _named_optimizer(path) or (not path and not called_model and is_flattened(value))
        found = optimizer_of(value, named=named)
        if found is not None or is_nested(value):
            optimizers[path] = found
    return optimizers


def _take_optimizer(root: dict[Key, Value], path: KeyPath, found: FoundOptimizer | None, sections: Sections) -> None:
    if found is None:
        return
    if path and path not in {("optim",), ("optimizer",)}:
        sections.where.append(Note("optimizer-found", f"the optimizer was found under {dotted(path)}"))
    sections.optim, sections.optim_path = found.optimizer, path
    sections.flattened = is_flattened(value_at(root, path))
    sections.repaired_ids.append(found.repaired_ids)
    sections.notes += found.notes()


def _take_optimizer_at_root(root: dict[Key, Value], keys: frozenset[Key], sections: Sections) -> None:
    """A flattened optimizer whose keys are beside those of the model: ``dcp.save({**model, **optimizer})``."""
    found = optimizer_of({key: root[key] for key in root if key in keys}, named=True)
    if found is None:
        return
    sections.optim = found.optimizer
    sections.optim_path, sections.optim_keys, sections.flattened = (), keys, True
    message = "the optimizer's flattened keys (state.*, param_groups.*) are at the top level, beside the model's"
    sections.where.append(Note("optimizer-found", message))
    sections.notes += found.notes()


def _name_optimizers(optimizers: _Optimizers, sections: Sections) -> None:
    """Name each of several optimizers by its path."""
    for (path, found), name in zip(optimizers.items(), section_names(list(optimizers)), strict=True):
        if found is not None:
            sections.named.append(NamedSection(Section.OPTIM, name, path, found.optimizer))
            sections.repaired_ids.append(found.repaired_ids)
            sections.notes += found.notes()
    message = f"{len(optimizers)} optimizers found ({', '.join(map(dotted, optimizers))})"
    unnamed = [dotted(path) for path, found in optimizers.items() if found is None]
    if unnamed:
        message += f"; the states of {', '.join(unnamed)} have no names: kept as extras"
    sections.notes.insert(0, Note("several-optimizers", message))


def _find_models(root: dict[Key, Value], sections: Sections, *, called_extra: bool) -> None:
    optimizers = [named.path for named in sections.named]
    if sections.optim_path is not None and sections.optim_keys is None:
        optimizers.append(sections.optim_path)
    if () in optimizers:
        return
    found = _candidates(root, optimizers)
    if not called_extra:
        _find_main_model(root, found, sections)
    _name_models(root, found, sections, beside_main=called_extra or sections.model is not None)


def _find_main_model(root: dict[Key, Value], candidates: Mapping[KeyPath, bool], sections: Sections) -> None:
    """Take the main model; none if nothing shows which of several it is."""
    named = [path for path in candidates if path[-1] in MODEL_NAMES]
    with_optimizer = {optimizer.path[:-1] for optimizer in sections.named} - {()}
    jobs = {path[:-1] for path in candidates} & with_optimizer
    if len(jobs) > 1:  # each model beside an optimizer of its own: none of these is the main one
        named = [path for path in named if path[:-1] not in jobs]
    if named:  # "model" beside "ema.model": the outer one is the model
        named = [path for path in named if len(path) == min(map(len, named))]
    called_model = [path for path in named if path[-1] != WEIGHTS]
    if len(called_model) == 1 < len(named):
        weights = ", ".join(dotted(path) for path in named if path not in called_model)
        message = f"{dotted(called_model[0])} is the model; {weights}, which may be those of a loss, is an extra"
        sections.where.append(Note("model-found", message))
        named = called_model
    rest = _without_optimizer(root, sections)
    direct = [key for key, value in rest.items() if is_model_entry(key, value)]
    if all(is_generator_state(root[key]) for key in direct):
        direct = []
    if len(named) == 1 and not (direct and is_model(rest, named=True)):
        _take_model(root, named[0], sections, nested=candidates[named[0]])
    elif len(named) <= 1 and direct:
        _take_top_level(rest, direct, sections)
    elif len(candidates) == 1:
        _take_model(root, next(iter(candidates)), sections, nested=False)


def _candidates(root: dict[Key, Value], optimizers: list[KeyPath]) -> dict[KeyPath, bool]:
    """The dicts that may be models, outermost first, and whether each is nested by module."""
    candidates: dict[KeyPath, bool] = {}
    nested: set[KeyPath] = set()
    taken = frozenset(optimizers)
    for path, value in containers(root):
        if not path or is_below_any(path, taken) or is_below_any(path, nested):  # or one of the modules of a model
            continue
        called_model = path[-1] in MODEL_NAMES
        if is_model(without_empty(value), named=called_model):
            candidates[path] = False
        elif called_model and path[-1] != WEIGHTS and not any(is_below(outer, path) for outer in optimizers):
            modules = modules_of(value)
            if modules and not any(key in outer for key in modules for outer in optimizers):
                candidates[path] = True  # with an optimizer each they would be models
                nested.add(path)
    return candidates


def _without_optimizer(root: dict[Key, Value], sections: Sections) -> dict[Key, Value]:
    keys = sections.optim_keys
    if keys is None:
        return root
    return like(root, {key: value for key, value in root.items() if key not in keys})


def _take_model(root: dict[Key, Value], path: KeyPath, sections: Sections, *, nested: bool) -> None:
    value = value_at(root, path)
    sections.model, sections.model_path = _model_of(value, nested=nested), path
    if nested:
        modules = ", ".join(map(str, modules_of(value)))
        message = f"the model under {dotted(path)} is nested by module, and its names begin with {modules}"
        sections.where.append(Note("model-found", message))
    elif path not in {("model",), ()}:
        sections.where.append(Note("model-found", f"the model was found under {dotted(path)}"))


def _model_of(value: dict[Key, Value], *, nested: bool) -> ModelState:
    if nested:
        return joined(value)
    return ModelState({str(key): entry for key, entry in value.items()}, metadata_of(value))


def _take_top_level(root: dict[Key, Value], direct: list[Key], sections: Sections) -> None:
    """Tensors at the top level: the root is the model itself, or holds the model's names beside the other entries."""
    if not sections.has(Section.OPTIM) and is_model(root, named=True):
        sections.model, sections.model_path = _model_of(root, nested=False), ()
        return
    sections.model = ModelState({str(key): root[key] for key in direct})
    sections.model_path = ()
    sections.model_keys = frozenset(direct)
    others = ", ".join(str(key) for key in root if key not in sections.model_keys)
    if others:
        message = f"the model's names are at the top level, beside {others}"
        sections.where.append(Note("model-found", message, key=str(direct[0])))


def _name_models(
    root: dict[Key, Value], candidates: Mapping[KeyPath, bool], sections: Sections, *, beside_main: bool
) -> None:
    """Name the models among ``candidates`` beside the main one or, without a main one, all of them."""
    main = sections.model
    outermost = [path for path in candidates if not is_below_any(path[:-1], candidates)]
    paths = [path for path in outermost if sections.place_of(path) is Section.EXTRA]
    called_model = [path for path in paths if path[-1] in MODEL_NAMES and path[-1] != WEIGHTS]
    if beside_main or called_model:
        names = {str(key) for path in called_model for key in value_at(root, path)}
        names.update(main.params if main is not None else ())
        paths = [
            path
            for path in paths
            if path in called_model or (path[-1] != WEIGHTS and is_another_model(value_at(root, path), names))
        ]
    found = [
        NamedSection(Section.MODEL, name, path, _model_of(value_at(root, path), nested=candidates[path]))
        for path, name in zip(paths, section_names(paths), strict=True)
    ]
    sections.named += found
    names_text = ", ".join(named.name for named in found)
    if found and not beside_main:
        sections.notes.append(Note("several-models", f"{plural(len(found), 'model')} found ({names_text})"))
    elif found:
        sections.notes.append(Note("several-models", f"{plural(len(found), 'more model')} found: {names_text}"))


def _mark_buffers(root: dict[Key, Value], sections: Sections) -> None:
    """Note in the model which tensors are buffers and which are parameters, if the file lists the buffers: DeepSpeed's
    does, whatever the stage.
    """
    listed, model = root.get(_BUFFERS), sections.model
    if model is None or not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor) and leaf.sharded is None:
            model.params[name] = leaf.with_sharded(leaf.ndim > 0 and name not in listed)


def _take_apart(root: dict[Key, Value], sections: Sections) -> None:
    """Make what no section took the extras, and note the containers that the sections were in."""
    keys = (sections.model_keys or frozenset()) | (sections.optim_keys or frozenset())
    rest = {key: value for key, value in root.items() if key not in keys} if keys else root
    paths = [named.path for named in sections.named]
    if sections.optim_path is not None and sections.optim_keys is None:
        paths.append(sections.optim_path)
    if sections.model_path is not None and sections.model_keys is None:
        paths.append(sections.model_path)
    rest = dict(rest)  # also of an OrderedDict: what is written is a dict of its own
    sections.extra, sections.frame = remainder(rest, paths), frame_of(rest, paths)
