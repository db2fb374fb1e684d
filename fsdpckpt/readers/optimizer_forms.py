"""Recognises the forms of an optimizer's state dict, and reads each as one ``Optimizer``.

``{"state": {key: {name: value}}, "param_groups": [...]}`` as ``torch.optim.Optimizer.state_dict`` returns it; ``state``
or ``param_groups`` alone (DCP drops empty dicts, so SGD without momentum has no ``state``); or the flattened form of
``torch.distributed.checkpoint.state_dict`` (``flatten_optimizer_state_dict``): ``state.<fqn>.<name>`` and
``param_groups.<fqn>.<hyper-parameter>``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer, OwnValue, ParamKey, StatesOrValue, group_params
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, Value, encode
from fsdpckpt.readers.protocol import FileTable, KeyPath
from fsdpckpt.text import plural

_STATE, _GROUPS = "state", "param_groups"
# State names of torch.optim; only needed to recognise a ``state`` alone, under a name that does not show what it is.
_STATE_NAMES = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "acc_delta"}
)


def is_nested(value: Mapping[Key, object]) -> bool:
    """Whether ``state`` maps parameters to dicts, and ``param_groups`` is a list of dicts.

    A parameter may have None for its dict, which most of PyTorch's optimizers refuse to load and some take. Beside the
    parameters, ``state`` may hold the user's own values, under names that no group lists.
    """
    state, groups = value.get(_STATE), value.get(_GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    if not isinstance(state, dict) or not all(isinstance(key, (int, str)) for key in state):
        return False
    loose = [key for key, entry in state.items() if not _is_entry(entry)]
    if not loose:
        return True
    # A user's own entries, beside those of parameters: no group lists them.
    listed = {key for group in groups for key in group_params(group) or ()}
    of_user = all(isinstance(key, str) and key not in listed for key in loose)
    return of_user and len(loose) < len(state)


def is_optimizer(value: Mapping[Key, object]) -> bool:
    """Whether ``value`` is an optimizer's state dict, wherever it is: nested, or states by id without groups."""
    if is_nested(value) or _are_groups(value):
        return True
    state = value.get(_STATE) if len(value) == 1 else None
    if not isinstance(state, dict) or not any(isinstance(entry, dict) for entry in state.values()):
        return False
    return all(type(key) is int and _is_entry(entry) for key, entry in state.items())


def _is_entry(entry: object) -> bool:
    """Whether ``entry`` may be what ``state`` has of a parameter."""
    return entry is None or isinstance(entry, dict)


def _are_groups(value: Mapping[Key, object]) -> bool:
    """Whether ``value`` has only ``param_groups``, and these list parameters: DCP keeps no empty ``state``."""
    groups = value.get(_GROUPS) if len(value) == 1 else None
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and group_params(group) is not None for group in groups)


def containers(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[Key, Value]]]:
    """Every dict in ``value`` that may be a section, outermost first, without what is inside an optimizer."""
    children: Iterable[tuple[Key, object]] = ()
    if isinstance(value, dict):
        yield path, value
        if not is_optimizer(value) and not is_flattened(value):
            children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        if isinstance(child, (dict, list, tuple)):
            yield from containers(child, (*path, key))


def is_flattened(value: Mapping[Key, Value]) -> bool:
    """Whether ``value`` is a flattened optimizer (``_flatten_optim_state_dict``): every key begins with ``state.`` or
    ``param_groups.``, as those of a model with such modules do, and the groups' values are settings, no parameters.
    """
    if not all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value):
        return False
    settings = [entry for key, entry in value.items() if str(key).startswith("param_groups.")]
    if settings:
        return not any(isinstance(entry, Tensor) and entry.ndim for entry in settings)
    return any(str(key).rpartition(".")[2] in _STATE_NAMES for key in value)


def flattened_beside(root: Mapping[Key, Value]) -> frozenset[Key]:
    """The keys of a flattened optimizer among those of its model: ``state.<fqn>.<name>`` and
    ``param_groups.<fqn>.<setting>`` for names that ``root`` has as well. Empty if any such key is of no parameter.
    """
    keys = [key for key in root if isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}."))]
    names = {clean(key) for key in root if isinstance(key, str)}.difference(keys)
    if not keys or not is_flattened({key: root[key] for key in keys}):
        return frozenset()
    for key in keys:  # state.<name>.<state>, and the name is that of a parameter
        words = key.split(".")[1:]
        if not any(clean(".".join(words[:count])) in names for count in range(1, len(words))):
            return frozenset()
    return frozenset(keys)


