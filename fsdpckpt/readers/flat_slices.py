"""Recognises the shards of FSDP1's flat parameters: one-dimensional slices that look like tensors and are not.

Their shapes do not show the parameters. Two forms exist (``torch/distributed/fsdp/_state_dict_utils.py``,
``_optim_utils.py``): ``LOCAL_STATE_DICT`` files with keys ``<unit>._flat_param``, and the optimizer's own state dict on
each rank, whose states are one slice for each unit or parameter. The slices of one tensor become one tensor of
cut ``Slices``: the ranks' slices one after the other. ``convert_slices`` decides, once the model is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fsdpckpt import flags
from fsdpckpt.ir.checkpoint import Container, Evidence, EvidenceKind, Layout, ModelState, Problem, Section
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import Slices, Whole
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.readers.optimizer_forms import containers, is_optimizer
from fsdpckpt.readers.protocol import KeyPath, PartContents, dotted
from fsdpckpt.readers.sections import Sections
from fsdpckpt.text import some_of, truncate

_MAX_SIZES = 6  # in a message


def flat_parameter_keys(root: object) -> list[str]:
    """The keys in ``root``, in models and in optimizers, that name a flat parameter."""
    flat_keys: dict[str, None] = {}
    for _, mapping in containers(root):
        inner = mapping.get("state")
        for keys in (mapping, inner if is_optimizer(mapping) and isinstance(inner, dict) else {}):
            flat_keys.update({key: None for key in keys if isinstance(key, str) and is_flat_key(key)})
    return list(flat_keys)


def why_sliced(
    state: Mapping[ParamKey, Mapping[str, Tensor | Value]], model: ModelState | None, tree: PartContents
) -> str | None:
    """Why the states of ``state``, which are in ``tree``, are the ranks' slices of flat parameters; None if they are
    whole on every rank.

    States that differ in length between ranks, or are missing on some, prove it; so do keys of flat parameters. Equal
    shapes on all ranks are slices if all states are vectors and the model, if there is one, has tensors of other
    shapes. If shapes leave it open, bytes distinguish replicas from slices.
    """
    leaves = [leaf for entry in state.values() for leaf in entry.values() if isinstance(leaf, Tensor) and leaf.ndim]
    proved = [leaf for leaf in leaves if isinstance(leaf.cut, Slices)]
    if proved:
        return f"{len(proved)} optimizer states have a different number of elements on each rank"
    vectors = [leaf for leaf in leaves if leaf.ndim == 1 and isinstance(leaf.cut, Whole)]
    if vectors and any(is_flat_key(key) for key in state):
        return "the optimizer's keys are those of flat parameters"
    # With one rank a slice looks like the whole tensor: only units can tell.
    if max((len(leaf.chunks) for leaf in vectors), default=0) < 2:
        return None
    return _why_not_replicas(vectors, _whole_shapes(model), tree, alone=len(vectors) == len(leaves))


def _why_not_replicas(
    vectors: Sequence[Tensor], model_shapes: set[tuple[int, ...]], tree: PartContents, *, alone: bool
) -> str | None:
    """Why vectors of one length on all ranks are slices. ``alone``: the optimizer has no state with more
    dimensions.
    """
    fit = all(leaf.shape in model_shapes for leaf in vectors)
    if alone and not fit:
        sizes = sorted({leaf.shape[0] for leaf in vectors})
        text = some_of(sizes, _MAX_SIZES)
        return f"all optimizer states are plain one-dimensional tensors (of {text} elements), one on each rank"
    open_case = max(map(len, model_shapes), default=0) > 1 if alone else not fit
    if open_case and _replicas_differ(vectors, tree):
        return "one-dimensional optimizer states of equal length have different bytes on each rank"
    return None


def _whole_shapes(model: ModelState | None) -> set[tuple[int, ...]]:
    """The shapes of all tensors of the model that are not flat parameters."""
    params = model.params if model is not None else {}
    return {
        leaf.shape
        for key, leaf in params.items()
        if isinstance(leaf, Tensor) and not isinstance(leaf.cut, Slices) and not is_flat_key(key)
    }


def _replicas_differ(tensors: Sequence[Tensor], tree: PartContents) -> bool:
    """Whether some tensor's chunks are not copies of each other, by their CRC-32s, or by their bytes where a chunk has
    none.
    """
    records = tree.checksums.by_offset()
    crcs = [crcs_of_chunks(tensor, records) for tensor in tensors]
    if any(len(known - {None}) > 1 for known in crcs):
        return True
    return any(None in known and tree.differs(tensor) for tensor, known in zip(tensors, crcs, strict=True))


def crcs_of_chunks(tensor: Tensor, records: Mapping[tuple[int, int], tuple[int, int]]) -> set[int | None]:
    """The CRC-32s of the chunks of ``tensor``, which are all whole; None for a chunk that is not exactly one record.

    ``records``: from ``Checksums.by_offset``.
    """
    places = zip(tensor.chunks.file.tolist(), tensor.chunks.offset.tolist(), strict=True)
    recorded = [records.get(place, (-1, 0)) for place in places]
    return {crc if nbytes == tensor.nbytes else None for nbytes, crc in recorded}


def read_as_slices(optim: Optimizer) -> Optimizer:
    """``optim`` with its vectors read as slices, and its parameters in the order of the groups.

    A 0-dim state is that of the ranks that hold elements of the parameter (``_convert_all_state_info``).
    """
    state = {key: _entry_as_slices(entry) for key, entry in optim.state.items()}
    listed = optim.grouped_keys()
    order = dict.fromkeys(key for key in (*listed, *state) if key in state)
    return optim.with_state({key: state[key] for key in order})


def _entry_as_slices(entry: Mapping[str, Tensor | Value]) -> dict[str, Tensor | Value]:
    leaves = {name: as_slices(leaf) if isinstance(leaf, Tensor) else leaf for name, leaf in entry.items()}
    chunks = [leaf.chunks for leaf in leaves.values() if isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices)]
    holders = [of_state.rank[of_state.size[:, 0] > 0] for of_state in chunks]
    if sum(map(len, holders)) == sum(map(len, chunks)):
        return leaves
    return {name: _of_ranks(leaf, np.concatenate(holders)) for name, leaf in leaves.items()}


def _of_ranks(leaf: Tensor | Value, ranks: Int64Array) -> Tensor | Value:
    """A 0-dim tensor's replicas on ``ranks``; any other value, and one that none of them has, unchanged."""
    if not isinstance(leaf, Tensor) or leaf.ndim:
        return leaf
    on_ranks = np.isin(leaf.chunks.rank, ranks)
    return replace(leaf, chunks=leaf.chunks.take(on_ranks)) if on_ranks.any() else leaf


