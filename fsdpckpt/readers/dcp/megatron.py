"""Reads Megatron-core's distributed checkpoints: ``torch_dist`` directories, and what Megatron FSDP adds to DCP.

``dist_checkpointing.save`` writes a DCP directory without planner data, ``metadata.json`` with the name of the format,
and the values that all ranks share in ``common.pt`` (since core 0.19 in the object ``common_state``). The training loop
puts each into ``iter_<number>/`` and the last number into ``latest_checkpointed_iteration.txt``
(``megatron/core/dist_checkpointing/serialization.py``, ``megatron/training/checkpointing.py``).

Tensors have the names and global shapes that Megatron gave them: layers of one form are one tensor with a dimension for
the layers (``decoder.layers.mlp.linear_fc1.weight``). Optimizer states are ``optimizer.state.<state>.<parameter>``
(``megatron/core/dist_checkpointing/optimizer.py``, ``megatron/core/optimizer/distrib_optimizer.py``). No param group
lists its parameters: ``transform.weight_decay`` determines which those are.

Megatron FSDP (``--ckpt-format fsdp_dtensor``) saves a plain DCP directory, and keeps the settings of param groups
parameter by parameter. Both separate the gate (``_w``) from the value (``_v``) of SwiGLU, so that tensor parallel
ranks divide each (``megatron/core/transformer/fsdp_dtensor_checkpoint.py``, ``handle_swiglu_in_state_dict``;
``optimizer/distrib_optimizer.py``, ``sharded_param_state_fsdp_dtensor``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError, damaged
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind
from fsdpckpt.ir.placements import Shard, Sharded
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.optimizer_forms import groups_of_equal_settings, notes_on_copies, step_tensor
from fsdpckpt.readers.protocol import Claim, FileTable, Locate, Part, PartContents, ReadOptions, claim_latest
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

_CONFIG, _COMMON = "metadata.json", "common.pt"
_LATEST = "latest_checkpointed_iteration.txt"
_DCP = (".distcp", ".metadata")
_OWN = {_COMMON, ".metadata"}
_MAX_CONFIG_BYTES = 1 << 16
_MAX_LETTERS = 32
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_BUFFERS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_MASTERS = ("fp32_param", "param")  # the weights that the optimizer updates
_COMMON_OBJECT = "common_state/shard_0_1"
_NOT_SETTINGS = frozenset({"is_expert_parallel", "default_config", "params"})

_SETTINGS = "param_to_group_meta"
_GATE = re.compile(r"\.linear_fc1\.(?:weight|bias)\d*_w$")
_WRAPPERS = re.compile(r"^(?:module\.)+")
_OTHER_ROUNDING = ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param", "use_precision_aware_optimizer")
_PLAIN = frozenset({"Namespace", "SimpleNamespace", "Signals"})

_Dict = dict[Key, Value]


class MegatronReader:
    """Directories written by ``megatron.core.dist_checkpointing.save``, and a run's directory, of which the last
    checkpoint counts.
    """

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del file, sources
        return None

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Claim the checkpoint in ``path``, or the one that ``latest_checkpointed_iteration.txt`` names. Raises
        SourceUnsupportedError for the zarr format, SourceIncompleteError if no file names the format.
        """
        if _CONFIG in files or files.keys() >= _OWN:
            return _claim(path, files, options, sources)
        claim = partial(_claim, options=options, sources=sources)
        return claim_latest(path, files.get(_LATEST), sources, claim, _directory_of)


def _claim(path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources) -> Claim:
    backend = _backend(files.get(_CONFIG), sources)
    if backend is None:
        if files.keys() >= _OWN:
            raise SourceIncompleteError(
                f"{path} has the files of a Megatron checkpoint, but no {_CONFIG}, which names its format",
                file=f"{path.rstrip('/')}/{_CONFIG}",
                why="the save or the copy did not finish, or the file was damaged",
                next_step=f"copy {_CONFIG} again",
            )
        return Claim()
    if backend != "torch_dist":
        raise SourceUnsupportedError(
            f"{path} is a Megatron checkpoint of the format {backend}, which fsdpckpt does not read",
            file=f"{path.rstrip('/')}/{_CONFIG}",
            expected="torch_dist",
            found=backend,
            why="Megatron-core replaced that format with torch_dist",
            next_step="load it with the Megatron-LM that wrote it, and save it with --ckpt-format torch_dist",
        )

    def read(table: FileTable, sources: Sources) -> PartContents:
        return _read_torch_dist(path, files.get(_COMMON), table, sources, locate=options.locate)

    names = {name for name in files if name.endswith(_DCP) or name in (_CONFIG, _COMMON)}
    return Claim([Part(path, path.rstrip("/").rpartition("/")[2], read)], names)


