"""Places the sharded tensors of a checkpoint on the target's device mesh.

The placements come from rules (``--placements``: globs of parameter names to placements), from another checkpoint
(``--like``), or from the source. Optimizer states in a parameter's shape are placed like the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import InternalError, NeedsInformationError, UsageError
from fsdpckpt.globs import matches
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.counters import is_counter
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.placements import MeshShape, Replicate, Sharding
from fsdpckpt.ir.state_shapes import shown_shapes
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.layouts import is_cut_unevenly, on_dimensions, on_mesh
from fsdpckpt.text import first_lines, plural, shape_text, some_of
from fsdpckpt.transform.meshes import containing_mesh, mesh_options, shard_dimension

_KEYS_IN_MESSAGE = 12


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """One line of a placements file: the ``sharding`` of parameters that match ``glob``; None if they are no DTensors
    and every rank holds them whole.
    """

    glob: str
    sharding: Sharding | None


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The lines of a placements ``file``; the first whose glob matches decides."""

    file: str
    entries: tuple[PlacementRule, ...]


@dataclass(frozen=True, slots=True)
class LikeCheckpoint:
    """The placements of each parameter in the checkpoint ``source``, by name; None: every rank holds it whole."""

    source: str
    shardings: Mapping[str, Sharding | None]


@dataclass(frozen=True, slots=True)
class SourcePlacements:
    """Each tensor keeps its placements. ``meshes``: the target mesh for each of the source's meshes of all ranks, with
    all of its dimensions or some of them.
    """

    meshes: Mapping[MeshShape, MeshShape]

    def sharding(self, sharding: Sharding) -> Sharding | None:
        """The same placements on the target mesh; None if they are along dimensions that it does not have."""
        whole = containing_mesh(sharding.mesh, self.meshes)
        if whole is None:
            meshes = " and ".join(map(str, self.meshes))
            raise InternalError(f"{sharding.mesh} is not part of any mesh of the source: {meshes}")
        return replaced_on(sharding, self.meshes[whole])


Placing: TypeAlias = PlacementRules | LikeCheckpoint | SourcePlacements


@dataclass(frozen=True, slots=True)
class TargetMesh:
    """The target's meshes, each of all ranks, and what places tensors on them.

    ``rest``: the sharding of tensors that ``placing`` does not cover; None makes them an error. ``note``: where the
    mesh comes from, unless the user gave it.
    """

    meshes: tuple[MeshShape, ...]
    placing: Placing | None
    rest: Sharding | None = None
    note: str | None = None

    def __str__(self) -> str:
        """In the form ``--mesh`` takes, if there is one mesh."""
        return " and ".join(map(str, self.meshes))

    @property
    def world_size(self) -> int:
        return self.meshes[0].world_size


def apply_placements(checkpoint: Checkpoint, named: Checkpoint, target: TargetMesh) -> Checkpoint:
    """Set the ``sharding`` of every sharded tensor on the mesh of ``target``.

    ``named``: the same tensors under the names that rules and other checkpoints use, the target's, with the optimizer
    keyed by name. Raises UsageError, with the keys, for rules that do not match them.
    """
    shardings: dict[Tensor, Sharding | None] = {}
    unproved: set[Tensor] = set()
    match target.placing:
        case None:
            pass
        case SourcePlacements() as source:
            for tensor in checkpoint.leaves():
                if tensor.sharding is not None:
                    shardings[tensor] = source.sharding(tensor.sharding)
            _place_new_states(checkpoint, shardings)
        case PlacementRules() as rules:
            shardings = _by_rules(named, rules)
            unproved = _undetermined(named, rules, shardings)
        case LikeCheckpoint() as other:
            shardings = _by_name(named, other)
    return _with_shardings(checkpoint, shardings, unproved)