def as_slices(tensor: Tensor) -> Tensor:
    """Turn a vector that every rank has into one slice for each rank; return any other tensor unchanged."""
    if tensor.ndim != 1 or not isinstance(tensor.cut, Whole):
        return tensor
    size = tensor.chunks.size
    start = np.cumsum(size, axis=0, dtype=np.int64) - size
    chunks = tensor.chunks.with_boxes(start=start)
    return Tensor(tensor.dtype, (int(size.sum()),), chunks, sharded=True, cut=Slices())


def convert_slices(
    tree: PartContents, sections: Sections, model: ModelState | None, label: str, *, possible: bool = True
) -> None:
    """Convert the optimizers of one part to slices, in ``tree`` and ``sections``, where they hold slices of flat
    parameters.

    ``model``: the checkpoint's, from whichever part; ``label``: the part's name in messages. ``possible``: False if it
    is known that it holds none.
    """
    if tree.container is not Container.TORCH:
        return
    if sections.optim is not None:
        sections.optim = _converted(tree, sections.optim, sections.optim_path or (), model, label, possible=possible)
    for number, named in enumerate(sections.named):
        if isinstance(named.content, Optimizer):
            content = _converted(tree, named.content, named.path, model, label, possible=possible)
            sections.named[number] = replace(named, content=content)
    if tree.world_size > 1:
        tree.problems.extend(_flattened_extras(tree, sections, label))


def _converted(
    tree: PartContents, optim: Optimizer, path: KeyPath, model: ModelState | None, label: str, *, possible: bool
) -> Optimizer:
    """The optimizer at ``path``, as slices if it holds any; what its values by rank mean is settled in ``tree``."""
    reason = why_sliced(optim.state, model, tree) if possible else None
    if reason is not None:
        optim = read_as_slices(optim)
        tree.layout = Layout.FLATTENED
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, f"{reason}: slices of flat parameters"))
        states = (*path, "state")
        _drop_missing_keys(tree, states)
        _prefer_values_of_holders(tree, optim, states)
    else:
        tree.problems.extend(_unlike_copies(tree, optim, label))
    if optim.key_type == "id":
        problem = _take_differing_orders(tree, (*path, "param_groups"), label)
        tree.problems += [problem] if problem is not None else []
    return optim