def _backend(entry: Entry | None, sources: Sources) -> str | None:
    """The format that ``metadata.json`` names; None if the file belongs to another program."""
    if entry is None or entry.nbytes > _MAX_CONFIG_BYTES:
        return None
    try:
        document = json.loads(sources.open(entry.path).read(0, entry.nbytes))
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend[:_MAX_LETTERS] if isinstance(backend, str) and backend.isprintable() else None


def _directory_of(iteration: str) -> str | None:
    if iteration.isascii() and iteration.isdecimal():
        return f"iter_{int(iteration):07d}"
    return "release" if iteration == "release" else None


def _read_torch_dist(
    path: str, common: Entry | None, files: FileTable, sources: Sources, *, locate: Locate
) -> PartContents:
    """Read the model, the optimizer and the extras of the directory ``path``. ``common``: its ``common.pt``.

    If the optimizer has fp32 weights, the model section has these. Buffers that hold the states of many
    parameters stay as they are, beside an empty ``state``. Raises SourceIncompleteError without the values that all
    ranks share, SourceCorruptError for states of other shapes than their parameters', and what ``read_dcp`` raises.
    """
    from fsdpckpt.readers.dcp.read import read_dcp

    tree = read_dcp(path, files, sources, locate=locate)
    saved = _Saved(path, tree)
    shared = _shared(common, saved, files, sources)
    # Beside the buffers: what a group of data-parallel ranks stores of its optimizer.
    groups_of_ranks = [key for key in saved.buffers if str(key).partition("/")[0].endswith(".optimizer")]
    stored = [saved.buffers.pop(key) for key in groups_of_ranks]
    optimizers = list(_optimizers(shared.pop("optimizer", None)))
    if stored and isinstance(stored[0], list) and stored[0]:
        optimizers += _optimizers(stored[0][0])
    names = saved.states
    for entry in names.values():
        if (step := _step(optimizers, files)) is not None:
            entry["step"] = step
    groups = [group for optimizer in optimizers for group in _groups(optimizer)]
    root: _Dict = {"model": saved.with_masters()}
    if names or saved.buffers or groups:
        states = cast(_Dict, dict(names))
        root["optimizer"] = {
            "state": states,
            "param_groups": _merge_groups(groups, list(map(str, names))),
            **saved.buffers,
        }
    extras = {**saved.objects, **shared, **_scaler(optimizers)}
    root.update({key: _without_classes(value) for key, value in extras.items() if key not in root})
    if _rounds_otherwise(root.get("args")):
        tree.copies = {}
    tree.world_size = saved.ranks
    tree.root, tree.flavor = root, "megatron"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is a torch_dist checkpoint of Megatron-core"))
    return tree


def _rounds_otherwise(arguments: Value) -> bool:
    """Whether the run with these ``arguments`` did not round master weights to the nearest number of the model's dtype:
    weights of 8 or 4 bits are saved as what they stand for, and weights with remainders are rounded up halfway.
    """
    return isinstance(arguments, dict) and any(map(arguments.get, _OTHER_ROUNDING))


@dataclass(slots=True)
class _Saved:
    """The entries of the DCP directory at ``path`` by kind. ``states``: by parameter, then by state; ``buffers``: the
    distributed optimizer's own; ``objects``: everything that is not a tensor.
    """

    path: str
    tree: PartContents
    model: _Dict = field(default_factory=dict)
    states: dict[Key, dict[Key, Value]] = field(default_factory=dict)
    buffers: _Dict = field(default_factory=dict)
    objects: _Dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in cast(_Dict, self.tree.root).items():
            match = _STATE.match(str(key))
            if match is not None and isinstance(value, Tensor):
                self.states.setdefault(match[2], {})[match[1]] = value
            elif _BUFFERS.match(str(key)):
                self.buffers[key] = value
            elif isinstance(value, Tensor):
                self.model[key] = value
            elif value != [None]:  # modules without a state save None for each layer
                self.objects[key] = value
        self.model, self.states = _join_halves(self.model, self.path), _join_states(self.states, self.path)

    @property
    def ranks(self) -> int:
        """The number of ranks that wrote tensors. Chunks do not show it: layers are chunks of one tensor."""
        leaves = [leaf for leaf in cast(_Dict, self.tree.root).values() if isinstance(leaf, Tensor)]
        return max((int(leaf.chunks.rank.max()) + 1 for leaf in leaves if len(leaf.chunks)), default=1)

    def with_masters(self) -> _Dict:
        """The model with the optimizer's weights, which are removed from the states."""
        model, replaced = dict(self.model), set[str]()
        copies = self.tree.copies
        for name, states in self.states.items():
            masters = [states.pop(key) for key in _MASTERS if key in states]
            weight = self.model.get(name)
            for leaf in (*states.values(), *masters):
                if isinstance(leaf, Tensor) and isinstance(weight, Tensor) and leaf.shape not in ((), weight.shape):
                    raise damaged(
                        self.path,
                        f"a state of {name!s} does not have the shape of the parameter",
                        f"shape {list(weight.shape)}",
                        f"shape {list(leaf.shape)}",
                        key=str(name),
                        why="data of several saves are mixed, or a version of Megatron-core that is not known wrote it",
                        next_step="save it again, or report it with the version of Megatron-core",
                    )
            for master in masters:
                model[name] = master
                if isinstance(weight, Tensor) and isinstance(master, Tensor) and weight.dtype is not master.dtype:
                    replaced.add(weight.dtype.name)
                    copies[str(name)] = weight
        self.tree.notes += notes_on_copies(replaced)
        return model


