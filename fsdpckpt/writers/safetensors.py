"""Lays out safetensors files: one file, or shards of model, optimizer and extras with Hugging Face's index beside them.
With a ``path`` the shards have the names of DCP's own writer, and no index (``hf_storage.py``, ``save_distributed``).

``formats.safetensors`` describes how ``__metadata__`` holds values that are not tensors. Tied weights are stored once.
Tensors are sorted by element size, largest first, so that every one is aligned without the gaps that the format
forbids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.safetensors import METADATA_KEY, OWN_VALUE, VERSION, model_key, state_key
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.optimizer import OwnValue, States, StatesOrValue
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Json, Key, Value, encode, leaf_tensors
from fsdpckpt.producers import EXTRA_STEM
from fsdpckpt.text import plural
from fsdpckpt.writers.protocol import DtypeRule, WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_one
from fsdpckpt.writers.torch_full import ties

_SUFFIX = ".safetensors"
_ALIGNMENT = 8  # bytes, what the reference implementation pads the header to


@dataclass(slots=True)
class _ShardSet:
    """The tensors and the document of one set of shards, named ``<stem>.safetensors`` or ``<stem>-0000i-of-0000N``."""

    stem: str
    tensors: dict[str, tuple[Tensor, DType]] = field(default_factory=dict)
    document: dict[str, Json] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)

    def add(self, key: str, tensor: Tensor, dtype: DType) -> None:
        if key in self.tensors:
            self.duplicates.append(key)
        self.tensors[key] = (tensor, dtype)


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """One file (``path`` ""), or a directory with shards of at most ``spec.max_shard_size`` bytes of data each.

    A larger tensor has a shard of its own. Raises SourceUnsupportedError that lists all keys whose dtype the format has
    no code for.
    """
    single_file, dtypes = spec.single_file, spec.dtypes
    sections = single_file and checkpoint.model is not None and checkpoint.optim is not None
    extra, notes = extras_of_one(checkpoint)
    model, optim, others = _ShardSet("model"), _ShardSet("optimizer"), _ShardSet(EXTRA_STEM)
    if single_file:
        optim = others = model
    casts, cast_notes = dtypes.casts(checkpoint)
    notes = cast_notes + notes + _model(checkpoint, model, dtypes, sections=sections, once=not spec.path)
    _optim(checkpoint, optim, casts, sections=sections)
    if extra and not spec.weights_only:
        others.document["extra"] = _encode(extra, others, "extra")
        notes.append(_note_extras(extra, others, single_file=single_file))
    if sections:
        model.document["sections"] = True
    if spec.weights_only:
        model.document.clear()
    several = [model] if single_file else [model, optim, others]
    groups = [group for group in several if group.tensors or group.document]
    _refuse(groups)
    if single_file:
        return Target([_file("", list(model.tensors), model, first=True)], notes=notes)
    files = [file for group in groups for file in _shards(group, spec.max_shard_size, spec.path)]
    return Target(files, notes=notes)


def _note_extras(extra: dict[Key, Value], group: _ShardSet, *, single_file: bool) -> Note:
    """A note on where the extras are: nobody expects them among weights."""
    names = tuple(map(str, extra))
    where = f"{group.stem}.safetensors"
    if single_file:
        tensors = any(True for _ in leaf_tensors(extra))
        where = "the file's header" + (", their tensors in the file as extra.<name>" if tensors else "")
    return Note("carried", f"what is neither model nor optimizer is in {where}: {', '.join(names)}", keys=names)


def _model(checkpoint: Checkpoint, group: _ShardSet, dtypes: DtypeRule, *, sections: bool, once: bool) -> list[Note]:
    """The model section's tensors and document entries; notes the tied weights, of which only one is stored if
    ``once``.
    """
    model = checkpoint.model
    if model is None:
        return []
    tied = ties([leaf for leaf in model.params.values() if isinstance(leaf, Tensor)]) if once else {}
    stored: dict[Tensor, str] = {}
    aliases: dict[str, Json] = {}
    values: dict[Key, Value] = {}
    for fqn, leaf in model.params.items():
        if not isinstance(leaf, Tensor):
            values[fqn] = leaf
            continue
        first = stored.setdefault(tied.get(leaf, leaf), fqn) if once else fqn
        if first != fqn:
            aliases[fqn] = first
        else:
            group.add(model_key(fqn, sections=sections), leaf, dtypes.of(Section.MODEL, None, leaf))
    document = group.document
    document["model_order"] = list(model.params)
    if aliases:
        document["model_aliases"] = aliases
    if values:
        document["model_values"] = _encode(values, group, "values")
    if model.metadata is not None:
        document["model_metadata"] = _encode(model.metadata, group, "metadata")
    return [Note("tied", f"{alias} is stored once, as {first}", alias) for alias, first in aliases.items()]


def _optim(checkpoint: Checkpoint, group: _ShardSet, casts: Mapping[Tensor, DType], *, sections: bool) -> None:
    """The optimizer section's tensors and document entry."""
    optim = checkpoint.optim
    if optim is None:
        return
    values: dict[Key, Value] = {}
    entries = {param: _named_states(entry) for param, entry in optim.items()}
    for param, states in entries.items():
        plain: dict[Key, Value] = {}
        for state, leaf in states.items():
            if isinstance(leaf, Tensor):
                group.add(state_key(param, state, sections=sections), leaf, casts.get(leaf, leaf.dtype))
            else:
                plain[state] = leaf
        if plain:
            values[param] = plain
    order: Value = [[param, list(states)] for param, states in entries.items()]
    document: dict[str, Json] = {"order": encode(order), "param_groups": None}
    if optim.key_type is not None:
        document["key_type"] = optim.key_type
    if values:
        document["state_values"] = _encode(values, group, "optimizer", casts)
    if optim.param_groups is not None:
        document["param_groups"] = _encode(list(optim.param_groups), group, "optimizer.param_groups")
        document["param_keys"] = [encode(params.get("params")) for params in optim.param_groups]
    if optim.extra:
        document["extra"] = _encode(optim.extra, group, "optimizer")
    group.document["optim"] = document


