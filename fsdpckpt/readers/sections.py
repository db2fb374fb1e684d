"""Split a nested state dict into its sections: model, optimizer, and everything else.

Structure decides, and names only break ties. A model is a mapping from names to tensors. An optimizer has one of these
forms: ``{"state": {key: {name: value}}, "param_groups": [...]}`` as ``torch.optim.Optimizer.state_dict`` gives it;
``state`` or ``param_groups`` alone (DCP drops empty dicts, so SGD without momentum has no ``state``); or the flattened
form of ``torch.distributed.checkpoint.state_dict`` (``flatten_optimizer_state_dict``): ``state.<fqn>.<name>`` and
``param_groups.<fqn>.<hyper-parameter>``. Nothing is dropped: what is neither stays in ``extra`` under its keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from fsdpckpt.ir.checkpoint import BARE_VALUE, ModelState, Note, OptimState, ParamKey
from fsdpckpt.ir.codec import encode
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like
from fsdpckpt.readers.protocol import dotted

_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "weights")
_OPTIM_NAMES = frozenset({"optim", "optimizer", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "opt"})
_SEARCH_DEPTH = 6  # the deepest known producer (composer: state.optimizers.<Class>) needs 3
_SEARCH_WIDTH = 64  # containers with more children hold parameters, not sections

_Path = tuple[Key, ...]


@dataclass(slots=True)
class Sections:
    """``model_path`` and ``optim_path``: where in the root they were (None: not there, () the root itself).

    ``model_keys``: the root's own keys that belong to the model when it has no container of its own, else None.
    ``flattened``: whether the optimizer's keys were ``state.<name>.<state>``.
    """

    model: ModelState | None
    optim: OptimState | None
    extra: dict[Key, Value]
    model_path: _Path | None = None
    optim_path: _Path | None = None
    model_keys: frozenset[Key] | None = None
    flattened: bool = False
    notes: list[Note] = field(default_factory=list)

    def owns(self, path: _Path) -> bool:
        """Whether the value at ``path`` of the root went into the model or the optimizer."""
        if self.optim_path is not None and path[: len(self.optim_path)] == self.optim_path:
            return True
        if self.model_path is None or path[: len(self.model_path)] != self.model_path:
            return False
        return self.model_keys is None or path[len(self.model_path)] in self.model_keys


def split(root: Value) -> Sections:
    """The sections of ``root``, a state dict as its producer nested it. ``root`` is not changed.

    A root that is no mapping has no sections: all of it is ``extra`` under the key ``""``.
    """
    if not isinstance(root, dict):
        return Sections(None, None, {"": root})
    if any(isinstance(key, str) and "." in key for key in root):
        root = _regroup(root)
    notes: list[Note] = []
    paths = _find_optimizers(root)
    if len(paths) > 1:
        root = _several_optimizers(root, paths, notes)
    optim_path = _only(paths, notes)
    optim, flattened = None, False
    if optim_path is not None:
        held = at(root, optim_path)
        optim, flattened = optimizer_of(held, notes), is_flattened(held)
        if optim is None:
            optim_path = None
    sections = Sections(None, optim, {}, None, optim_path, None, flattened, notes)
    _find_model(root, sections)
    sections.extra = _remainder(root, sections)
    return sections


def _regroup(root: dict[Key, Value]) -> dict[Key, Value]:
    """Put flat keys ``optim.state.<fqn>.<name>`` under their first word: without planner data DCP keeps no nesting."""
    prefixes = {
        key.partition(".")[0]
        for key in root
        if isinstance(key, str) and key.partition(".")[2].startswith(("state.", "param_groups."))
    } & _OPTIM_NAMES
    if not prefixes:
        return root
    if any(isinstance(key, str) and key.startswith("model.") for key in root):
        prefixes.add("model")
    regrouped: dict[Key, Value] = {}
    for key, value in root.items():
        first, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        if dot and first in prefixes:
            group = regrouped.setdefault(first, {})
            if not isinstance(group, dict):
                return root
            group[rest] = value
        else:
            regrouped[key] = value
    return regrouped


def at(root: Value, path: _Path) -> dict[Key, Value]:
    """The mapping at ``path``, which was found by walking ``root``."""
    value = root
    for key in path:
        value = value[key]  # type: ignore[index]
    return value  # type: ignore[return-value]


def _containers(value: Value, path: _Path = ()) -> Iterator[tuple[_Path, dict[Key, Value]]]:
    """Every mapping that may be a section, outermost first; the entries of an optimizer are not among them."""
    if isinstance(value, dict):
        yield path, value
        children: Iterator[tuple[Key, Value]] = iter(value.items())
        if len(path) >= _SEARCH_DEPTH or is_nested(value) or is_flattened(value):
            return
        wide = len(value) > _SEARCH_WIDTH
        for key, child in children:
            if isinstance(child, dict) or (isinstance(child, list) and not wide):
                yield from _containers(child, (*path, key))
    elif isinstance(value, list) and 0 < len(value) <= _SEARCH_WIDTH and len(path) < _SEARCH_DEPTH:
        for index, child in enumerate(value):
            if isinstance(child, dict):
                yield from _containers(child, (*path, index))


def _named_optimizer(path: _Path) -> bool:
    return any(isinstance(key, str) and (key in _OPTIM_NAMES or "optim" in key.lower()) for key in path[-2:])


def _find_optimizers(root: dict[Key, Value]) -> list[_Path]:
    paths: list[_Path] = []
    for path, value in _containers(root):
        if any(path[: len(known)] == known for known in paths):
            continue
        if (
            is_nested(value)
            or (is_flattened(value) and (not path or _named_optimizer(path)))
            or is_state_only(value, named=_named_optimizer(path))
        ):
            paths.append(path)
    return paths


def _only(paths: list[_Path], notes: list[Note]) -> _Path | None:
    """Where the one optimizer is; None when there is none, or several."""
    if len(paths) != 1:
        return None
    path = paths[0]
    if path and path not in {("optim",), ("optimizer",)}:
        notes.append(Note("optimizer-found", f"the optimizer was found under {dotted(path)}"))
    return path


def _several_optimizers(root: dict[Key, Value], paths: list[_Path], notes: list[Note]) -> dict[Key, Value]:
    """``root`` with the ids in all of its optimizers repaired, which stay extras."""
    names = ", ".join(dotted(path) for path in paths)
    notes.append(Note("several-optimizers", f"{len(paths)} optimizers found ({names}): all are kept as extras"))
    for path in paths:
        optimizer = at(root, path)
        optim = optimizer_of(optimizer, notes) if is_nested(optimizer) else None
        if optim is not None and list(optim.state) != list(at(optimizer, ("state",))):
            root = cast("dict[Key, Value]", replaced(root, (*path, "state"), cast(Value, optim.state)))
    return root


def _is_model_entry(key: Key, value: Value) -> bool:
    return isinstance(value, Tensor) or (isinstance(key, str) and key.rpartition(".")[2] == "_extra_state")


def _is_generator_state(value: Value) -> bool:
    """``torch.get_rng_state`` gives a 1-D tensor of bytes; a dict of nothing else is no model."""
    return isinstance(value, Tensor) and value.dtype.name == "uint8" and value.ndim == 1


def _is_model(value: Mapping[Key, Value], *, named: bool) -> bool:
    """A mapping from names to tensors; when its own name calls it a model (``named``) plain values may be in it."""
    if not value or not all(isinstance(key, str) for key in value):
        return False
    entries = sum(1 for key, entry in value.items() if _is_model_entry(key, entry))
    if not any(isinstance(entry, Tensor) and not _is_generator_state(entry) for entry in value.values()):
        return False
    if named:
        return not any(isinstance(entry, dict) and not _is_model_entry(key, entry) for key, entry in value.items())
    return entries == len(value) and any("." in str(key) for key in value)


def _find_model(root: dict[Key, Value], sections: Sections) -> None:
    if sections.optim_path == ():
        return
    candidates: list[_Path] = []
    for path, value in _containers(root):
        if path == () or (sections.optim_path is not None and path[: len(sections.optim_path)] == sections.optim_path):
            continue
        if _is_model(value, named=path[-1] in _MODEL_NAMES):
            candidates.append(path)
    named = [path for path in candidates if path[-1] in _MODEL_NAMES]
    if named:  # "model" beside "ema.model": the outer one is the model
        named = [path for path in named if len(path) == min(map(len, named))]
    direct = [key for key, value in root.items() if _is_model_entry(key, value)]
    if all(_is_generator_state(root[key]) for key in direct):
        direct = []
    if len(named) == 1 and not (direct and _is_model(root, named=True)):
        _take_model(at(root, named[0]), named[0], sections)
    elif len(named) > 1:
        _several(named, sections)
    elif direct:
        _take_top_level(root, direct, sections)
    elif len(candidates) == 1:
        _take_model(at(root, candidates[0]), candidates[0], sections)
    elif candidates:
        _several(candidates, sections)


def _several(paths: list[_Path], sections: Sections) -> None:
    names = ", ".join(dotted(path) for path in paths)
    sections.notes.append(
        Note("several-models", f"{len(paths)} dicts may be the model ({names}): all are kept as extras")
    )


def _take_model(value: dict[Key, Value], path: _Path, sections: Sections) -> None:
    sections.model = ModelState(
        {str(key): entry for key, entry in value.items()},
        vars(value).get("_metadata") if hasattr(value, "__dict__") else None,
    )
    sections.model_path = path
    if path not in {("model",), ()}:
        sections.notes.append(Note("model-found", f"the model was found under {dotted(path)}"))


def _take_top_level(root: dict[Key, Value], direct: list[Key], sections: Sections) -> None:
    """Tensors at the top: the root is the model itself, or the model's names stand beside the other entries."""
    if sections.optim is None and _is_model(root, named=True):
        _take_model(root, (), sections)
        return
    sections.model = ModelState({str(key): root[key] for key in direct})
    sections.model_path = ()
    sections.model_keys = frozenset(direct)
    others = ", ".join(str(key) for key in root if key not in sections.model_keys)
    sections.notes.append(
        Note("model-found", f"the model's names are at the top level, beside {others}", key=str(direct[0]))
    )


