"""Restores the sections of safetensors files that fsdpckpt wrote, as ``formats.safetensors`` lays them out."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.formats.safetensors import METADATA_KEY, OWN_VALUE, VERSION, model_key, state_key
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Json, Key, Value
from fsdpckpt.readers.protocol import PartContents
from fsdpckpt.text import plural


def restore(tensors: dict[str, Tensor], documents: Sequence[tuple[str, str]], tree: PartContents) -> dict[Key, Value]:
    """The state dict of ``tensors`` (by stored key); ``documents``: (file, text) of every fsdpckpt entry.

    Without documents it is the flat dict of tensors. Raises SourceCorruptError for a document that cannot be read,
    SourceIncompleteError that lists every missing tensor it refers to.
    """
    if not documents:
        return dict(tensors.items())
    file, document = _merge(documents)
    message = f"the header's {METADATA_KEY!r} entry says what safetensors itself cannot hold"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    try:
        return _Document(file, document, tensors).root()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(file, "is malformed", f"{type(error).__name__}: {error}"[:200]) from None


def _merge(documents: Sequence[tuple[str, str]]) -> tuple[str, dict[str, Json]]:
    merged: dict[str, Json] = {}
    for file, text in documents:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise _corrupt(file, "is not a JSON object")
        if document.get("version") != VERSION:
            raise SourceUnsupportedError(
                f"{file} was written by a newer fsdpckpt",
                file=file,
                expected=f"version {VERSION}",
                found=str(document.get("version")),
                next_step="update fsdpckpt",
            )
        for key, value in document.items():
            entry = merged.get(key)
            merged[key] = {**entry, **value} if isinstance(entry, dict) and isinstance(value, dict) else value
    return documents[0][0], merged


def _corrupt(file: str, what: str, found: str | None = None) -> SourceCorruptError:
    what = f"the {METADATA_KEY!r} entry of the header {what}"
    return damaged(file, what, found=found, why="the file was edited or damaged")


class _Document:
    """One document while it is applied; ``used`` collects the stored keys that it has placed.

    Its methods raise KeyError, TypeError, ValueError or AttributeError if it is malformed.
    """

    def __init__(self, file: str, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.file = file
        self.document = document
        self.tensors = _retyped(document.get("raw", {}), tensors)
        self.sections = document.get("sections") is True
        self.used: set[str] = set()
        self.missing: list[str] = []

    def root(self) -> dict[Key, Value]:
        root: dict[Key, Value] = {}
        optim = self.document.get("optim")
        optimizer = None if optim is None else self._optimizer(optim)
        extra = self._decoded(self.document.get("extra", {}))
        model = self._model(_references(self.document))
        if model is not None:
            root["model"] = model
        if optimizer is not None:
            root["optimizer"] = optimizer
        if root.keys() & extra.keys():
            raise ValueError(f"extras are called {sorted(map(str, root.keys() & extra.keys()))}")
        root.update(extra)
        if self.missing:
            raise SourceIncompleteError(
                f"{self.file}: the header promises {plural(len(self.missing), 'tensor')} that the file lacks",
                details=self.missing[:50],
                why="a shard is missing, or the file was rewritten by another program",
                file=self.file,
                key=self.missing[0],
            )
        return root

    def _decoded(self, data: Json) -> Any:
        return decode_allowed(data, tensors=self.tensors, file=self.file)

    def _optimizer(self, optim: dict[str, Json]) -> dict[Key, Value]:
        values = self._decoded(optim.get("state_values", {}))
        state: dict[Key, Value] = {}
        for param, names in self._decoded(optim.get("order", [])):
            if not isinstance(param, (int, str)):
                raise TypeError(f"{param} is neither a name nor an id")
            others, states = values.get(param, {}), dict[Key, Value]()
            for name in names:
                key = state_key(param, name, sections=self.sections)
                if name in others:
                    states[name] = others[name]
                elif key in self.tensors:
                    self.used.add(key)
                    states[name] = self.tensors[key]
                else:
                    self.missing.append(key)
            state[param] = states[OWN_VALUE] if states.keys() == {OWN_VALUE} else states
        optimizer: dict[Key, Value] = {"state": state}
        groups = self._decoded(optim.get("param_groups"))
        if groups is not None:
            optimizer["param_groups"] = groups
        return {**optimizer, **self._decoded(optim.get("extra", {}))}

    def _model(self, referenced: set[str]) -> dict[Key, Value] | None:
        """Everything that is neither in the optimizer nor in an extra, in the document's order if it has one."""
        prefix = model_key("", sections=self.sections)
        entries: dict[str, Value] = {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key not in self.used and key not in referenced and key.startswith(prefix)
        }
        for alias, key in self.document.get("model_aliases", {}).items():
            if key in entries:
                entries[alias] = entries[key]
            else:
                self.missing.append(str(key))
        entries.update(self._decoded(self.document.get("model_values", {})))
        order = self.document.get("model_order")
        if order is not None:
            self.missing += [str(key) for key in order if key not in entries]
            entries = {key: entries[key] for key in [*order, *entries] if key in entries}
        if not entries and order is None:
            return None
        model: OrderedDict[Key, Value] = OrderedDict(entries)
        metadata = self._decoded(self.document.get("model_metadata"))
        if metadata is None:
            return dict(model)
        vars(model)["_metadata"] = metadata
        return model


def _references(data: Json) -> set[str]:
    """Every stored key that an encoded value refers to."""
    keys: set[str] = set()
    stack: list[Json] = [data]
    while stack:
        item = stack.pop()
        inner: Iterable[object] = item if isinstance(item, list) else ()
        if isinstance(item, dict):
            inner = item.values()
            key = item.get("$tensor")
            if isinstance(key, str):
                keys.add(key)
        stack.extend(value for value in inner if isinstance(value, (dict, list)))
    return keys


def _retyped(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the dtype and shape of tensors that are stored as bytes, because safetensors has no code for
    their dtype.
    """
    typed = dict(tensors)
    for key, (dtype_name, shape) in raw.items():
        stored, dtype = tensors[key], DTYPES[dtype_name]
        (file,), (offset,) = stored.chunks.file.tolist(), stored.chunks.offset.tolist()
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise TypeError(f"{key!r} has the shape {shape}")
        if math.prod(shape) * dtype.itemsize != stored.nbytes or math.prod(filter(None, shape)) >= 1 << 59:
            raise ValueError(f"{key!r} has a size that does not match its bytes")
        chunk = Chunks.whole(file=file, offset=offset, shape=shape)
        typed[key] = Tensor(dtype, tuple(shape), chunk, stored.sharded, stored.cut)
    return typed
