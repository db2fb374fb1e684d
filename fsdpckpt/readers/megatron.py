"""Read Megatron-core's distributed checkpoints, ``torch_dist`` directories.

``dist_checkpointing.save`` writes a DCP directory without planner data, ``metadata.json`` with the name of the format,
and the values that all ranks share in ``common.pt`` (since core 0.19 in the object ``common_state``). The training loop
puts each into ``iter_<number>/`` and the last number into ``latest_checkpointed_iteration.txt``
(``megatron/core/dist_checkpointing/serialization.py``, ``megatron/training/checkpointing.py``).

Tensors have the names and global shapes that Megatron gave them: layers of one form are one tensor with a dimension for
the layers (``decoder.layers.mlp.linear_fc1.weight``). Optimizer states are ``optimizer.state.<state>.<parameter>``
(``megatron/core/dist_checkpointing/optimizer.py``, ``megatron/core/optimizer/distrib_optimizer.py``). No param group
lists its parameters: ``transform.weight_decay`` says which those are. Directories of Megatron FSDP are plain DCP, and
``dcp.megatron_fsdp`` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.beside import claim_named
from fsdpckpt.readers.dcp.megatron_fsdp import join_halves, join_states, plain, step_tensor
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import Claim, FileTable, Items, Part, ReadOptions, Tree
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

_CONFIG, _COMMON = "metadata.json", "common.pt"
_LATEST = "latest_checkpointed_iteration.txt"
_DCP = (".distcp", ".metadata")
_OWN = {_COMMON, ".metadata"}
_MAX_CONFIG_BYTES = 1 << 16
_MOST_LETTERS = 32
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_BUFFERS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_MASTERS = ("fp32_param", "param")  # the weights that the optimizer updates
_COMMON_OBJECT = "common_state/shard_0_1"
_NOT_SETTINGS = frozenset({"is_expert_parallel", "default_config", "params"})

_Dict = dict[Key, Value]


class MegatronReader:
    """Directories that ``megatron.core.dist_checkpointing.save`` wrote, or a run's directory with the last of them."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del file, sources
        return None

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """The checkpoint in ``path``, or the one that ``latest_checkpointed_iteration.txt`` names. Raises
        SourceUnsupportedError for the zarr format, SourceIncompleteError where no file says the format."""
        if _CONFIG in files or files.keys() >= _OWN:
            return _claim(path, files, options, sources)
        claim = partial(_claim, options=options, sources=sources)
        return claim_named(path, files.get(_LATEST), sources, claim, _directory_of)


def _claim(path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources) -> Claim:
    backend = _backend(files.get(_CONFIG), sources)
    if backend is None:
        if files.keys() >= _OWN:
            raise SourceIncompleteError(
                f"{path} has the files of a Megatron checkpoint, and no {_CONFIG} that says its format",
                file=f"{path.rstrip('/')}/{_CONFIG}",
                why="the save or the copy did not finish, or the file was damaged",
                next_step=f"copy {_CONFIG} again, or add --ignore-file {_COMMON} where that file is none of Megatron's",
            )
        return Claim()
    if backend != "torch_dist":
        raise SourceUnsupportedError(
            f"{path} is a Megatron checkpoint of the format {backend}, which fsdpckpt does not read",
            file=f"{path.rstrip('/')}/{_CONFIG}",
            expected="torch_dist",
            found=backend,
            why="Megatron-core gave that format up for torch_dist",
            next_step="load it with the Megatron-LM that wrote it, and save it with --ckpt-format torch_dist",
        )

    def read(table: FileTable, sources: Sources) -> Tree:
        return _read_torch_dist(path, files.get(_COMMON), table, sources, locate=options.locate)

    names = {name for name in files if name.endswith(_DCP) or name in (_CONFIG, _COMMON)}
    return Claim([Part(path, path.rstrip("/").rpartition("/")[2], read)], names)


def _backend(entry: Entry | None, sources: Sources) -> str | None:
    """The format that ``metadata.json`` names; None where it is another program's file."""
    if entry is None or entry.nbytes > _MAX_CONFIG_BYTES:
        return None
    try:
        document = json.loads(sources.open(entry.path).read(0, entry.nbytes))
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend[:_MOST_LETTERS] if isinstance(backend, str) and backend.isprintable() else None


def _directory_of(iteration: str) -> str | None:
    number = iteration.isascii() and iteration.isdecimal()
    return f"iter_{int(iteration):07d}" if number else "release" if iteration == "release" else None