def _remainder(root: dict[Key, Value], sections: Sections) -> dict[Key, Value]:
    """``root`` without its sections. A container that becomes empty is gone; one that was empty stays."""
    taken = [sections.optim_path] if sections.optim_path is not None else []
    rest: dict[Key, Value] = root
    if sections.model_path is not None:
        if sections.model_keys is not None:
            keys = sections.model_keys
            rest = {key: value for key, value in root.items() if key not in keys}
        else:
            taken.append(sections.model_path)
    if () in taken:
        return {}
    for path in sorted(taken, key=_place, reverse=True):  # from the back: taking an item out of a list moves the later
        remaining = _without(rest, path)
        rest = remaining if isinstance(remaining, dict) else {}
    return dict(rest)


def _place(path: _Path) -> list[tuple[int, str]]:
    """A sort key that puts paths into the same list in the order of its items."""
    return [(key if type(key) is int else 0, str(key)) for key in path]


def _without(value: Value, path: _Path) -> Value:
    """A copy of ``value`` without what is at ``path``, None when nothing is left of it."""
    key, below = path[0], path[1:]
    if isinstance(value, dict):
        copy = like(value, value)
        inner = _without(value[key], below) if below else None
        if inner is None:
            del copy[key]
        else:
            copy[key] = inner
        return copy or None
    if isinstance(value, list) and isinstance(key, int):
        inner = _without(value[key], below) if below else None
        left = [item for index, item in enumerate(value) if index != key or inner is not None]
        if inner is not None:
            left[key] = inner
        return left or None
    return value