def replaced_on(sharding: Sharding, mesh: MeshShape) -> Sharding | None:
    """The same placements on ``mesh``, which has the same dimensions, or more, or fewer, in other sizes. None if it has
    none of the tensor's.
    """
    kept = [dim for dim, name in enumerate(sharding.mesh.dimension_names) if name in mesh.dimension_names]
    if len(kept) < len(sharding.mesh.sizes):
        remaining = on_dimensions(sharding, kept)
        return None if remaining is None else replaced_on(remaining, mesh)
    if sharding.mesh.names == mesh.names:
        return on_mesh(sharding, mesh)
    placements = dict(zip(sharding.mesh.names or (), sharding.placements, strict=False))
    sizes = dict(zip(sharding.mesh.names or (), sharding.mesh.sizes, strict=False))
    names = mesh.names or ()
    before = replace(mesh, sizes=tuple(sizes.get(name, 1) for name in names))
    placed = replace(sharding, mesh=before, placements=tuple(placements.get(name) for name in names))
    there = [names.index(name) for name in sharding.mesh.names or ()]
    if sharding.order is not None:
        placed = replace(placed, order=tuple(there[dim] for dim in sharding.order))
    if sharding.fsdp is not None:
        placed = replace(placed, fsdp=there[sharding.fsdp])
    return on_mesh(placed, mesh)


def _place_new_states(checkpoint: Checkpoint, shardings: dict[Tensor, Sharding | None]) -> None:
    """Place the states that ``--missing-state zeros`` added like others of their parameter and shape."""
    for param, states in checkpoint.states.items():
        parameter = checkpoint.params.get(str(param))
        leaves = [leaf for leaf in (*states.values(), parameter) if isinstance(leaf, Tensor)]
        by_shape = {leaf.shape: shardings[leaf] for leaf in leaves if leaf in shardings}
        for leaf in leaves:
            if leaf.shape in by_shape and leaf.sharded is not False:
                shardings.setdefault(leaf, by_shape[leaf.shape])


def _by_rules(named: Checkpoint, rules: PlacementRules) -> dict[Tensor, Sharding | None]:
    decisive: dict[str, PlacementRule | None] = {}  # the first rule that matches, by parameter
    shardings: dict[Tensor, Sharding | None] = {}
    for name, leaf in _parameters(named):
        if name not in decisive:
            decisive[name] = next((rule for rule in rules.entries if matches(name, rule.glob)), None)
        rule = decisive[name]
        if rule is not None:
            _require_dimensions(rule.sharding, leaf, f"{rules.file}: {rule.glob}")
            shardings[leaf.tensor] = rule.sharding
    used = {rule.glob for rule in decisive.values() if rule is not None}
    whole = _whole_tensors(named)
    for rule in rules.entries:
        confirms_whole = rule.sharding is None and any(matches(name, rule.glob) for name in whole)
        if rule.glob not in used and not confirms_whole:
            raise _unused_rule_error(rules, rule.glob, list(decisive), whole)
    unmatched = [name for name, rule in decisive.items() if rule is None]
    _require_matched(unmatched, f"{rules.file} says nothing of", '"*": {...} as its last entry')
    return shardings


def _undetermined(named: Checkpoint, rules: PlacementRules, shardings: Mapping[Tensor, Sharding | None]) -> set[Tensor]:
    """The tensors that a glob cuts although nothing shows that they are parameters."""
    globs = {rule.glob for rule in rules.entries}  # a rule may also be the name of one parameter
    listed = set(named.optim.all_keys()) if named.optim is not None else set()
    params = named.params
    return {
        leaf
        for name, leaf in params.items()
        if isinstance(leaf, Tensor) and leaf.sharded is None and shardings.get(leaf) is not None
        if name not in listed and name not in globs
    }


def _whole_tensors(named: Checkpoint) -> dict[str, Tensor]:
    """The tensors of the model that every rank holds whole, whatever a placements file says."""
    params = named.params
    return {name: p for name, p in params.items() if isinstance(p, Tensor) and (not p.shape or p.sharded is False)}


