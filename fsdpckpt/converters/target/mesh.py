"""Chooses the device mesh of a sharded target: ``--mesh``, ``--placements``, ``--like``, else the source's mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.mesh_options import EXAMPLE_MESH, parse_meshes, parse_placements
from fsdpckpt.errors import NeedsInformationError, UsageError, of_option
from fsdpckpt.ir import Container, Layout, Strategy
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.placements import MeshShape, Replicate, Shard, Sharded, Sharding, StridedShard, placements_text
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.layouts import on_dimensions, row_sharding
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.producers import PLAIN_MESH, MeshForm
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.meshes import (
    containing_mesh,
    find_resized,
    mesh_options,
    resized,
    shard_dimension,
    source_meshes,
)
from fsdpckpt.transform.placements import LikeCheckpoint, SourcePlacements, TargetMesh, replaced_on


def check_mesh(options: ConvertOptions) -> tuple[MeshShape, ...]:
    """Parse ``--mesh``, () without it. Opens nothing. Raises UsageError if the options contradict each other."""
    meshes = parse_meshes(options.mesh)
    if meshes and options.world_size not in (None, meshes[0].world_size):
        product = " x ".join(map(str, meshes[0].sizes)) + " = " if len(meshes[0].sizes) > 1 else ""
        raise UsageError(
            f"{flags.mesh(meshes[0])} has {product}{plural(meshes[0].world_size, 'rank')}, and {flags.world_size} says "
            f"{options.world_size}",
            expected=str(meshes[0].world_size),
            found=str(options.world_size),
            next_step=f"drop {flags.world_size}, or change a size of {flags.mesh}",
        )
    if options.placements is not None and options.like is not None:
        raise UsageError(
            f"{flags.placements} and {flags.like} both say how tensors are cut", next_step="drop one of them"
        )
    if options.placements is not None and not meshes:
        raise UsageError(
            f"{flags.placements} says how tensors are placed on a mesh, but there is no {flags.mesh}",
            next_step=f"add {flags.mesh('NAME=SIZE,...')}, for example {EXAMPLE_MESH}",
        )
    return meshes


SourceMeshes: TypeAlias = "dict[MeshShape, list[Sharding]]"
"""The meshes of a checkpoint's DTensors, and the distinct shardings on each."""


def meshes_of(checkpoint: Checkpoint) -> SourceMeshes:
    """The meshes of ``checkpoint``, in the order of its tensors. The shardings on a submesh of another mesh are on that
    one.
    """
    meshes: SourceMeshes = {mesh: [] for mesh in source_meshes(checkpoint)}
    for sharding in dict.fromkeys(tensor.sharding for tensor in checkpoint.leaves()):
        mesh = containing_mesh(sharding.mesh, meshes) if sharding is not None else None
        on_whole = replaced_on(sharding, mesh) if sharding is not None and mesh is not None else None
        if on_whole is not None and mesh is not None:
            meshes[mesh].append(on_whole)
    return meshes


def requested_mesh(
    options: ConvertOptions, source: Checkpoint, meshes_of_source: SourceMeshes, sources: Sources
) -> TargetMesh | None:
    """The meshes from ``--mesh``, ``--placements`` and ``--like``; None without any of them.

    Raises what ``check_mesh`` raises, UsageError for placements or another checkpoint that do not match the mesh,
    NeedsInformationError if the placement of some tensors is not known.
    """
    meshes = check_mesh(options)
    if meshes and options.placements is not None:
        return TargetMesh(meshes, parse_placements(options.placements, meshes, sources))
    if options.like is not None:
        return _like_checkpoint(options.like, options, meshes, sources)
    if not meshes:
        return None
    flat = (options.to or source.layout) is Layout.FLATTENED
    pairs = _by_dimensions(meshes_of_source, meshes) if _cover_all_ranks(meshes_of_source, source) else None
    if pairs is not None:
        known = {} if _reason_without_mesh(source, meshes_of_source) else meshes_of_source
        return _as_source(pairs, known, None if flat else _note_on_dropped(source, pairs))
    hybrid = options.tensor is TensorForm.SHARDED_TENSOR or _has_hybrid(options.flavor or source.flavor)
    dimensions = len(meshes[0].sizes)
    known_placements = flat or _cuts_rows(meshes[0], meshes_of_source) or (hybrid and dimensions == 2)
    if len(meshes) == 1 and known_placements:
        return TargetMesh(meshes, None, _fsdp_default(meshes[0]))
    raise _placements_needed_error(meshes, source, meshes_of_source)