def _is_half(value: Mapping[Key, Value], *, named: bool) -> bool:
    """Whether ``value`` has ``state`` or ``param_groups`` alone. ``named``: its key calls it an optimizer."""
    if value.keys() == {_GROUPS}:
        groups = value[_GROUPS]
        all_dicts = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        return _are_groups(value) or (named and all_dicts)
    entries = value[_STATE] if value.keys() == {_STATE} else None
    if not isinstance(entries, dict) or not entries or not all(isinstance(key, (int, str)) for key in entries):
        return False
    states = [entry for entry in entries.values() if isinstance(entry, dict)]
    if not states or not all(map(_is_entry, entries.values())):
        return False
    return named or any(not _STATE_NAMES.isdisjoint(entry) for entry in states)


class FoundOptimizer(NamedTuple):
    """``repaired_ids``: how many of its ids were text, and are numbers here."""

    optimizer: Optimizer
    repaired_ids: int = 0

    def notes(self) -> list[Note]:
        """What was done to read it, but for its ids: some containers store every id as text."""
        groups = self.optimizer.groups
        if not self.optimizer.rebuilt or groups is None:
            return []
        message = f"{plural(len(groups), 'param group')} rebuilt from flattened keys, which do not record groups: "
        message += "parameters with equal hyper-parameters are in one"
        return [Note("groups-rebuilt", message)]


def optimizer_of(value: Mapping[Key, Value], *, named: bool) -> FoundOptimizer | None:
    """The optimizer whose state dict is ``value``; None if it is none.

    ``named``: its key calls it an optimizer. A dict with a state whose name is not a string is none, because such a
    state cannot be addressed.
    """
    if is_flattened(value):
        return FoundOptimizer(_unflatten(value)) if named else None
    if not is_nested(value) and not _is_half(value, named=named):
        return None
    entries: dict[ParamKey, StatesOrValue] = {}
    for key, states in cast("dict[ParamKey, Value]", value.get(_STATE, {})).items():
        if not isinstance(states, dict):
            entries[key] = OwnValue(states)
        elif all(isinstance(name, str) for name in states):
            entries[key] = cast("dict[str, Tensor | Value]", dict(states))
        else:
            return None
    groups = None
    if _GROUPS in value:
        groups = [dict(group) for group in cast("list[dict[Key, Value]]", value[_GROUPS])]
    extra = {key: item for key, item in value.items() if key not in (_STATE, _GROUPS)}
    state, repaired_ids = _repair_ids(entries, groups or [])
    return FoundOptimizer(Optimizer.of(state, groups, extra), repaired_ids)


def _repair_ids(
    entries: dict[ParamKey, StatesOrValue], groups: list[dict[Key, Value]]
) -> tuple[dict[ParamKey, StatesOrValue], int]:
    """Turn ids that a container stored as strings back into ints, if the groups list ints. Also returns how many.

    DCP writes every key as a string; ``dcp_to_torch_save`` leaves it so, and then ``load_state_dict`` finds no state.
    """
    keyed = {key for key, entry in entries.items() if not isinstance(entry, OwnValue)}
    if not any(isinstance(key, str) for key in keyed):
        return entries, 0
    ids: set[int] = set()
    for group in groups:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(key) is int for key in params):
            return entries, 0
        ids.update(cast("list[int]", params))
    names: dict[ParamKey, int] = {str(number): number for number in ids}
    if not all(isinstance(key, int) or key in names for key in keyed):
        return entries, 0
    repaired: dict[ParamKey, StatesOrValue] = {names.get(key, key): entry for key, entry in entries.items()}
    if len(repaired) < len(entries):  # one id is there as a number and as text
        return entries, 0
    return repaired, len(keyed)


def _unflatten(value: Mapping[Key, Value]) -> Optimizer:
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
    return replace(Optimizer.of(state, groups), rebuilt=groups is not None)


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
        f"that the model computed with; {flags.dtype(min(copies))} gives those"
    )
    return [Note("master-weights", message)]


def step_tensor(step: Value, files: FileTable) -> Tensor | None:
    """The step count that Megatron stores once, in the form torch's optimizers have for each parameter."""
    if isinstance(step, Tensor) or step is None:
        return step
    if not isinstance(step, (int, float)) or not abs(step) < 1 << 53:
        return None
    number = np.array(step, "<f4").tobytes()
    file = files.add_inline(number)
    return Tensor(DTYPES["float32"], (), Chunks.whole(file=file, offset=0, shape=()), sharded=False)
