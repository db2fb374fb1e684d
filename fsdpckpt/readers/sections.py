"""Splits a nested state dict into its sections: model, optimizer, and everything else.

Structure decides, and names only break ties. A model is a mapping from names to tensors; ``optimizer_forms`` has the
forms of an optimizer. Nothing is dropped: everything else stays in ``extra`` under its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from fsdpckpt.ir.checkpoint import ModelState, Note, OptimState, stored_entry
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like, replaced, value_at, without
from fsdpckpt.readers.optimizer_forms import containers, is_flattened, is_nested, optimizer_of
from fsdpckpt.readers.protocol import KeyPath, dotted

_WEIGHTS = "weights"  # also the name of dicts of weights of classes and losses
_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", _WEIGHTS)
_OPTIM_NAMES = frozenset({"optim", "optimizer", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "opt"})


@dataclass(slots=True)
class Sections:
    """``model_path`` and ``optim_path``: where in the root they were (None: absent, () the root itself).

    ``model_keys``: the root's keys that belong to the model if it has no container of its own, else None.
    ``flattened``: whether the optimizer's keys were ``state.<name>.<state>``.
    """

    model: ModelState | None
    optim: OptimState | None
    extra: dict[Key, Value]
    model_path: KeyPath | None = None
    optim_path: KeyPath | None = None
    model_keys: frozenset[Key] | None = None
    flattened: bool = False
    notes: list[Note] = field(default_factory=list)

    def owns(self, path: KeyPath) -> bool:
        """Whether the value at ``path`` of the root went into the model or the optimizer."""
        if self.optim_path is not None and path[: len(self.optim_path)] == self.optim_path:
            return True
        if self.model_path is None or path[: len(self.model_path)] != self.model_path:
            return False
        return self.model_keys is None or path[len(self.model_path)] in self.model_keys

    def overlaps(self, path: KeyPath) -> bool:
        """Whether the value at ``path`` of the root is part of the model or the optimizer, or contains one of them."""
        paths = (self.optim_path, self.model_path)
        return any(section is not None and path == section[: len(path)] for section in paths) or self.owns(path)


def split(root: Value, *, called_model: bool = False) -> Sections:
    """Split ``root``, a state dict as its producer nested it, into sections. ``root`` is not changed.

    ``called_model``: the name of its file calls it a model. If it is not a mapping, all of it is ``extra`` under the
    key ``""``.
    """
    if not isinstance(root, dict):
        return Sections(None, None, {"": root})
    root = regroup(root)
    sections = Sections(None, None, {})
    optimizers = _find_optimizers(root, called_model=called_model)
    if len(optimizers) > 1:
        root = _repair_several_optimizers(root, optimizers, sections.notes)
    elif optimizers:
        ((path, (optim, notes)),) = optimizers.items()
        if optim is not None:
            if path and path not in {("optim",), ("optimizer",)}:
                notes.insert(0, Note("optimizer-found", f"the optimizer was found under {dotted(path)}"))
            sections.optim, sections.optim_path, sections.flattened = optim, path, is_flattened(value_at(root, path))
            sections.notes += notes
    _find_model(root, sections)
    sections.extra = _remainder(root, sections)
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


_Optimizers: TypeAlias = dict[KeyPath, tuple[OptimState | None, list[Note]]]
"""Optimizers by path, with notes on how each was read; None for one whose states cannot be addressed by name."""


def _named_optimizer(path: KeyPath) -> bool:
    return any(isinstance(key, str) and (key in _OPTIM_NAMES or "optim" in key.lower()) for key in path[-2:])


def _find_optimizers(root: dict[Key, Value], *, called_model: bool) -> _Optimizers:
    """Every optimizer in ``root`` that is not inside another one. ``called_model``: keys like ``state.a.sum`` may be
    a model's too, and are one's if its file is called so.
    """
    optimizers: _Optimizers = {}
    for path, value in containers(root):
        if any(path[: len(outer)] == outer for outer in optimizers):
            continue
        notes: list[Note] = []
        named = _named_optimizer(path) or (not path and not called_model and is_flattened(value))
        optim = optimizer_of(value, notes, named=named)
        if optim is not None or is_nested(value):
            optimizers[path] = optim, notes
    return optimizers


def _repair_several_optimizers(root: dict[Key, Value], optimizers: _Optimizers, notes: list[Note]) -> dict[Key, Value]:
    """``root`` with the ids in all of its optimizers repaired; they stay extras."""
    message = f"{len(optimizers)} optimizers found ({', '.join(map(dotted, optimizers))}): all are kept as extras"
    notes.append(Note("several-optimizers", message))
    for path, (optim, read_notes) in optimizers.items():
        repairs = [note for note in read_notes if note.kind == "ids-repaired"]
        if repairs and optim is not None:
            state = {key: stored_entry(states) for key, states in optim.state.items()}
            root = cast("dict[Key, Value]", replaced(root, (*path, "state"), cast(Value, state)))
            notes += repairs
    return root


def _is_model_entry(key: Key, value: Value) -> bool:
    return isinstance(key, str) and (isinstance(value, Tensor) or key.rpartition(".")[2] == "_extra_state")


def _is_generator_state(value: Value) -> bool:
    """``torch.get_rng_state`` returns a 1-D tensor of bytes; a dict of nothing else is not a model."""
    return isinstance(value, Tensor) and value.dtype.name == "uint8" and value.ndim == 1


def _is_model(value: Mapping[Key, Value], *, named: bool) -> bool:
    """Whether it maps names to tensors; if its own key calls it a model (``named``), it may hold plain values too."""
    if not value or not all(isinstance(key, str) for key in value):
        return False
    entries = sum(1 for key, entry in value.items() if _is_model_entry(key, entry))
    if not any(isinstance(entry, Tensor) and not _is_generator_state(entry) for entry in value.values()):
        return False
    if named:
        return not any(isinstance(entry, dict) and not _is_model_entry(key, entry) for key, entry in value.items())
    return entries == len(value) and any("." in str(key) for key in value)


def _without_empty(value: Mapping[Key, Value]) -> Mapping[Key, Value]:
    """``value`` as it comes back from a DCP directory, which cannot hold empty dicts."""
    return {key: entry for key, entry in value.items() if not isinstance(entry, dict) or entry}


def _find_model(root: dict[Key, Value], sections: Sections) -> None:
    if sections.optim_path == ():
        return
    optim = sections.optim_path
    candidates = [
        path
        for path, value in containers(root)
        if path
        and (optim is None or path[: len(optim)] != optim)
        and _is_model(_without_empty(value), named=path[-1] in _MODEL_NAMES)
    ]
    named = [path for path in candidates if path[-1] in _MODEL_NAMES]
    if named:  # "model" beside "ema.model": the outer one is the model
        named = [path for path in named if len(path) == min(map(len, named))]
    called_model = [path for path in named if path[-1] != _WEIGHTS]
    if len(called_model) == 1 < len(named):
        weights = ", ".join(dotted(path) for path in named if path not in called_model)
        message = f"{dotted(called_model[0])} is the model; {weights}, which may be those of a loss, is an extra"
        sections.notes.append(Note("model-found", message))
        named = called_model
    direct = [key for key, value in root.items() if _is_model_entry(key, value)]
    if all(_is_generator_state(root[key]) for key in direct):
        direct = []
    if len(named) == 1 and not (direct and _is_model(root, named=True)):
        _take_model(value_at(root, named[0]), named[0], sections)
    elif len(named) > 1:
        _several(named, sections)
    elif direct:
        _take_top_level(root, direct, sections)
    elif len(candidates) == 1:
        _take_model(value_at(root, candidates[0]), candidates[0], sections)
    elif candidates:
        _several(candidates, sections)


def _several(paths: list[KeyPath], sections: Sections) -> None:
    message = f"{len(paths)} dicts may be the model ({', '.join(map(dotted, paths))}): all are kept as extras"
    sections.notes.append(Note("several-models", message))


def _take_model(value: dict[Key, Value], path: KeyPath, sections: Sections) -> None:
    metadata = vars(value).get("_metadata") if hasattr(value, "__dict__") else None
    sections.model = ModelState({str(key): entry for key, entry in value.items()}, metadata)
    sections.model_path = path
    if path not in {("model",), ()}:
        sections.notes.append(Note("model-found", f"the model was found under {dotted(path)}"))


def _take_top_level(root: dict[Key, Value], direct: list[Key], sections: Sections) -> None:
    """Tensors at the top level: the root is the model itself, or holds the model's names beside the other entries."""
    if sections.optim is None and _is_model(root, named=True):
        _take_model(root, (), sections)
        return
    sections.model = ModelState({str(key): root[key] for key in direct})
    sections.model_path = ()
    sections.model_keys = frozenset(direct)
    others = ", ".join(str(key) for key in root if key not in sections.model_keys)
    message = f"the model's names are at the top level, beside {others}"
    sections.notes.append(Note("model-found", message, key=str(direct[0])))


def _remainder(root: dict[Key, Value], sections: Sections) -> dict[Key, Value]:
    """``root`` without its sections. A container that becomes empty is removed; one that was empty stays."""
    keys = sections.model_keys
    rest = root if keys is None else {key: value for key, value in root.items() if key not in keys}
    places = (sections.optim_path, sections.model_path if keys is None else None)
    paths = [path for path in places if path is not None]
    if () in paths:
        return {}
    for path in sorted(paths, key=_path_order, reverse=True):  # removing an item from a list moves the later ones
        rest = cast("dict[Key, Value]", without(rest, path, prune=True))
    return dict(rest)


def _path_order(path: KeyPath) -> list[tuple[int, str]]:
    """A sort key that puts paths into the same list in the order of its items."""
    return [(key if type(key) is int else 0, str(key)) for key in path]
