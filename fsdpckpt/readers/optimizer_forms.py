"""Recognises the forms of an optimizer's state dict, and reads each as one ``OptimState``.

``{"state": {key: {name: value}}, "param_groups": [...]}`` as ``torch.optim.Optimizer.state_dict`` returns it; ``state``
or ``param_groups`` alone (DCP drops empty dicts, so SGD without momentum has no ``state``); or the flattened form of
``torch.distributed.checkpoint.state_dict`` (``flatten_optimizer_state_dict``): ``state.<fqn>.<name>`` and
``param_groups.<fqn>.<hyper-parameter>``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from fsdpckpt.ir.checkpoint import BARE_VALUE, Note, OptimState, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, encode
from fsdpckpt.text import plural

_STATE, _GROUPS = "state", "param_groups"
# State names of torch.optim; only needed to recognise a ``state`` alone, under a name that does not show what it is.
_STATE_NAMES = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "acc_delta"}
)


def is_nested(value: Mapping[Key, Value]) -> bool:
    """Whether ``state`` maps parameters to dicts, and ``param_groups`` is a list of dicts.

    Beside the parameters, ``state`` may hold the user's own values, under names that no group lists.
    """
    groups = value.get(_GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    state = value.get(_STATE)
    if not isinstance(state, dict) or not all(isinstance(key, (int, str)) for key in state):
        return False
    loose = [key for key, entry in state.items() if not isinstance(entry, dict)]
    listed = {key for group in groups if loose and isinstance(group, dict) for key in _listed_keys(group)}
    return not loose or (len(loose) < len(state) and all(isinstance(key, str) and key not in listed for key in loose))


def _listed_keys(group: Mapping[Key, Value]) -> list[Value]:
    params = group.get("params")
    return [key for key in params if isinstance(key, (int, str))] if isinstance(params, (list, tuple)) else []


def is_flattened(value: Mapping[Key, Value]) -> bool:
    """Whether every key begins with ``state.`` or ``param_groups.``."""
    return bool(value) and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value)


def is_state_only(value: Mapping[Key, Value], *, named: bool) -> bool:
    """Whether it is one half of an optimizer; ``named``: its key calls it an optimizer."""
    if value.keys() == {_GROUPS}:
        groups = value[_GROUPS]
        return named and isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    entries = value[_STATE] if value.keys() == {_STATE} else None
    if not isinstance(entries, dict) or not entries or not all(isinstance(key, (int, str)) for key in entries):
        return False
    states = [entry for entry in entries.values() if isinstance(entry, dict)]
    return len(states) == len(entries) and (named or any(not _STATE_NAMES.isdisjoint(entry) for entry in states))


def optimizer_of(value: Mapping[Key, Value], notes: list[Note]) -> OptimState | None:
    """The optimizer in ``value``, which one of the tests above accepted. Adds repairs and conversions to ``notes``.

    None if a state's name is not a string: such a dict cannot be addressed by name, and stays an extra.
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
    copies = [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else None
    return OptimState(_repair_ids(entries, copies, notes), copies, extra)


def _repair_ids(
    entries: dict[ParamKey, dict[str, Tensor | Value]], groups: list[dict[Key, Value]] | None, notes: list[Note]
) -> dict[ParamKey, dict[str, Tensor | Value]]:
    """Turn ids that a container stored as strings back into ints, if the groups list ints.

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
    repaired = {names.get(key, key) if isinstance(key, str) else key: states for key, states in entries.items()}
    if len(repaired) < len(entries):  # one id is there as a number and as text
        return entries
    notes.append(Note("ids-repaired", f"{plural(len(keyed), 'parameter id')} stored as text became numbers again"))
    return repaired


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
        param, name = _parameter(key, hyper)
        names = name.split(".")
        if any(f"{param}.{'.'.join(names[:depth])}" in flat for depth in range(1, len(names))):
            names = [name]  # beside a state ``a``, the state ``a.b`` is not an entry of a dict ``a``
        _set_state(state.setdefault(param, {}), names, item)
    groups = groups_of_equal_settings(hyper) if hyper else None
    if groups is not None:
        message = f"{len(groups)} param groups rebuilt from flattened keys: parameters with equal hyper-parameters"
        notes.append(Note("groups-rebuilt", message))
    return OptimState(state, groups)


def _parameter(key: str, params: Mapping[str, object]) -> tuple[str, str]:
    """Parameter and state of ``<fqn>.<state>``. The groups have the names; without them the state is the last
    component.
    """
    cut = key.rfind(".")
    while cut > 0:
        if key[:cut] in params:
            return key[:cut], key[cut + 1 :]
        cut = key.rfind(".", 0, cut)
    param, _, name = key.rpartition(".")
    return param, name


def _set_state(states: dict[str, Tensor | Value], names: list[str], item: Value) -> None:
    """Store ``item`` under ``names``: an optimizer such as Shampoo nests dicts inside one parameter's state."""
    inner = cast("dict[Key, Value]", states)
    for name in names[:-1]:
        inner = cast("dict[Key, Value]", inner.setdefault(name, {}))
    inner[names[-1]] = item


def groups_of_equal_settings(hyper: Mapping[str, dict[Key, Value]]) -> list[dict[Key, Value]]:
    """Put parameters with equal hyper-parameters into one group, in order of first appearance.

    Tensor hyper-parameters are equal if they are in one place: the DCP reader gives all of equal value the place of the
    first.
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
    """The identity of a tensor: the places of its chunks in the files."""
    chunks = tensor.chunks
    item = [] if chunks.item is None else chunks.item.tolist()
    columns = (chunks.rank, chunks.file, chunks.offset, chunks.start, chunks.size, chunks.stride)
    return f"{tensor.dtype.name} {tensor.shape} {[column.tolist() for column in columns]} {item}"


def notes_on_copies(copies: Collection[str], weights: str = "float32") -> list[Note]:
    """A note that the model section has the optimizer's ``weights`` and not the ``copies`` in other dtypes, if there
    are any.
    """
    if not copies:
        return []
    message = (
        f"the trained parameters are the optimizer's {weights} weights, not the {' and '.join(sorted(copies))} copies "
        f"that the model computed with; --dtype {min(copies)} gives those"
    )
    return [Note("master-weights", message)]