def without(value: Value, path: tuple[Key, ...]) -> Value:
    """A copy of ``value`` without the key at ``path``, ``value`` itself where there is none."""
    if not isinstance(value, dict) or path[0] not in value:
        return value
    copy = like(value, value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def replaced(value: Value, path: tuple[Key, ...], new: Value) -> Value:
    """A copy of ``value`` with ``new`` at ``path``; only the containers on the way are copied."""
    if not path:
        return new
    key, below = path[0], path[1:]
    if isinstance(value, dict):
        copy = like(value, value)
        copy[key] = replaced(value.get(key), below, new)
        return copy
    if isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
        items = list(value)
        items[key] = replaced(items[key], below, new)
        return items if isinstance(value, list) else tuple(items)
    return value


_STATE, _GROUPS = "state", "param_groups"
# State names of torch.optim; only needed to recognise a ``state`` that stands alone under no telling name.
_STATE_NAMES = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "acc_delta"}
)


def is_nested(value: Mapping[Key, Value]) -> bool:
    """``state`` maps parameters to dicts, and ``param_groups`` is a list of dicts.

    Beside the parameters ``state`` may hold a user's own values, under names that no group lists.
    """
    groups = value.get(_GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    state = value.get(_STATE)
    if _is_state(state):
        return True
    if not isinstance(state, dict) or not any(isinstance(entry, dict) for entry in state.values()):
        return False
    loose = [key for key, entry in state.items() if not isinstance(entry, dict)]
    listed = {key for group in groups if isinstance(group, dict) for key in _listed(group)}
    return all(isinstance(key, str) and key not in listed for key in loose) and all(
        isinstance(key, (int, str)) for key in state
    )


def _listed(group: Mapping[Key, Value]) -> list[Value]:
    params = group.get("params")
    return [key for key in params if isinstance(key, (int, str))] if isinstance(params, (list, tuple)) else []


def _is_state(value: Value) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, dict) and isinstance(key, (int, str)) for key, entry in value.items()
    )


