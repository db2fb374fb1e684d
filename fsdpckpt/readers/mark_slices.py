"""Decide, once the model is known, whether an optimizer that was read holds slices of flat parameters."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpckpt.ir.checkpoint import (
    BARE_VALUE,
    Container,
    Evidence,
    EvidenceKind,
    Layout,
    ModelState,
    OptimState,
    Problem,
    Section,
)
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.flat_slices import flat_parameter_keys, is_optimizer, mappings, read_as_slices, why_sliced
from fsdpckpt.readers.protocol import Tree
from fsdpckpt.readers.sections import Sections
from fsdpckpt.readers.torch_ranks.merge import equal
from fsdpckpt.text import truncate


def mark_slices(tree: Tree, sections: Sections, model: ModelState | None, label: str) -> None:
    """Mark the optimizer of one part as slices in ``tree`` and ``sections`` when it holds slices of flat parameters.

    ``model``: the checkpoint's, from whichever part; ``label`` names the part in messages.
    """
    if tree.container is not Container.TORCH:
        return
    optim = sections.optim
    reason = why_sliced(optim.state, model, tree.checksums) if optim is not None else None
    if optim is not None and reason is not None:
        sections.optim = read_as_slices(optim)
        tree.layout = Layout.FLATTENED
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, f"{reason}: slices of flat parameters"))
        states = (*(sections.optim_path or ()), "state")
        _drop_missing_keys(tree, states)
        _take_values_of_holders(tree, sections.optim, states)
    if tree.world_size > 1:
        tree.problems.extend(_flattened_extras(tree, sections, label))
    if optim is not None and optim.key_type == "id":
        tree.problems.extend(_orders_that_differ(tree, (*(sections.optim_path or ()), "param_groups"), label))


def _orders_that_differ(tree: Tree, groups: tuple[Key, ...], label: str) -> Iterator[Problem]:
    """A fatal problem for the first param group whose ``param_names`` or ``params`` are not the same on every rank.

    Each rank's optimizer counts ids in its own order, so one id would be different parameters on different ranks.
    """
    depth = len(groups) + 1
    differing = [
        path
        for path in tree.rank_values
        if path[: depth - 1] == groups and len(path) > depth and path[depth] in ("param_names", "params")
    ]
    for number, path in enumerate(differing):
        values = tree.rank_values.pop(path)
        if not number:
            rank = next((rank for rank, value in enumerate(values) if not equal(value, values[0])), 0)
            key = ".".join(map(str, path))
            yield Problem(
                "parameter-order",
                f"{key} is {truncate(values[0])} on rank 0 and {truncate(values[rank])} on rank {rank}: the ranks' "
                "optimizers list their parameters in different orders, so one id is a different parameter on each of "
                "them. Save it with FSDP.optim_state_dict, or make the optimizer with the same order on every rank",
                file=label,
                key=key,
                rank=rank,
                section=Section.OPTIM,
            )


def _drop_missing_keys(tree: Tree, states: tuple[Key, ...]) -> None:
    """Drop problems of missing keys: with use_orig_params=True a rank has no entry of a parameter it has no part of."""
    prefix = ".".join(map(str, (*states, "")))
    absent = [one for one in tree.problems if one.kind == "missing-key" and (one.key or "").startswith(prefix)]
    tree.problems = [problem for problem in tree.problems if problem not in absent]


def _take_values_of_holders(tree: Tree, optim: OptimState, states: tuple[Key, ...]) -> None:
    """Values that differ only on ranks without elements of their parameter are those of the ranks that have some.

    The rule is that of ``_convert_all_state_info``: optimizers that make their states at once (Adagrad) have a step on
    the other ranks too, and never count it.
    """
    depth = len(states)
    for path, values in list(tree.rank_values.items()):
        if path[:depth] != states or len(path) != depth + 2:
            continue
        key, name = path[depth:]
        entry = optim.state.get(key) if isinstance(key, (int, str)) else None
        if entry is None or not isinstance(name, str) or name not in entry:
            continue
        held_values = [values[rank] for rank in _holders(entry) if rank < len(values)]
        if held_values and all(equal(value, held_values[0]) for value in held_values):
            entry[name] = held_values[0]
            del tree.rank_values[path]


def _holders(entry: dict[str, Tensor | Value]) -> list[int]:
    """The ranks that hold elements of a parameter's slices."""
    sliced = [leaf for leaf in entry.values() if isinstance(leaf, Tensor) and leaf.placement == SLICES]
    return sorted({int(rank) for leaf in sliced for rank in leaf.chunks.rank[leaf.chunks.size[:, 0] > 0]})


def _flattened_extras(tree: Tree, sections: Sections, label: str) -> Iterator[Problem]:
    """Fatal problems of flat parameters and their optimizers that are no section: nothing can name what is in them."""
    for path, mapping in mappings(tree.root):
        if sections.owns((*path, next(iter(mapping), ""))):
            continue
        state = mapping.get("state")
        reason = None
        if is_optimizer(mapping) and isinstance(state, dict):
            entries = {key: _entry(entry) for key, entry in state.items() if isinstance(key, (int, str))}
            reason = why_sliced(entries, None, tree.checksums)
        elif keys := flat_parameter_keys(dict.fromkeys(mapping)):
            reason = f"it has keys of flat parameters ({keys[0]})"
        if reason is not None:
            key = ".".join(map(str, path)) or "the whole file"
            yield Problem(
                "flattened",
                f"{key} is in FSDP1's flattened shards ({reason}), and only one model and one optimizer can be given "
                "their names: save it on its own, or convert the sections alone (--only)",
                file=label,
                key=key,
                section=Section.EXTRA,
            )


def _entry(entry: Value) -> dict[str, Tensor | Value]:
    if not isinstance(entry, dict):
        return {BARE_VALUE: entry}
    return {str(name): leaf for name, leaf in entry.items()}