def _read_torch_dist(
    path: str, common: Entry | None, files: FileTable, sources: Sources, *, locate: bool | Items
) -> Tree:
    """The model, the optimizer and the extras of the directory ``path``. ``common``: its ``common.pt``.

    The model section has the optimizer's weights where those are kept apart. Buffers that hold the states of many
    parameters stay as they are, beside an empty ``state``. Raises SourceIncompleteError without the values that all
    ranks share, SourceCorruptError for states of other shapes than their parameters', and what ``read_dcp`` raises.
    """
    from fsdpckpt.readers.dcp.read import read_dcp

    tree = read_dcp(path, files, sources, locate=locate)
    saved = _Saved(path, tree)
    shared = _shared(common, saved, files, sources)
    kept = [saved.buffers.pop(key) for key in list(saved.buffers) if _is_optimizer_object(key)]
    optimizers = list(_optimizers(shared.pop("optimizer", None)))
    if kept and isinstance(kept[0], list):
        optimizers += _optimizers(kept[0][0])
    names = saved.states
    for weights in names.values():
        weights.update({"step": step} if (step := _step(optimizers, files)) is not None else {})
    groups = [group for optimizer in optimizers for group in _groups(optimizer)]
    root: _Dict = {"model": saved.with_masters()}
    if names or saved.buffers or groups:
        states: _Dict = {name: cast(Value, entry) for name, entry in names.items()}
        root["optimizer"] = {"state": states, "param_groups": _listed(groups, list(map(str, names))), **saved.buffers}
    extras = {**saved.objects, **shared, **_scaler(optimizers)}
    root.update({key: plain(value) for key, value in extras.items() if key not in root})
    tree.world_size = saved.ranks
    tree.root, tree.flavor = root, "megatron"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is a torch_dist checkpoint of Megatron-core"))
    return tree


@dataclass(slots=True)
class _Saved:
    """The entries of the DCP directory at ``path``, by what they are. ``states``: by parameter, then by state;
    ``buffers``: the distributed optimizer's own; ``objects``: what is no tensor."""

    path: str
    tree: Tree
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
            elif value != [None]:  # modules without a state of their own save None for each layer
                self.objects[key] = value
        self.model, self.states = join_halves(self.model, self.path), join_states(self.states, self.path)

    @property
    def ranks(self) -> int:
        """How many ranks wrote tensors. Chunks say nothing: layers are chunks of one tensor."""
        leaves = [leaf for leaf in cast(_Dict, self.tree.root).values() if isinstance(leaf, Tensor)]
        return max((int(leaf.chunks.rank.max()) + 1 for leaf in leaves if len(leaf.chunks)), default=1)

    def with_masters(self) -> _Dict:
        """The model with the optimizer's weights, which are taken out of the states."""
        model, replaced = dict(self.model), set[str]()
        for name, states in self.states.items():
            masters = [states.pop(key) for key in _MASTERS if key in states]
            weight = self.model.get(name)
            for leaf in (*states.values(), *masters):
                if isinstance(leaf, Tensor) and isinstance(weight, Tensor) and leaf.shape not in ((), weight.shape):
                    raise SourceCorruptError(
                        f"{self.path}: a state of {name!s} does not have the shape of the parameter",
                        file=self.path,
                        key=str(name),
                        expected=f"shape {list(weight.shape)}",
                        found=f"shape {list(leaf.shape)}",
                        why="data of several saves lie together, or a version of Megatron-core that is not known "
                        "wrote it",
                        next_step="save it again, or report it with the version of Megatron-core",
                    )
            for master in masters:
                model[name] = master
                if isinstance(weight, Tensor) and isinstance(master, Tensor) and weight.dtype is not master.dtype:
                    replaced.add(weight.dtype.name)
        self.tree.notes += notes_on_copies(replaced)
        return model


def _shared(common: Entry | None, saved: _Saved, files: FileTable, sources: Sources) -> _Dict:
    """The values that all ranks share."""
    value: Value = None
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
    """The state dict of each optimizer: of one, or of several under their numbers (``ChainedOptimizer``)."""
    if not isinstance(value, dict):
        return
    if value and all(type(key) is int for key in value):
        for one in value.values():
            yield from _optimizers(one)
    else:
        inner = value.get("optimizer")
        yield {**value, **inner} if isinstance(inner, dict) else value


def _is_optimizer_object(key: Key) -> bool:
    """Whether this is what a group of data-parallel ranks keeps of its optimizer, beside the buffers."""
    return str(key).partition("/")[0].endswith(".optimizer")


def _groups(optimizer: Mapping[Key, Value]) -> list[_Dict]:
    groups = optimizer.get("param_groups")
    return [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _step(optimizers: Sequence[Mapping[Key, Value]], files: FileTable) -> Tensor | None:
    """The number of steps, which Megatron keeps once for all parameters, as torch's optimizers keep it for each."""
    for optimizer in optimizers:
        state = optimizer.get("state")
        common = state.get("common_step") if isinstance(state, dict) else None
        found = [common, *(group.get("step") for group in _groups(optimizer))]
        for step in found:
            tensor = step_tensor(step, files)
            if tensor is not None:
                return tensor
    return None


def _listed(groups: list[_Dict], names: list[str]) -> list[Value]:
    """``groups`` without the number of steps. Groups of equal settings are one, with all of the parameters; where their
    settings differ they stay without parameters."""
    settings = [{key: value for key, value in group.items() if key != "step"} for group in groups]
    compared = [{key: value for key, value in group.items() if key not in _NOT_SETTINGS} for group in settings]
    if settings and all(one == compared[0] for one in compared):
        return [{**settings[0], "params": list(names)}]
    return list(settings)


def _scaler(optimizers: Sequence[Mapping[Key, Value]]) -> _Dict:
    scaler = next((one["grad_scaler"] for one in optimizers if one.get("grad_scaler")), None)
    return {} if scaler is None else {"grad_scaler": scaler}