def _cuts_rows(mesh: MeshShape, meshes_of_source: SourceMeshes) -> bool:
    """Whether ``mesh`` has one dimension, which FSDP cuts rows over: in the source, too, if that has it."""
    if len(mesh.sizes) != 1:
        return False
    for before, shardings in meshes_of_source.items():
        if mesh.names is not None and before.names is not None and mesh.names[0] in before.names:
            dim = before.names.index(mesh.names[0])
            kept = [on_dimensions(sharding, [dim]) for sharding in shardings]
            rows = all(each is not None and each.placements == (Shard(0),) for each in kept)
            if dim != shard_dimension(before, shardings) or not rows:
                return False
    return True


def _note_on_dropped(source: Checkpoint, pairs: Mapping[MeshShape, MeshShape]) -> str | None:
    """What becomes of tensors if some dimensions of the source's meshes are not in their targets."""
    dropped: dict[str, None] = {}
    for mesh, target in pairs.items():
        dropped.update(dict.fromkeys(name for name in mesh.dimension_names if name not in target.dimension_names))
    if not dropped:
        return None
    kept = SourcePlacements(pairs)
    tensors = source.model.params.values() if source.model is not None else source.leaves()
    shardings = [each.sharding for each in tensors if isinstance(each, Tensor) and each.sharding is not None]
    whole = sum(kept.sharding(sharding) is None for sharding in shardings)
    names, targets = " and ".join(dropped), " and ".join(map(str, dict.fromkeys(pairs.values())))
    what, verb = ("dimensions", "are") if len(dropped) > 1 else ("dimension", "is")
    note = f"the {what} {names} of the source's mesh {verb} dropped: tensors keep their placements on {targets}"
    if whole:
        note += f", and {plural(whole, 'tensor', 'are')} whole on every rank, as {names} alone cut them"
    return note


def with_mesh(options: ConvertOptions, source_layout: Layout, mesh: TargetMesh | None) -> ConvertOptions:
    """Set the world size of ``options`` to that of ``mesh``. For flat parameters on two dimensions also set FSDP1's
    sharding groups: the first dimension replicates, the second shards.

    Raises UsageError for flat parameters on a mesh that FSDP1 does not have.
    """
    if mesh is None:
        return options
    sizes = mesh.meshes[0].sizes
    on_ranks = replace(options, world_size=mesh.world_size)
    if (options.to or source_layout) is not Layout.FLATTENED:
        return on_ranks
    values = {flags.placements: options.placements, flags.like: options.like}
    given = [flag for flag, value in values.items() if value is not None]
    if (
        given
        or len(mesh.meshes) > 1
        or len(sizes) > 2
        or (len(sizes) == 2 and options.strategy not in (None, Strategy.HYBRID_SHARD))
    ):
        what = f"{given[0]} does" if given else f"{mesh_options(mesh.meshes)} does"
        raise UsageError(
            f"{what} not fit flat parameters",
            why="FSDP1 flattens on one mesh dimension, or with hybrid-shard on two: the first replicates, the second "
            "shards",
            next_step=f"{flags.mesh('replicate=2,shard=4')} {flags.strategy('hybrid-shard')}, or {flags.to('sharded')}",
        )
    if len(sizes) == 1:
        return on_ranks
    return replace(on_ranks, strategy=Strategy.HYBRID_SHARD, shard_size=sizes[1])


def on_mesh(decision: Decision, source: Checkpoint, meshes: SourceMeshes, mesh: TargetMesh | None) -> Decision:
    """``decision`` on ``mesh``; without ``mesh``, on the source's ``meshes`` resized to the ranks of ``decision``.

    ShardedTensors, and frameworks that make their own mesh, get one dimension unless another mesh is requested. Raises
    NeedsInformationError if no mesh of that many ranks keeps the source's dimensions.
    """
    flat = decision.layout is Layout.FLATTENED
    sharded_tensor = decision.options.tensor is TensorForm.SHARDED_TENSOR
    keeps_no_mesh = (flat and decision.form is None) or (mesh is None and (flat or sharded_tensor))
    of_form = decision.form.mesh if decision.form is not None else PLAIN_MESH
    makes_its_own = of_form.names is not None
    if flat and makes_its_own and decision.world_size is not None:
        return _with_groups(decision, source, meshes, mesh, of_form, decision.world_size)
    if decision.layout is Layout.FULL or decision.world_size is None or keeps_no_mesh:
        return decision
    if mesh is not None:
        return replace(decision, mesh=mesh)
    if makes_its_own:
        return replace(decision, mesh=_of_framework(decision, source, meshes, of_form, decision.world_size))
    return _on_source_mesh(decision, source, meshes, decision.world_size)