def _named_states(entry: StatesOrValue) -> States:
    """The states of ``entry``; a value in place of states has a name in the document."""
    return {OWN_VALUE: entry.value} if isinstance(entry, OwnValue) else entry


def _encode(value: Value, group: _ShardSet, prefix: str, casts: Mapping[Tensor, DType] | None = None) -> Json:
    """``value`` as JSON; the tensors in it are stored as ``<prefix>.<path>``."""
    paths = {tensor: ".".join(map(str, path)) for path, tensor in leaf_tensors(value)}
    keys: dict[Tensor, str] = {}
    dtypes = casts or {}

    def tensor_key(tensor: Tensor) -> str:
        key = keys.get(tensor)
        if key is None:
            key = f"{prefix}.{paths.get(tensor, len(keys))}"
            while key in group.tensors:
                key += "_"
            keys[tensor] = key
            group.add(key, tensor, dtypes.get(tensor, tensor.dtype))
        return key

    return encode(value, tensor_key=tensor_key)


def _refuse(groups: list[_ShardSet]) -> None:
    """Raises SourceUnsupportedError for what no safetensors file can hold."""
    keys = [key for group in groups for key in group.tensors]
    unfit = [key for key in keys if key == "__metadata__" or not _is_unicode(key)]
    if unfit:
        raise SourceUnsupportedError(
            f"{plural(len(unfit), 'tensor', 'have')} a key that a safetensors file cannot hold",
            details=unfit,
            why="its header is JSON in UTF-8, in which __metadata__ is not a tensor",
            next_step=f"rename them with {flags.rename('OLD=NEW')}, or leave them out with {flags.exclude}",
            key=unfit[0],
        )
    unknown = [
        f"{key} ({dtype.name})"
        for group in groups
        for key, (_, dtype) in group.tensors.items()
        if dtype.safetensors is None
    ]
    if unknown:
        raise SourceUnsupportedError(
            f"{plural(len(unknown), 'tensor', 'have')} a dtype that safetensors cannot hold",
            details=unknown,
            next_step=f"write another container ({flags.container('torch')} or dcp), or leave them out with "
            f"{flags.exclude}",
            key=unknown[0].split(" ")[0],
        )
    duplicates = [key for group in groups for key in group.duplicates]
    if duplicates:
        raise SourceUnsupportedError(
            "several tensors would get the same key in a safetensors file",
            details=duplicates,
            why="parameter and state names joined with dots become equal",
            next_step=f"leave one of them out with {flags.exclude}, or rename it with {flags.rename('OLD=NEW')}",
            key=duplicates[0],
        )


def _is_unicode(text: str) -> bool:
    """Whether ``text`` has no lone surrogates, which JSON parsers other than Python's refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shards(group: _ShardSet, limit: int, prefix: str) -> list[TargetFile]:
    """The group's files: one, or several with their index. With a ``prefix`` all are numbered, and none is an index. A
    prefix with the suffix of a file is the path of the only one.
    """
    if prefix.endswith(_SUFFIX):
        return [_file(prefix, list(group.tensors), group, first=True)]
    shards: list[list[str]] = [[]]
    room, total = limit, 0
    for key, (tensor, dtype) in group.tensors.items():
        nbytes = tensor.numel * dtype.itemsize
        total += nbytes
        if nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= nbytes
    if len(shards) == 1 and not prefix:
        return [_file(f"{group.stem}.safetensors", shards[0], group, first=True)]
    stem = f"{prefix}{group.stem}"
    names = [f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    files = [_file(name, keys, group, first=name is names[0]) for name, keys in zip(names, shards, strict=True)]
    if prefix:
        return files
    weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    index = TargetFile(f"{group.stem}.safetensors.index.json")
    index.add_literal(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"
    )
    return [*files, index]


def _file(path: str, keys: list[str], group: _ShardSet, *, first: bool) -> TargetFile:
    """One file of the tensors ``keys``; the group's first file holds the document."""
    metadata = {"format": "pt"}
    if first and group.document:
        metadata[METADATA_KEY] = json.dumps({"version": VERSION, **group.document}, separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": metadata}
    at = 0
    in_file = sorted(keys, key=lambda key: -group.tensors[key][1].itemsize)
    for key in in_file:
        tensor, dtype = group.tensors[key]
        end = at + tensor.numel * dtype.itemsize
        header[key] = {"dtype": dtype.safetensors, "shape": tensor.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file = TargetFile(path)
    file.add_literal(len(text).to_bytes(8, "little") + text)
    for key in in_file:
        tensor, dtype = group.tensors[key]
        file.add_write_item(tensor, dtype=dtype)
    return file
