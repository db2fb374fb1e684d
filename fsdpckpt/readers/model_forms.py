"""Recognises models in a nested state dict: mappings from names to tensors, also those that are nested in others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fsdpckpt.ir.checkpoint import ModelState
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.readers.protocol import KeyPath

WEIGHTS = "weights"  # also the name of dicts of weights of classes and losses
MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", WEIGHTS)
_PARAMETERS = frozenset({"weight", "bias"})  # how the names of most modules' parameters end


def is_model_entry(key: Key, value: Value) -> bool:
    return isinstance(key, str) and (isinstance(value, Tensor) or key.rpartition(".")[2] == "_extra_state")


def is_generator_state(value: Value) -> bool:
    """``torch.get_rng_state`` returns a 1-D tensor of bytes; a dict of nothing else is not a model."""
    return isinstance(value, Tensor) and value.dtype.name == "uint8" and value.ndim == 1


def is_model(value: Mapping[Key, Value], *, named: bool) -> bool:
    """Whether it maps names to tensors; if its own key calls it a model (``named``), it may hold plain values too."""
    if not value or not all(isinstance(key, str) for key in value):
        return False
    entries = sum(1 for key, entry in value.items() if is_model_entry(key, entry))
    if not any(isinstance(entry, Tensor) and not is_generator_state(entry) for entry in value.values()):
        return False
    if named:
        return not any(isinstance(entry, dict) and not is_model_entry(key, entry) for key, entry in value.items())
    return entries == len(value) and any(_shows_a_module(str(key), entry) for key, entry in value.items())


def _shows_a_module(name: str, entry: Value) -> bool:
    """Whether ``name`` is that of a parameter in a module, or of the only layer that a model consists of. Weights of
    classes are called so too, and have one dimension.
    """
    of_a_layer = name == "weight" and isinstance(entry, Tensor) and entry.ndim > 1
    return "." in name or is_flat_key(name) or of_a_layer


def without_empty(value: Mapping[Key, Value]) -> Mapping[Key, Value]:
    """``value`` as it comes back from a DCP directory, which cannot hold empty dicts."""
    return {key: entry for key, entry in value.items() if not isinstance(entry, dict) or entry}


def is_another_model(value: Mapping[Key, Value], main: Collection[str]) -> bool:
    """Whether a dict of tensors beside a model (with the names ``main``) is one too, and not statistics of the job: it
    has names of that model, as an average of its weights does, names that end as those of parameters do, or those of
    flat parameters.
    """
    names = [str(key) for key in value]
    return any(name in main or name.rpartition(".")[2] in _PARAMETERS or is_flat_key(name) for name in names)


def modules_of(value: Mapping[Key, Value]) -> list[Key]:
    """The keys of the dicts in a model that is nested by module, as ``{"encoder": {...}, "decoder": {...}}``.

    Empty if ``value`` is none: everything in it, at every depth, must be a tensor or an ``_extra_state`` under a name.
    A dict with the name of a model is a model of its own.
    """
    modules = [key for key, entry in value.items() if isinstance(entry, dict) and not is_model_entry(key, entry)]
    if any(key in MODEL_NAMES for key in modules):
        return []
    leaves = _leaves(value, "")
    nested = all(isinstance(key, str) and is_model_entry(key, leaf) for key, leaf in leaves)
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor) and not is_generator_state(leaf)]
    return modules if nested and tensors and len(dict(leaves)) == len(leaves) else []


def joined(value: Mapping[Key, Value]) -> ModelState:
    """A model that is nested by module, with the names that the whole has: ``encoder.layers.0.weight``."""
    metadata: dict[Key, Value] = {}
    for key, entry in value.items():
        of_module = metadata_of(entry) if isinstance(entry, dict) else None
        for name, version in of_module.items() if isinstance(of_module, dict) else ():
            metadata[f"{key!s}.{name!s}".rstrip(".")] = version
    return ModelState({str(key): leaf for key, leaf in _leaves(value, "")}, metadata or None)


def metadata_of(value: Mapping[Key, Value]) -> Value:
    """What ``nn.Module.state_dict`` attaches to the dict that it returns."""
    metadata: Value = vars(value).get("_metadata") if hasattr(value, "__dict__") else None
    return metadata


def _leaves(value: Mapping[Key, Value], prefix: str) -> list[tuple[Key, Value]]:
    """The entries of ``value`` and of the dicts in it by dotted names. A key that is no text stays as it is, and shows
    that this is no model."""
    leaves: list[tuple[Key, Value]] = []
    for key, entry in value.items():
        if not isinstance(key, str):
            leaves.append((key, entry))
        elif isinstance(entry, dict) and not is_model_entry(key, entry):
            leaves += _leaves(entry, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", entry))
    return leaves


def is_below_any(path: KeyPath, outers: Collection[KeyPath]) -> bool:
    """Whether ``path`` is one of ``outers`` (a set or the keys of a dict), or a path in one."""
    return any(path[:depth] in outers for depth in range(len(path) + 1))


def is_below(path: KeyPath, outer: KeyPath) -> bool:
    """Whether ``path`` is ``outer`` or a path in it."""
    return path[: len(outer)] == outer