def _on_source_mesh(decision: Decision, source: Checkpoint, meshes: SourceMeshes, world_size: int) -> Decision:
    """``decision`` on the source's ``meshes``, resized to ``world_size``. Raises what ``on_mesh`` raises."""
    reason = _reason_without_mesh(source, meshes)
    if not reason and not meshes:
        return decision
    if not reason:
        keep_replicas = decision.container is not Container.DCP  # which stores replicas once
        targets = find_resized(meshes, world_size, source=source.source, keep_replicas=keep_replicas)
        if not isinstance(targets, NeedsInformationError):
            rows = len(meshes) == 1 and {each.placements for each in chain(*meshes.values())} == {(Shard(0),)}
            return replace(decision, mesh=_as_source(targets, meshes, None if rows else _note(targets)))
        if decision.container is not Container.DCP:
            raise targets
        kept = " and ".join(map(str, meshes))
        reason = f"no mesh of {plural(world_size, 'rank')} has the other dimensions of {kept}"
    return replace(decision, mesh=_on_one_dimension(decision, source, reason, world_size))


def _with_groups(
    decision: Decision,
    source: Checkpoint,
    meshes: SourceMeshes,
    mesh: TargetMesh | None,
    form: MeshForm,
    world_size: int,
) -> Decision:
    """``decision`` with the mesh of the framework's DTensors and the sharding groups of its flat parameters, which are
    the rows of that mesh: from ``mesh`` or the options for FSDP1's strategy if they say so, else as many replicas as
    the source has.
    """
    options = decision.options
    size = options.shard_size
    if mesh is None and options.strategy is not None:
        replicates = options.strategy is Strategy.HYBRID_SHARD and size is not None and world_size % size == 0
        if not replicates or size is None or form.hybrid is None:
            return decision
        target = MeshShape((world_size // size, size), form.hybrid)
        return replace(decision, mesh=TargetMesh((target,), None, _fsdp_default(target)))
    mesh = mesh if mesh is not None else _of_framework(decision, source, meshes, form, world_size)
    if mesh is None:
        return decision
    sizes = mesh.meshes[0].sizes
    if len(sizes) == 2:
        options = replace(options, strategy=Strategy.HYBRID_SHARD, shard_size=sizes[1])
    elif options.strategy is None and any(len(before.sizes) > 1 for before in meshes):
        options = replace(options, strategy=Strategy.FULL_SHARD)
    return replace(decision, mesh=mesh, options=options)


def _of_framework(
    decision: Decision, source: Checkpoint, meshes: SourceMeshes, form: MeshForm, world_size: int
) -> TargetMesh | None:
    """The framework's own mesh: with replicas if the source has them, else one dimension; the note says so if the
    source has more.
    """
    if form.hybrid and len(meshes) == 1 and _cover_all_ranks(meshes, source):
        [(mesh, shardings)] = meshes.items()
        if len(mesh.sizes) == 2 and set(shardings) == {_fsdp_default(mesh)}:
            target = replace(resized(meshes, world_size, source=source.source)[mesh], names=form.hybrid)
            note = _note({replace(mesh, names=form.hybrid): target})
            return TargetMesh((target,), None, _fsdp_default(target), note)
    if not any(len(mesh.sizes) > 1 for mesh in meshes):
        return None
    rows = row_sharding(world_size, form.names)
    before = " and ".join(map(str, meshes))
    note = f"the source's mesh {before} is not kept: {decision.flavor_name} shards over {rows.mesh} alone"
    return TargetMesh((rows.mesh,), None, rows, note)


def _note(meshes: Mapping[MeshShape, MeshShape]) -> str:
    before, after = (" and ".join(map(str, each)) for each in (meshes, meshes.values()))
    what, verb = ("the source's meshes", "are") if len(meshes) > 1 else ("the source's mesh", "is")
    return f"{what} {verb} kept: {after}" if before == after else f"{what} {before} {verb} resized to {after}"


def _reason_without_mesh(source: Checkpoint, meshes: Collection[MeshShape]) -> str:
    """Why no mesh of all ranks can describe the source's DTensors, with their placements or meshes; "" if one can."""
    unknown = {
        tensor.placement
        for tensor in source.leaves()
        if tensor.sharded
        and tensor.sharding is None
        and isinstance(tensor.cut, Sharded)
        and tensor.cut.form == "DTensor"
    }
    if not meshes:
        unknown.discard(placements_text([Shard(0)]))  # rows over one dimension need no mesh
    causes = []
    if unknown:
        how = (
            "a DCP directory does not record the mesh of its tensors, and some are not cut along rows alone"
            if source.container is Container.DCP
            else "the source has DTensors that are packed (a _StridedShard alone), or on a mesh of another order"
        )
        causes.append(f"{how}: {some_of(sorted(unknown), 4)}")
    stages = [str(mesh) for mesh in meshes if mesh.world_size != source.world_size]
    if stages:
        ranks = plural(source.world_size, "rank")
        causes.append(
            f"DTensors are on meshes of some of the {ranks}, as pipeline stages have them: {some_of(stages, 4)}"
        )
    return "; ".join(causes)


def _on_one_dimension(decision: Decision, source: Checkpoint, why: str, world_size: int) -> TargetMesh:
    """One dimension for DCP, which loads on any mesh. Raises NeedsInformationError for rank files."""
    if decision.container is not Container.DCP:
        raise NeedsInformationError(
            f"cannot tell how the tensors of {source.source} lie on {plural(world_size, 'rank')}",
            why=why,
            next_step=f"add {flags.container('dcp')}, which loads on any mesh and into any pipeline stage; or "
            f"{flags.mesh(world_size)} for FSDP alone, {flags.mesh('NAME=SIZE,...')} {flags.placements('FILE')} for "
            "more",
        )
    rows = row_sharding(world_size)
    note = f"all tensors of {source.source} are sharded over one mesh dimension of {world_size} ranks: {why}"
    return TargetMesh((rows.mesh,), None, rows, note)


def _as_source(targets: Mapping[MeshShape, MeshShape], meshes: SourceMeshes, note: str | None = None) -> TargetMesh:
    """Keep the placements on the source's ``meshes``, and replace each mesh by its target. Tensors without placements
    (of flat parameters) get those of all others, if these are alike.
    """
    as_source = SourcePlacements(targets)
    placed = {as_source.sharding(sharding) for shardings in meshes.values() for sharding in shardings}
    return TargetMesh(tuple(targets.values()), as_source, placed.pop() if len(placed) == 1 else None, note)


def _has_hybrid(flavor: str) -> bool:
    """Whether the framework has a mesh of two dimensions that can describe the tensors."""
    framework = flavor_named(flavor)
    return framework is not None and any(form.mesh.hybrid is not None for form in framework.forms)


def _fsdp_default(mesh: MeshShape) -> Sharding:
    """The last dimension of ``mesh`` cuts rows, those before it replicate."""
    return Sharding(mesh, (*[Replicate()] * (len(mesh.sizes) - 1), Shard(0)))


def _cover_all_ranks(meshes: Iterable[MeshShape], checkpoint: Checkpoint) -> bool:
    """Whether each of ``meshes`` has every rank of ``checkpoint``: the mesh of a pipeline stage has not."""
    return all(mesh.world_size == checkpoint.world_size for mesh in meshes)


def _by_dimensions(before: Collection[MeshShape], meshes: Sequence[MeshShape]) -> dict[MeshShape, MeshShape] | None:
    """For each mesh of ``before`` the one of ``meshes`` that has its dimensions, or most of them, in their order; None
    if they do not pair up.
    """
    pairs: dict[MeshShape, MeshShape] = {}
    for mesh in before:
        fitting = [each for each in meshes if _keeps_dimensions(mesh, each)]
        most = max((len(each.sizes) for each in fitting), default=0)
        fitting = [each for each in fitting if len(each.sizes) == most]
        if len(fitting) != 1:
            return None
        pairs[mesh] = fitting[0]
    return pairs if pairs and set(pairs.values()) == set(meshes) else None


def _keeps_dimensions(mesh: MeshShape, target: MeshShape) -> bool:
    """Whether the dimensions of ``target`` are those of ``mesh``, or some of them by name."""
    names = tuple(name for name in mesh.dimension_names if name in target.dimension_names)
    complete = len(target.sizes) == len(mesh.sizes)
    by_name = mesh.names is not None and target.names is not None
    return names == target.dimension_names and (complete or by_name)


def _like_checkpoint(path: str, options: ConvertOptions, meshes: Sequence[MeshShape], sources: Sources) -> TargetMesh:
    with of_option(flags.like):
        other = open_checkpoint(path, sources=sources, locate=Locate.NOTHING)
    whole = meshes_of(other)
    if not whole or not _cover_all_ranks(whole, other):
        raise UsageError(
            f"{flags.like(path)} does not say how its tensors are placed on a mesh",
            why=f"its tensors are on meshes of some ranks only: {' and '.join(map(str, whole))}"
            if whole
            else "only per-rank files of DTensors record their mesh: a DCP directory, ShardedTensors and whole tensors "
            "do not",
            next_step=f"give the mesh and the placements instead: {flags.mesh('NAME=SIZE,...')} "
            f"{flags.placements('FILE')}",
        )
    if meshes:
        pairs = _by_dimensions(whole, meshes)
    else:
        pairs = resized(whole, options.world_size or other.world_size, source=path)
    if pairs is None:
        raise UsageError(
            f"{mesh_options(meshes)} does not have the dimensions of {flags.like(path)}",
            expected=" and ".join(", ".join(mesh.dimension_names) for mesh in whole),
            found=" and ".join(", ".join(mesh.dimension_names) for mesh in meshes),
            next_step=f"{mesh_options(whole)} with other sizes, or {flags.placements('FILE')} instead of {flags.like}",
        )
    target = SourcePlacements(pairs)
    shardings: dict[str, Sharding | None] = {}
    for named in other.tensors():
        sharding = named.tensor.sharding
        if named.tensor.shape and (named.state is None or sharding is not None):
            shardings.setdefault(named.param, target.sharding(sharding) if sharding is not None else None)
    return TargetMesh(tuple(pairs.values()), LikeCheckpoint(path, shardings))


def _placements_needed_error(
    meshes: Sequence[MeshShape], source: Checkpoint, present: SourceMeshes
) -> NeedsInformationError:
    """``present``: the meshes of ``source``."""
    mesh = meshes[0]
    meanings = [_meant(mesh, before) for before in present] if len(meshes) == 1 else []
    meant = next(filter(None, meanings), None)
    if mesh.names is None and meant is not None:
        return NeedsInformationError(
            f"{flags.mesh(mesh)} has no names, but the mesh of {source.source} has: {' and '.join(map(str, present))}",
            why="placements are by the names of dimensions",
            next_step=f"did you mean {flags.mesh(meant)}?",
        )
    placed = ", ".join(f'"{name}": "{_example_placement(name, present)}"' for name in mesh.dimension_names)
    source_mesh = " and ".join(map(str, present))
    keeping = ""
    if len(present) > 1:
        keeping = f"give all its meshes ({mesh_options(present)} with other sizes), or "
    elif meant is not None:
        keeping = f"give {flags.mesh(meant)}, which keeps the source's placements, or "
    return NeedsInformationError(
        f"cannot tell how tensors are placed on {mesh_options(meshes)}",
        why=f"{source.source} is on {f'the mesh {source_mesh}' if source_mesh else 'no mesh of several dimensions'}",
        next_step=f"{keeping}add {flags.like('PATH')} (per-rank DTensor files of this model on such a mesh), or "
        f"{flags.placements('FILE')}, "
        f'JSON like {{"GLOB": {{{placed}}}, ...}}',
    )


def _meant(mesh: MeshShape, before: MeshShape) -> MeshShape | None:
    """``before``, a mesh of the source, with the sizes of ``mesh``, whose dimensions have other names or another order;
    None if it has more or fewer.
    """
    if before.names is None or len(before.sizes) != len(mesh.sizes):
        return None
    sizes = dict(zip(mesh.dimension_names, mesh.sizes, strict=True))
    if set(sizes) == set(before.names):
        return replace(before, sizes=tuple(sizes[name] for name in before.names))
    return replace(before, sizes=mesh.sizes)


def _example_placement(name: str, present: SourceMeshes) -> str:
    """A placement along the dimension ``name``: one of the source's, if it has this dimension."""
    recorded = [
        sharding.placements[mesh.names.index(name)]
        for mesh, shardings in present.items()
        if mesh.names is not None and name in mesh.names
        for sharding in shardings
    ]
    cut = next((placement.dim for placement in recorded if isinstance(placement, Shard | StridedShard)), None)
    if cut is None and (recorded or "repl" in name or "ddp" in name):
        return "Replicate()"
    return f"Shard({cut or 0})"