def _shared(common: Entry | None, saved: _Saved, files: FileTable, sources: Sources) -> _Dict:
    """The values that all ranks share."""
    value: Value
    if common is not None:
        from fsdpckpt.readers.torch_ranks.read import read_torch_file

        read = read_torch_file(common.path, files, sources)
        saved.tree.checksums = Checksums.joined([saved.tree.checksums, read.checksums])
        saved.tree.notes.extend(read.notes)
        value = read.root
    elif _COMMON_OBJECT in saved.objects:
        value = saved.objects.pop(_COMMON_OBJECT)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    else:
        raise SourceIncompleteError(
            f"{saved.path} has no {_COMMON}, which holds what all ranks share: the iteration and the param groups",
            file=f"{saved.path.rstrip('/')}/{_COMMON}",
            why="the save or the copy did not finish",
            next_step=f"copy {_COMMON} into the directory",
        )
    return dict(value) if isinstance(value, dict) else {}


def _optimizers(value: Value) -> Iterator[Mapping[Key, Value]]:
    """The state dict of each optimizer: of a single one, or of several under their numbers (``ChainedOptimizer``)."""
    if not isinstance(value, dict):
        return
    if value and all(type(key) is int for key in value):
        for optimizer in value.values():
            yield from _optimizers(optimizer)
    else:
        inner = value.get("optimizer")
        yield {**value, **inner} if isinstance(inner, dict) else value


