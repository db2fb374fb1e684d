"""Restores the sections of safetensors files that fsdpckpt wrote, as ``formats.safetensors`` lays them out."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError, damaged
from fsdpckpt.formats.safetensors import METADATA_KEY, VERSION, model_key, state_key
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, ParamKey
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Json, Key, Value, decode
from fsdpckpt.readers.protocol import Tree
from fsdpckpt.text import plural


def assemble(tensors: dict[str, Tensor], documents: Sequence[tuple[str, str]], tree: Tree) -> dict[Key, Value]:
    """The state dict of ``tensors`` (by stored key); ``documents``: (file, text) of every fsdpckpt entry.

    Without documents it is the flat dict of tensors. Raises SourceCorruptError for a document that cannot be read,
    SourceIncompleteError that lists every missing tensor it refers to.
    """
    if not documents:
        return dict(tensors.items())
    file, document = _merge(documents)
    message = f"the header's {METADATA_KEY!r} entry says what safetensors itself cannot hold"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    return _Assembly(file, document, tensors).root()


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
            known = merged.get(key)
            merged[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return documents[0][0], merged


def _corrupt(file: str, what: str) -> SourceCorruptError:
    return damaged(file, f"the {METADATA_KEY!r} entry of the header {what}", why="the file was edited or damaged")


class _Assembly:
    """One document while it is applied; ``used`` collects the stored keys that it has placed."""

    def __init__(self, file: str, document: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        self.file = file
        self.document = document
        self.tensors = _retyped(file, document.get("raw", {}), tensors)
        self.sections = document.get("sections") is True
        self.used: set[str] = set()
        self.missing: list[str] = []

    def root(self) -> dict[Key, Value]:
        root: dict[Key, Value] = {}
        optim = self._object("optim")
        optimizer = None if optim is None else self._optimizer(optim)
        extra = self._decoded(self.document.get("extra", {}))
        if not isinstance(extra, dict):
            raise _corrupt(self.file, "has extras that are not a dict")
        model = self._model(_references(self.document))
        if model is not None:
            root["model"] = model
        if optimizer is not None:
            root["optimizer"] = optimizer
        clash = root.keys() & extra.keys()
        if clash:
            raise _corrupt(self.file, f"has extras called {sorted(map(str, clash))}")
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

    def _object(self, key: str) -> dict[str, Json] | None:
        value = self.document.get(key)
        if value is not None and not isinstance(value, dict):
            raise _corrupt(self.file, f"has no object as {key!r}")
        return value

    def _decoded(self, data: Json) -> Value:
        return decode(data, tensors=self.tensors, file=self.file)

    def _optimizer(self, optim: Mapping[str, Json]) -> dict[Key, Value]:
        order = self._decoded(optim.get("order", []))
        values = self._decoded(optim.get("state_values", {}))
        if not isinstance(order, list) or not isinstance(values, dict):
            raise _corrupt(self.file, "has no order of optimizer states")
        state: dict[Key, Value] = {}
        for row in order:
            if not isinstance(row, (list, tuple)) or len(row) != 2 or not isinstance(row[1], (list, tuple)):
                raise _corrupt(self.file, "has a malformed order of optimizer states")
            param, names = row[0], row[1]
            if not isinstance(param, (int, str)) or not isinstance(names, (list, tuple)):
                raise _corrupt(self.file, "has a parameter that is neither name nor id")
            others = values.get(param, {})
            state[param] = self._states(param, names, others if isinstance(others, dict) else {})
        optimizer: dict[Key, Value] = {"state": state}
        groups = self._decoded(optim.get("param_groups"))
        if groups is not None:
            optimizer["param_groups"] = groups
        extra = self._decoded(optim.get("extra", {}))
        if isinstance(extra, dict):
            optimizer.update(extra)
        return optimizer

    def _states(self, param: ParamKey, names: Sequence[Value], others: Mapping[Key, Value]) -> dict[Key, Value]:
        states: dict[Key, Value] = {}
        for name in names:
            if not isinstance(name, str):
                raise _corrupt(self.file, "has an optimizer state without a name")
            if name in others:
                states[name] = others[name]
                continue
            key = state_key(param, name, sections=self.sections)
            tensor = self.tensors.get(key)
            if tensor is None:
                self.missing.append(key)
            else:
                self.used.add(key)
                states[name] = tensor
        return states

    def _model(self, referenced: set[str]) -> dict[Key, Value] | None:
        """Everything that is neither in the optimizer nor in an extra, in the document's order if it has one."""
        prefix = model_key("", sections=self.sections)
        entries: dict[str, Value] = {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key not in self.used and key not in referenced and key.startswith(prefix)
        }
        for alias, key in (self._object("model_aliases") or {}).items():
            tensor = entries.get(str(key))
            if tensor is None:
                self.missing.append(str(key))
            else:
                entries[alias] = tensor
        values = self._decoded(self.document.get("model_values", {}))
        if isinstance(values, dict):
            entries.update({str(key): value for key, value in values.items()})
        order = self.document.get("model_order")
        if isinstance(order, list):
            self.missing += [str(key) for key in order if key not in entries]
            entries = {str(key): entries[str(key)] for key in [*order, *entries] if key in entries}
        if not entries and order is None:
            return None
        metadata = self._decoded(self.document.get("model_metadata"))
        if metadata is None:
            return dict(entries.items())
        model: OrderedDict[Key, Value] = OrderedDict(entries)
        vars(model)["_metadata"] = metadata
        return model


def _references(data: Json) -> set[str]:
    """Every stored key that an encoded value refers to."""
    keys: set[str] = set()
    stack: list[Json] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, dict) and isinstance(key := item.get("$tensor"), str):
            keys.add(key)
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend(value for value in inner if isinstance(value, (dict, list)))
    return keys


def _retyped(file: str, raw: Json, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the dtype and shape of tensors that are stored as bytes, because safetensors has no code for
    their dtype.
    """
    if not isinstance(raw, dict):
        raise _corrupt(file, "has no object as 'raw'")
    if not raw:
        return tensors
    typed = dict(tensors)
    for key, entry in raw.items():
        stored = tensors.get(key)
        if stored is None or not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], list):
            raise _corrupt(file, f"describes {key!r} wrongly")
        dtype = DTYPES.get(str(entry[0]))
        shape = tuple(extent for extent in entry[1] if type(extent) is int and extent >= 0)
        if dtype is None or len(shape) != len(entry[1]) or len(stored.chunks) != 1:
            raise _corrupt(file, f"describes {key!r} wrongly")
        if math.prod(shape) * dtype.itemsize != stored.nbytes or math.prod(filter(None, shape)) >= 1 << 59:
            raise _corrupt(file, f"gives {key!r} another size than its bytes")
        file_id, offset = int(stored.chunks.file[0]), int(stored.chunks.offset[0])
        chunk = Chunks.whole(file=file_id, offset=offset, shape=shape)
        typed[key] = Tensor(dtype, shape, chunk, stored.sharded, stored.placement)
    return typed