def is_flattened(value: Mapping[Key, Value]) -> bool:
    """Every key begins with ``state.`` or ``param_groups.``."""
    return bool(value) and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value)


def is_state_only(value: Mapping[Key, Value], *, named: bool) -> bool:
    """One half of an optimizer; ``named`` says that its key calls it an optimizer."""
    if value.keys() == {_GROUPS}:
        groups = value[_GROUPS]
        return named and isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    if value.keys() != {_STATE} or not _is_state(value[_STATE]):
        return False
    entries = value[_STATE]
    if not isinstance(entries, dict) or not entries:
        return False
    return named or any(not _STATE_NAMES.isdisjoint(entry) for entry in entries.values() if isinstance(entry, dict))


def optimizer_of(value: Mapping[Key, Value], notes: list[Note]) -> OptimState | None:
    """The optimizer in ``value``, which one of the tests above accepted. Repairs and conversions go into ``notes``.

    None when a state's name is no string: such a dict cannot be addressed by name, and stays an extra.
    """
    if is_flattened(value):
        return _unflatten(value, notes)
    state = value.get(_STATE, {})
    groups = value.get(_GROUPS)
    if not isinstance(state, dict):
        return None
    entries: dict[ParamKey, dict[str, Tensor | Value]] = {}
    for key, states in state.items():
        if not isinstance(key, (int, str)):
            return None
        if not isinstance(states, dict):
            entries[key] = {BARE_VALUE: states}
            continue
        if not all(isinstance(name, str) for name in states):
            return None
        entries[key] = {str(name): item for name, item in states.items()}
    extra = {key: item for key, item in value.items() if key not in (_STATE, _GROUPS)}
    rebuilt = None
    if isinstance(groups, list):
        rebuilt = [dict(group) for group in groups if isinstance(group, dict)]
    return OptimState(_repair_ids(entries, rebuilt, notes), rebuilt, extra)