def _unlike_copies(tree: PartContents, optim: Optimizer, label: str) -> Iterator[Problem]:
    """Fatal problems of whole vectors without checksums whose bytes differ between ranks: they may be slices that have
    the length of a vector of the model.
    """
    records = tree.checksums.by_offset()
    for key, entry in optim.state.items():
        for name, leaf in entry.items():
            if (
                not isinstance(leaf, Tensor)
                or leaf.ndim != 1
                or not isinstance(leaf.cut, Whole)
                or len(leaf.chunks) < 2
            ):
                continue
            if None in crcs_of_chunks(leaf, records) and tree.differs(leaf):
                message = f"optim {key}.{name}: the copies of the ranks differ, and they are replicas"
                yield Problem("replica", message, file=label, key=f"{key}.{name}", section=Section.OPTIM)


def _take_differing_orders(tree: PartContents, groups: KeyPath, label: str) -> Problem | None:
    """Remove from ``tree.rank_values`` the ``param_names`` and ``params`` of param groups. Returns a fatal problem for
    the first of them.

    Each rank's optimizer numbers ids in its own order, so one id would be different parameters on different ranks.
    """
    depth = len(groups)
    orders = {
        path: tree.rank_values.pop(path)
        for path in list(tree.rank_values)
        if path[:depth] == groups and path[depth + 1 : depth + 2] in (("param_names",), ("params",))
    }
    if not orders:
        return None
    path, values = next(iter(orders.items()))
    key = dotted(path)
    rank = next((rank for rank, value in enumerate(values) if not equal(value, values[0])), 0)
    message = (
        f"{key} is {truncate(values[0])} on rank 0 and {truncate(values[rank])} on rank {rank}: the ranks' optimizers "
        "list their parameters in different orders, so one id is a different parameter on each of them. Save it with "
        "FSDP.optim_state_dict, or make the optimizer with the same order on every rank"
    )
    return Problem("parameter-order", message, file=label, key=key, rank=rank, section=Section.OPTIM)


def _drop_missing_keys(tree: PartContents, states: KeyPath) -> None:
    """No key below ``states`` is missing: with use_orig_params=True a rank has no entry for a parameter it holds
    no part of.
    """
    tree.missing = {
        path: problem for path, problem in tree.missing.items() if path[: len(states)] != states or path == states
    }


def _prefer_values_of_holders(tree: PartContents, optim: Optimizer, states: KeyPath) -> None:
    """If values differ only on ranks without elements of their parameter, take those of the ranks that have some.

    The rule is that of ``_convert_all_state_info``: optimizers that make their states at once (Adagrad) have a step on
    the other ranks too, and never advance it.
    """
    depth = len(states)
    for path, values in list(tree.rank_values.items()):
        if path[:depth] != states or len(path) != depth + 2:
            continue
        key, name = path[depth:]
        entry = optim.state.get(key) if isinstance(key, (int, str)) else None
        if entry is None or not isinstance(name, str) or name not in entry:
            continue
        values_of_holders = [values[rank] for rank in _holding_ranks(entry) if rank < len(values)]
        if values_of_holders and all(equal(value, values_of_holders[0]) for value in values_of_holders):
            entry[name] = values_of_holders[0]
            del tree.rank_values[path]


def _holding_ranks(entry: dict[str, Tensor | Value]) -> list[int]:
    """The ranks that hold elements of a parameter's slices."""
    sliced = [leaf for leaf in entry.values() if isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices)]
    return sorted({int(rank) for leaf in sliced for rank in leaf.chunks.rank[leaf.chunks.size[:, 0] > 0]})


def _flattened_extras(tree: PartContents, sections: Sections, label: str) -> Iterator[Problem]:
    """Fatal problems of flat parameters and their optimizers outside the sections: nothing can name their content."""
    for path, mapping in containers(tree.root):
        if sections.owns((*path, next(iter(mapping), ""))):
            continue
        state = mapping.get("state")
        reason = None
        if is_optimizer(mapping) and isinstance(state, dict):
            reason = why_sliced(dict(_states_in(state)), None, tree)
        elif keys := flat_parameter_keys(dict.fromkeys(mapping)):
            reason = f"it has keys of flat parameters ({keys[0]})"
        if reason is not None:
            key = ".".join(map(str, path)) or "the whole file"
            yield Problem(
                "flattened",
                f"{key} is in FSDP1's flattened shards ({reason}), and only one model and one optimizer can be given "
                f"their names: save it separately, or convert the sections alone ({flags.only})",
                file=label,
                key=key,
                section=Section.EXTRA,
            )


def _states_in(state: Mapping[Key, Value]) -> Iterator[tuple[ParamKey, dict[str, Tensor | Value]]]:
    for key, entry in state.items():
        if isinstance(key, (int, str)) and isinstance(entry, dict):
            yield key, {str(name): leaf for name, leaf in entry.items()}