def _by_name(named: Checkpoint, other: LikeCheckpoint) -> dict[Tensor, Sharding | None]:
    by_name = {clean(name): sharding for name, sharding in other.shardings.items()}
    shardings: dict[Tensor, Sharding | None] = {}
    unmatched: dict[str, None] = {}
    # A DCP directory has parameters in one chunk that FSDP cut over one rank: only the other checkpoint says so.
    cut = {name for name, sharding in by_name.items() if sharding is not None}
    for name, leaf in _parameters(named, cut):
        if name in by_name:
            _require_dimensions(by_name[name], leaf, other.source)
            shardings[leaf.tensor] = by_name[name]
        else:
            unmatched[name] = None
    _require_matched(list(unmatched), f"{other.source} does not have", f"{flags.placements('FILE')} instead")
    return shardings


def _parameters(named: Checkpoint, cut: Collection[str] = ()) -> Iterator[tuple[str, NamedTensor]]:
    """The tensors to place, with the name of their parameter: in the model all that may be sharded, in the optimizer
    the states in their parameter's shape, in the extras those that the source has sharded.

    ``cut``: parameters that are placed even if the source shows them whole. Raises UsageError for a sharded state in a
    different shape than its parameter.
    """
    params = named.params
    param_shapes: dict[str, tuple[int, ...] | None] = {
        name: param.shape for name, param in params.items() if isinstance(param, Tensor)
    }
    shown_by: dict[Tensor, tuple[int, ...]] = {}  # by state: the shape that it shows for its parameter
    for key, states in named.states.items():
        shapes = {shown.tensor: shown.shape for shown in shown_shapes(states)}
        shown_by.update(shapes)
        distinct = set(shapes.values())
        param_shapes.setdefault(str(key), distinct.pop() if len(distinct) == 1 else None)
    for leaf in named.tensors():
        tensor = leaf.tensor
        if not tensor.shape or (tensor.sharded is False and leaf.param not in cut):
            continue
        if leaf.state is not None and is_counter(leaf.state, tensor):
            continue
        if leaf.section is not Section.OPTIM or leaf.state is None:
            if (leaf.section is Section.MODEL and leaf.state is None) or tensor.sharded:
                yield leaf.key, leaf
        elif shown_by.get(tensor, tensor.shape) == param_shapes[leaf.param]:
            yield leaf.param, leaf
        elif tensor.sharded:
            raise UsageError(
                f"{leaf.key} has the shape {shape_text(tensor.shape)}, a different one than its parameter, and nothing "
                "says how to cut it",
                key=leaf.key,
                next_step=f"drop {flags.placements} and {flags.like}, which keeps the source's placements",
            )


def _require_dimensions(sharding: Sharding | None, leaf: NamedTensor, where: str) -> None:
    """Raises UsageError for a cut along a dimension that the tensor does not have."""
    for placement in sharding.placements if sharding is not None else ():
        if placement is not None and not isinstance(placement, Replicate) and placement.dim >= leaf.tensor.ndim:
            raise UsageError(
                f"{where} cuts {leaf.key} along dimension {placement.dim}, which its shape "
                f"{shape_text(leaf.tensor.shape)} does not have",
                key=leaf.key,
                expected=f"Shard(0) to Shard({leaf.tensor.ndim - 1})" if leaf.tensor.ndim > 1 else "Shard(0)",
                found=f"Shard({placement.dim})",
                next_step="write an entry for it before this one",
            )


def _require_matched(names: list[str], what: str, instead: str) -> None:
    if names:
        raise UsageError(
            f"{what} {plural(len(names), 'parameter')}",
            details=first_lines(names, _KEYS_IN_MESSAGE),
            key=names[0],
            why="how a tensor is cut is never guessed",
            next_step=f"add the names, or {instead}",
        )