def _repair_ids(
    entries: dict[ParamKey, dict[str, Tensor | Value]], groups: list[dict[Key, Value]] | None, notes: list[Note]
) -> dict[ParamKey, dict[str, Tensor | Value]]:
    """Ids that a container turned into strings are ints again, when the groups list ints.

    DCP writes every key as a string; ``dcp_to_torch_save`` leaves it so, and then ``load_state_dict`` finds no state.
    """
    keyed = {key for key, states in entries.items() if BARE_VALUE not in states}
    if not any(isinstance(key, str) for key in keyed):
        return entries
    ids: set[int] = set()
    for group in groups or []:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(key) is int for key in params):
            return entries
        ids.update(key for key in params if isinstance(key, int))
    names = {str(number): number for number in ids}
    if not all(isinstance(key, int) or key in names for key in keyed):
        return entries
    notes.append(Note("ids-repaired", f"{len(keyed)} parameter ids were stored as strings and are numbers again"))
    return {names.get(key, key) if isinstance(key, str) else key: states for key, states in entries.items()}


def _unflatten(value: Mapping[Key, Value], notes: list[Note]) -> OptimState:
    hyper: dict[str, dict[Key, Value]] = {}
    flat: dict[str, Value] = {}
    for key, item in value.items():
        section, _, rest = str(key).partition(".")
        if section == _GROUPS:
            param, _, name = rest.rpartition(".")
            hyper.setdefault(param, {})[name] = item
        else:
            flat[rest] = item
    state: dict[ParamKey, dict[str, Tensor | Value]] = {}
    for key, item in flat.items():
        param, names = _parameter(key, hyper)
        _set_state(state.setdefault(param, {}), names, item)
    groups = _groups(hyper) if hyper else None
    if groups is not None:
        notes.append(
            Note(
                "groups-rebuilt",
                f"{len(groups)} param groups rebuilt from flattened keys: parameters with equal hyper-parameters",
            )
        )
    return OptimState(state, groups)


def _parameter(key: str, params: Mapping[str, object]) -> tuple[str, list[str]]:
    """Parameter and state of ``<fqn>.<state>``. The groups know the names; without them the last word is the state."""
    cut = key.rfind(".")
    while cut > 0:
        if key[:cut] in params:
            return key[:cut], key[cut + 1 :].split(".")
        cut = key.rfind(".", 0, cut)
    param, _, name = key.rpartition(".")
    return param, [name]


def _set_state(states: dict[str, Tensor | Value], names: list[str], item: Value) -> None:
    """``item`` under ``names``: an optimizer such as Shampoo nests dicts inside one parameter's state."""
    inner: dict[Key, Value] | dict[str, Tensor | Value] = states
    for name in names[:-1]:
        child = inner.setdefault(name, {})
        if not isinstance(child, dict):
            states[".".join(names)] = item
            return
        inner = child
    inner[names[-1]] = item


def _groups(hyper: Mapping[str, dict[Key, Value]]) -> list[dict[Key, Value]]:
    """Parameters with equal hyper-parameters share a group, in order of first appearance.

    Hyper-parameters that are tensors are equal when they lie in one place: ``dcp.read.share_equal_settings`` gives all
    of equal value the place of the first.
    """
    groups: dict[str, dict[Key, Value]] = {}
    for param, values in hyper.items():
        same = json.dumps(encode(dict(values), tensor_key=_place_of), sort_keys=True)
        group = groups.get(same)
        if group is None:
            # Copies: two groups must not share a tensor just because their settings are equal now.
            copies = {name: replace(item) if isinstance(item, Tensor) else item for name, item in values.items()}
            groups[same] = {**copies, "params": [param]}
        else:
            params = group["params"]
            if isinstance(params, list):
                params.append(param)
    return list(groups.values())


def _place_of(tensor: Tensor) -> str:
    """What tells a tensor apart from every other one: the places of its chunks in the files."""
    chunks = tensor.chunks
    item = [] if chunks.item is None else chunks.item.tolist()
    columns = (chunks.rank, chunks.file, chunks.offset, chunks.start, chunks.size, chunks.stride)
    return f"{tensor.dtype.name} {tensor.shape} {[column.tolist() for column in columns]} {item}"
