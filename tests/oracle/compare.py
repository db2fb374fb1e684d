"""Compare state dicts bit for bit: types, key types, tuples and lists, dtypes, shapes, bytes, how they are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

__all__ = [
    "differences", "identical", "optimizer_by_id", "optimizer_by_name", "plain", "require_identical", "require_parts",
    "settings_by_parameter",
]  # fmt: skip


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return own.reshape(-1).view(torch.uint8)


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> Iterator[str]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
    elif unequal := int((_bits(a) != _bits(b)).sum()):
        yield f"{where}: {unequal} of {a.numel() * a.itemsize} bytes differ"


def _dtensors(a: DTensor, b: DTensor, where: str) -> Iterator[str]:
    for what in ("shape", "placements"):
        if getattr(a, what) != getattr(b, what):
            yield f"{where}: {what} {getattr(a, what)} is not {getattr(b, what)}"
    if a.stride() != b.stride():
        yield f"{where}: stride {a.stride()} is not {b.stride()}"
    if a.device_mesh.mesh.tolist() != b.device_mesh.mesh.tolist():
        yield f"{where}: mesh {a.device_mesh} is not {b.device_mesh}"
    yield from _tensors(a._local_tensor, b._local_tensor, f"{where} (local)")


def _sharded_tensors(a: ShardedTensor, b: ShardedTensor, where: str) -> Iterator[str]:
    if a.metadata() != b.metadata():
        yield f"{where}: {a.metadata()} is not {b.metadata()}"
    mine, theirs = a.local_shards(), b.local_shards()
    if len(mine) != len(theirs):
        yield f"{where}: {len(mine)} local shards, not {len(theirs)}"
    for one, other in zip(mine, theirs, strict=False):
        if one.metadata != other.metadata:
            yield f"{where}: {one.metadata} is not {other.metadata}"
        yield from _tensors(one.tensor, other.tensor, f"{where} (local)")


def _mappings(a: Mapping[Any, Any], b: Mapping[Any, Any], where: str) -> Iterator[str]:
    for key in b:
        if key not in a:
            yield f"{where}: {key!r} is missing"
    for key in a:
        if key not in b:
            yield f"{where}: {key!r} should not be there"
        else:
            yield from _compare(a[key], b[key], f"{where}[{key!r}]")
    for own, other in zip(sorted(map(repr, a)), sorted(map(repr, b)), strict=False):
        if own != other:
            yield f"{where}: key {own} is not {other}"
            return


def _compare(a: Any, b: Any, where: str) -> Iterator[str]:
    for kind, compare in ((DTensor, _dtensors), (ShardedTensor, _sharded_tensors), (torch.Tensor, _tensors)):
        if isinstance(a, kind) or isinstance(b, kind):
            if isinstance(a, kind) and isinstance(b, kind):
                yield from compare(a, b, where)
            else:
                yield f"{where}: {type(a).__name__} is not {type(b).__name__}"
            return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _mappings(a, b, where)
    elif type(a) is not type(b):
        yield f"{where}: {type(a).__name__} {a!r:.80} is not {type(b).__name__} {b!r:.80}"
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{where}: {len(a)} items, not {len(b)}"
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from _compare(one, other, f"{where}[{index}]")
    elif a != b:
        yield f"{where}: {a!r:.80} is not {b!r:.80}"


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Every difference between ``found`` and ``expected``; empty when they are bit for bit the same.

    Key order of mappings is free, the order of lists and tuples is not. ``OrderedDict`` and ``dict`` are the same.
    """
    return list(_compare(found, expected, where))


def identical(found: Any, expected: Any) -> bool:
    """Whether nothing differs. ``torch.equal`` calls 1.0 in float32 and in bfloat16 equal, and 0.0 and -0.0."""
    return not differences(found, expected)


def require_identical(found: Any, expected: Any, where: str = "") -> None:
    """Nothing differs; else the test fails with all that does."""
    different = differences(found, expected, where)
    assert not different, "\n".join(different)


def require_parts(found: Mapping[Any, Any], expected: Mapping[Any, Any], where: str = "") -> None:
    """As ``require_identical``, but ``found`` may have more keys, at any depth."""
    require_identical(_those_of(expected, found), expected, where)


def _those_of(keys: Any, value: Any) -> Any:
    if not isinstance(keys, Mapping) or not isinstance(value, Mapping):
        return value
    return {key: _those_of(inner, value[key]) for key, inner in keys.items() if key in value}


def plain(value: Any) -> Any:
    """A copy of a state dict with every tensor detached, in its own compact memory, as a plain tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(child) for child in value)
    return value


def optimizer_by_id(named: Mapping[str, Any]) -> dict[str, Any]:
    """A name-keyed optimizer state dict keyed by the ids ``torch.optim`` gives: positions in the groups, in order."""
    names = [name for group in named["param_groups"] for name in group["params"]]
    ids = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [ids[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {ids[name]: states for name, states in named["state"].items()}, "param_groups": groups}


def optimizer_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer of ``model.parameters()``, or of groups of them, keyed by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    content = optimizer.state_dict()
    of_id = {
        key: names[parameter]
        for group, live in zip(content["param_groups"], optimizer.param_groups, strict=True)
        for key, parameter in zip(group["params"], live["params"], strict=True)
    }
    groups = [{**group, "params": [of_id[key] for key in group["params"]]} for group in content["param_groups"]]
    return {"state": {of_id[key]: states for key, states in content["state"].items()}, "param_groups": groups}


def settings_by_parameter(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer state dict with the settings of its groups under the key of each parameter."""
    groups = optimizer["param_groups"]
    apart = {key: {**group, "params": [key]} for group in groups for key in group["params"]}
    return {"state": optimizer["state"], "param_groups": apart}
