"""Names as a wrapped model has them, and the order in which its ``state_dict`` lists them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value

__all__ = ["state_dict_order", "wrapped_metadata", "wrapped_name"]

_WRAPPED = "_fsdp_wrapped_module"


def wrapped_name(name: str, prefixes: Collection[str]) -> str:
    """``name`` of a parameter or unit as ``named_parameters()`` of a model gives it that is wrapped at ``prefixes``."""
    words = name.split(".")
    found: list[str] = []
    for index, word in enumerate(words):
        if ".".join(words[:index]) in prefixes:
            found.append(_WRAPPED)
        found.append(word)
    return ".".join(found)


def wrapped_metadata(metadata: Value, units: Units) -> Value:
    """``_metadata`` (module path to version) of a model, wrapped or not, as that of the model wrapped in ``units``."""
    if not isinstance(metadata, dict):
        return metadata
    prefixes = {unit.prefix for unit in units.units}
    bare: dict[str, Value] = {}
    for key, value in metadata.items():
        # Of a wrapper and the module in it, the module comes later and stays.
        bare[".".join(word for word in str(key).split(".") if word != _WRAPPED)] = value
    found: OrderedDict[Key, Value] = OrderedDict()
    for path, value in bare.items():
        name = wrapped_name(path, prefixes) if path else path
        found[name] = {"version": 1} if path in prefixes else value
        if path in prefixes:
            found[f"{name}.{_WRAPPED}" if name else _WRAPPED] = value
    return found


@dataclass(slots=True)
class _Module:
    """One module: its own parameters and its other own keys, and its children, in the order of ``state_dict``."""

    params: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)


def state_dict_order(names: Iterable[str], units: Units) -> list[str]:
    """``names`` (parameters, buffers) and the keys of flat parameters in the order of a ``LOCAL_STATE_DICT``.

    A module's parameters come first, then its buffers, then its children. With ``use_orig_params=False`` the flat
    parameter is a parameter of its module, registered last; with True the state dict hook puts it after everything in
    the module. Raw order otherwise: whatever ``names`` has.
    """
    known = {*units.params(), *(later for later, _ in units.shared)}
    root = _Module()
    for name in names:
        *path, _ = name.split(".")
        module = root
        for word in path:
            module = module.children.setdefault(word, _Module())
        (module.params if name in known else module.others).append(name)
    found: list[str] = []
    _list_module(root, "", {unit.prefix: unit.key for unit in units.units}, found, last=units.use_orig_params)
    return found


def _list_module(module: _Module, path: str, flat: dict[str, str], found: list[str], *, last: bool) -> None:
    found.extend(module.params)
    key = flat.get(path)
    if key is not None and not last:
        found.append(key)
    found.extend(module.others)
    for word, child in module.children.items():
        _list_module(child, f"{path}.{word}" if path else word, flat, found, last=last)
    if key is not None and last:
        found.append(key)