def _unused_rule_error(
    rules: PlacementRules, glob: str, names: Sequence[str], whole: Mapping[str, Tensor]
) -> UsageError:
    name = next((name for name in whole if matches(name, glob)), None)
    if name is not None:
        no_dimension = "it has no dimension to cut"
        return UsageError(
            f"{rules.file}: {glob} places {name}, which every rank holds whole",
            why=f"the source, {flags.buffers} or {flags.reference} say so" if whole[name].shape else no_dimension,
            key=name,
            next_step="write null for it, or remove the entry",
        )
    if any(matches(name, glob) for name in names):
        why = "entries before it match all of its parameters, and the first match decides"
        return UsageError(
            f"{rules.file}: {glob} has no effect", why=why, key=glob, next_step="move it up, or remove it"
        )
    similar = get_close_matches(glob.strip("*."), names, n=3, cutoff=0.5)
    return UsageError(
        f"{rules.file}: {glob} matches no parameter",
        details=[f"{name} exists" for name in similar],
        key=glob,
        next_step="correct it, or remove it",
    )


def place_remaining(checkpoint: Checkpoint, target: TargetMesh) -> Checkpoint:
    """Place the sharded tensors that have no sharding yet with ``target.rest``.

    Raises NeedsInformationError, with their keys, if it is None.
    """
    remaining = [
        leaf for leaf in checkpoint.tensors() if leaf.tensor.sharded and leaf.tensor.shape and not leaf.tensor.sharding
    ]
    rest = target.rest
    placements = rest.placements if rest is not None else ()
    cuts = [placement.dim for placement in placements if not isinstance(placement, Replicate | None)]
    unplaced = [leaf.key for leaf in remaining if rest is None or max(cuts, default=0) >= leaf.tensor.ndim]
    if unplaced:
        raise NeedsInformationError(
            f"cannot tell how to place {plural(len(unplaced), 'sharded tensor')} of {checkpoint.source} on the mesh "
            f"{target}",
            details=unplaced[:_KEYS_IN_MESSAGE],
            key=unplaced[0],
            why="in the source they are not DTensors, or are packed (a _StridedShard alone), or are on a mesh whose "
            "dimensions have a different order; or a map has made them",
            next_step=f"add {mesh_options(target.meshes)} {flags.placements('FILE')}",
        )
    if not remaining:
        return checkpoint
    shardings = {tensor: tensor.sharding for tensor in checkpoint.leaves() if tensor.sharding is not None}
    return _with_shardings(checkpoint, {**shardings, **dict.fromkeys([leaf.tensor for leaf in remaining], rest)})


def warn_of_uneven_cuts(checkpoint: Checkpoint) -> Checkpoint:
    """Add a warning if ``fully_shard`` does not cut as ``checkpoint`` is placed: no model of it has such shards."""
    by_mesh: dict[MeshShape, dict[str, tuple[Tensor, Sharding]]] = {}
    for name, leaf in checkpoint.params.items():
        if isinstance(leaf, Tensor) and leaf.sharding is not None:
            by_mesh.setdefault(leaf.sharding.mesh, {})[name] = leaf, leaf.sharding
    uneven: list[str] = []
    for mesh, placed in by_mesh.items():
        dim = shard_dimension(mesh, [sharding for _, sharding in placed.values()], cuts_all=True)
        for name, (tensor, sharding) in placed.items() if dim is not None else ():
            if dim is not None and is_cut_unevenly(tensor.shape, sharding, dim):
                ranks = f"{mesh.sizes[dim]} ranks of {mesh.dimension_names[dim]}"
                uneven.append(f"{name} {shape_text(tensor.shape)}, {sharding}, over {ranks}")
    if not uneven:
        return checkpoint
    message = (
        "FSDP2 refuses such a mesh: fully_shard cuts other dimensions than the first evenly only, and "
        f"{plural(len(uneven), 'parameter', 'do')} not divide: {some_of(uneven, 2)}"
    )
    return checkpoint.lacks(message)


def _with_shardings(
    checkpoint: Checkpoint, shardings: Mapping[Tensor, Sharding | None], unproved: Collection[Tensor] = ()
) -> Checkpoint:
    def change(tensor: Tensor) -> Tensor:
        if tensor not in shardings:
            return replace(tensor, sharding=None) if tensor.sharding is not None else tensor
        sharding = shardings[tensor]
        unproved_here = tensor.undetermined or tensor in unproved
        return replace(tensor, sharding=sharding, sharded=sharding is not None, undetermined=unproved_here)

    return checkpoint.map_tensors(change)