def _groups(optimizer: Mapping[Key, Value]) -> list[_Dict]:
    groups = optimizer.get("param_groups")
    return [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _step(optimizers: Sequence[Mapping[Key, Value]], files: FileTable) -> Tensor | None:
    """The step count, which Megatron stores once for all parameters, in the form torch's optimizers have for each."""
    for optimizer in optimizers:
        state = optimizer.get("state")
        common = state.get("common_step") if isinstance(state, dict) else None
        for step in (common, *(group.get("step") for group in _groups(optimizer))):
            if (tensor := step_tensor(step, files)) is not None:
                return tensor
    return None


def _merge_groups(groups: list[_Dict], names: list[str]) -> list[Value]:
    """``groups`` without the step count. Groups with equal settings become one with all parameters; groups whose
    settings differ stay without parameters.
    """
    settings, compared = [], []
    for group in groups:
        settings.append(_without(group, ("step",)))
        compared.append(_without(group, ("step", *_NOT_SETTINGS)))
    if settings and all(setting == compared[0] for setting in compared):
        return [{**settings[0], "params": list(names)}]
    return list(settings)


def _without(group: _Dict, keys: Collection[str]) -> _Dict:
    return {key: value for key, value in group.items() if key not in keys}


def _scaler(optimizers: Sequence[Mapping[Key, Value]]) -> _Dict:
    scaler = next((each["grad_scaler"] for each in optimizers if each.get("grad_scaler")), None)
    return {} if scaler is None else {"grad_scaler": scaler}


def unwrap_megatron_fsdp(tree: PartContents, files: FileTable, path: str) -> None:
    """Normalise ``tree`` if Megatron FSDP saved it: one tensor for both halves, names without ``module.``, and param
    groups that list their parameters.

    Raises SourceCorruptError for halves that do not match.
    """
    root = tree.root
    if not isinstance(root, dict) or not _is_megatrons(root):
        return
    changed = {key: _without_classes(value) for key, value in root.items()}
    model, optimizer = root.get("model"), root.get("optimizer")
    if isinstance(model, dict):
        changed["model"] = _join_halves({_unwrapped(key): value for key, value in model.items()}, path)
    if isinstance(optimizer, dict):
        changed["optimizer"] = _optimizer(optimizer, files, path)
    tree.root, tree.flavor = changed, "megatron"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is an fsdp_dtensor checkpoint of Megatron"))


def _is_megatrons(root: Mapping[Key, Value]) -> bool:
    optimizer = root.get("optimizer")
    has_its_settings = isinstance(optimizer, dict) and _SETTINGS in optimizer
    has_its_arguments = {"args", "checkpoint_version"} <= root.keys()
    return "model" in root and (has_its_settings or has_its_arguments)


def _unwrapped(key: Key) -> Key:
    return _WRAPPERS.sub("", key) if isinstance(key, str) else key


def _optimizer(optimizer: Mapping[Key, Value], files: FileTable, path: str) -> _Dict:
    state, settings = optimizer.get("state"), optimizer.get(_SETTINGS)
    if not isinstance(state, dict) or not isinstance(settings, dict):
        return dict(optimizer)
    states = {_unwrapped(name): entry for name, entry in state.items() if isinstance(entry, dict)}
    joined = _join_states(states, path)
    by_name: dict[str, _Dict] = {}
    for name, saved in settings.items():
        setting = dict(saved) if isinstance(saved, dict) else {}
        step = step_tensor(setting.pop("step", None), files)
        by_name[str(_unwrapped(name))] = setting
        if step is not None and _unwrapped(name) in joined:
            joined[_unwrapped(name)].setdefault("step", step)
    order: dict[Key, None] = dict.fromkeys([*by_name, *joined])
    rest = {key: value for key, value in optimizer.items() if key not in ("state", _SETTINGS)}
    named = cast(_Dict, {name: joined[name] for name in order if name in joined})
    return {"state": named, "param_groups": cast("list[Value]", groups_of_equal_settings(by_name)), **rest}


def _join_states(states: Mapping[Key, Mapping[Key, Value]], path: str) -> dict[Key, dict[Key, Value]]:
    """``states``, by parameter and then by state, with each gate and value of SwiGLU joined to one parameter."""
    joined: dict[Key, dict[Key, Value]] = {}
    for key in dict.fromkeys(key for entry in states.values() for key in entry):
        leaves = {name: entry[key] for name, entry in states.items() if key in entry}
        for name, leaf in _join_halves(leaves, path).items():
            joined.setdefault(name, {})[key] = leaf
    return joined


def _join_halves(leaves: Mapping[Key, Value], path: str) -> _Dict:
    """``leaves`` with each gate and value of SwiGLU joined, at the place of the gate."""
    names = (str(name).removesuffix("_w") for name in leaves if _GATE.search(str(name)))
    whole = {name: (leaves[f"{name}_w"], leaves[f"{name}_v"]) for name in names if f"{name}_v" in leaves}
    whole_of = {f"{name}{half}": name for name in whole for half in ("_w", "_v")}
    joined: _Dict = {}
    for key, leaf in leaves.items():
        name = whole_of.get(str(key))
        if name is None:
            joined[key] = leaf
            continue
        gate, value = whole[name]
        if isinstance(gate, Tensor) and isinstance(value, Tensor) and gate.ndim:
            joined.setdefault(name, _join_pair(gate, value, name, path))
        else:
            joined.setdefault(name, gate)  # the number of steps: both halves have the parameter's
    return joined


def _join_pair(gate: Tensor, value: Tensor, name: str, path: str) -> Tensor:
    if gate.shape != value.shape or gate.dtype is not value.dtype:
        raise damaged(
            path,
            f"the gate and the value of {name} are not alike",
            f"{gate.dtype.name} {list(gate.shape)}",
            f"{value.dtype.name} {list(value.shape)}",
            key=name,
            why="data of several saves are mixed, or the metadata was damaged",
        )
    rows = gate.shape[0]
    start = value.chunks.start.copy()
    start[:, 0] += rows
    chunks = Chunks.joined([gate.chunks, value.chunks.with_boxes(start=start)])
    return replace(gate, shape=(2 * rows, *gate.shape[1:]), chunks=chunks, sharded=True, cut=Sharded((Shard(0),)))


def _without_classes(value: Value) -> Value:
    """``value`` with dicts and values in place of objects of Megatron's classes, so that it can be loaded without
    Megatron.
    """
    if isinstance(value, dict):
        return {key: _without_classes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_classes(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_without_classes(item) for item in value)
    if isinstance(value, Object) and (value.function.module.startswith("megatron.") or value.function.name in _PLAIN):
        if isinstance(value.state, dict):
            return _without_classes(value.state)
        return _without_classes(value.args[0] if value.args else None)
    return value
