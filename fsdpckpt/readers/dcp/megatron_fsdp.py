"""What Megatron FSDP (``--ckpt-format fsdp_dtensor``) saves through DCP, in the form of torch's own state dicts.

Megatron takes the gate (``_w``) and the value (``_v``) of SwiGLU apart, so that tensor parallel ranks divide each, and
keeps the settings of param groups parameter by parameter (``megatron/core/transformer/fsdp_dtensor_checkpoint.py``,
``handle_swiglu_in_state_dict``; ``optimizer/distrib_optimizer.py``, ``sharded_param_state_fsdp_dtensor``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from fsdpckpt.errors import damaged
from fsdpckpt.ir.checkpoint import LITERAL, Evidence, EvidenceKind
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.optimizer_forms import groups_of_equal_settings
from fsdpckpt.readers.protocol import FileTable, Tree

__all__ = ["join_halves", "join_states", "plain", "step_tensor", "unwrap_megatron_fsdp"]

_SETTINGS = "param_to_group_meta"
_GATE = re.compile(r"\.linear_fc1\.(?:weight|bias)\d*_w$")
_WRAPPERS = re.compile(r"^(?:module\.)+")

_Dict = dict[Key, Value]


def unwrap_megatron_fsdp(tree: Tree, files: FileTable, path: str) -> None:
    """Change ``tree`` where Megatron FSDP saved it: one tensor for both halves, names without ``module.``, and param
    groups that list their parameters.

    Raises SourceCorruptError for halves that are not alike.
    """
    root = tree.root
    if not isinstance(root, dict) or not _is_megatrons(root):
        return
    changed = {key: plain(value) for key, value in root.items()}
    model, optimizer = root.get("model"), root.get("optimizer")
    if isinstance(model, dict):
        changed["model"] = join_halves({_unwrapped(key): value for key, value in model.items()}, path)
    if isinstance(optimizer, dict):
        changed["optimizer"] = _optimizer(optimizer, files, path)
    tree.root, tree.flavor = changed, "megatron"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is an fsdp_dtensor checkpoint of Megatron"))


def _is_megatrons(root: Mapping[Key, Value]) -> bool:
    optimizer = root.get("optimizer")
    return "model" in root and (
        (isinstance(optimizer, dict) and _SETTINGS in optimizer) or {"args", "checkpoint_version"} <= root.keys()
    )


def _unwrapped(key: Key) -> Key:
    return _WRAPPERS.sub("", key) if isinstance(key, str) else key


def _optimizer(optimizer: Mapping[Key, Value], files: FileTable, path: str) -> _Dict:
    state, settings = optimizer.get("state"), optimizer.get(_SETTINGS)
    if not isinstance(state, dict) or not isinstance(settings, dict):
        return dict(optimizer)
    joined = join_states({_unwrapped(name): entry for name, entry in state.items() if isinstance(entry, dict)}, path)
    by_name: dict[str, _Dict] = {}
    for name, own in settings.items():
        setting = dict(own) if isinstance(own, dict) else {}
        step = step_tensor(setting.pop("step", None), files)
        by_name[str(_unwrapped(name))] = setting
        if step is not None and _unwrapped(name) in joined:
            joined[_unwrapped(name)].setdefault("step", step)
    order: dict[Key, None] = dict.fromkeys([*by_name, *joined])
    rest = {key: value for key, value in optimizer.items() if key not in ("state", _SETTINGS)}
    named: _Dict = {name: cast(Value, joined[name]) for name in order if name in joined}
    return {"state": named, "param_groups": cast("list[Value]", groups_of_equal_settings(by_name)), **rest}


def join_states(states: Mapping[Key, Mapping[Key, Value]], path: str) -> dict[Key, dict[Key, Value]]:
    """``states``, by parameter and then by state, with each gate and value of SwiGLU as one parameter."""
    joined: dict[Key, dict[Key, Value]] = {}
    for key in dict.fromkeys(key for entry in states.values() for key in entry):
        leaves = {name: entry[key] for name, entry in states.items() if key in entry}
        for name, leaf in join_halves(leaves, path).items():
            joined.setdefault(name, {})[key] = leaf
    return joined


def join_halves(leaves: Mapping[Key, Value], path: str) -> _Dict:
    """``leaves`` with each gate and value of SwiGLU as one, in the place of the gate."""
    names = (str(name).removesuffix("_w") for name in leaves if _GATE.search(str(name)))
    whole = {name: (leaves[f"{name}_w"], leaves[f"{name}_v"]) for name in names if f"{name}_v" in leaves}
    taken = {f"{name}{half}": name for name in whole for half in ("_w", "_v")}
    joined: _Dict = {}
    for key, leaf in leaves.items():
        name = taken.get(str(key))
        if name is None:
            joined[key] = leaf
            continue
        gate, value = whole[name]
        if isinstance(gate, Tensor) and isinstance(value, Tensor) and gate.ndim:
            joined.setdefault(name, _joined(gate, value, name, path))
        else:
            joined.setdefault(name, gate)  # the number of steps: both halves have the parameter's
    return joined


def _joined(gate: Tensor, value: Tensor, name: str, path: str) -> Tensor:
    if gate.shape != value.shape or gate.dtype is not value.dtype:
        raise damaged(
            path,
            f"the gate and the value of {name} are not alike",
            f"{gate.dtype.name} {list(gate.shape)}",
            f"{value.dtype.name} {list(value.shape)}",
            key=name,
            why="data of several saves lie together, or the metadata was damaged",
        )
    rows = gate.shape[0]
    first, last = gate.chunks, value.chunks
    shifted = last.start.copy()
    shifted[:, 0] += rows
    columns = {
        column: np.concatenate([getattr(first, column), getattr(last, column)])
        for column in ("rank", "file", "offset", "size", "stride")
    }
    item = None if first.item is None or last.item is None else np.concatenate([first.item, last.item])
    chunks = Chunks(start=np.concatenate([first.start, shifted]), item=item, **columns)
    return replace(gate, shape=(2 * rows, *gate.shape[1:]), chunks=chunks, sharded=True, placement="[Shard(0)]")


def step_tensor(step: Value, files: FileTable) -> Tensor | None:
    """The number of steps as torch's optimizers keep it for each parameter, of a number that Megatron keeps once."""
    if isinstance(step, Tensor) or step is None:
        return step
    if not isinstance(step, (int, float)) or not abs(step) < 1 << 53:
        return None
    number = np.array(step, "<f4").tobytes()
    file = files.add(f"{LITERAL}{number.hex()}", len(number))
    return Tensor(DTYPES["float32"], (), Chunks.whole(file=file, offset=0, shape=()), sharded=False)


def plain(value: Value) -> Value:
    """``value`` with dicts and values for objects of Megatron's classes, so that whoever loads it needs no Megatron."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, Object) and (value.function.module.startswith("megatron.") or value.function.name in _PLAIN):
        return plain(value.state if isinstance(value.state, dict) else value.args[0] if value.args else None)
    return value


_PLAIN = frozenset({"Namespace", "SimpleNamespace", "Signals"})
