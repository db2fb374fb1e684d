"""Chooses the device mesh of a sharded target: ``--mesh``, ``--placements``, ``--like``, else the source's mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt.converters.mesh_options import EXAMPLE_MESH, parse_meshes, parse_placements
from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import NeedsInformationError, UsageError, of_option
from fsdpckpt.ir import Container, Layout, Strategy
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import MeshShape, Placement, Replicate, Shard, Sharding, placements_text
from fsdpckpt.layouts import on_one_dimension
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.producers import MeshForm
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of, plural
from fsdpckpt.transform.placements import (
    AsSource,
    Like,
    TargetMesh,
    mesh_options,
    replaced_on,
    resized,
    source_meshes,
    whole_of,
)


def check_mesh(options: ConvertOptions) -> tuple[MeshShape, ...]:
    """Parse ``--mesh``, () without it. Opens nothing. Raises UsageError if the options contradict each other."""
    meshes = parse_meshes(options.mesh)
    if meshes and options.world_size not in (None, meshes[0].world_size):
        product = " x ".join(map(str, meshes[0].sizes)) + " = " if len(meshes[0].sizes) > 1 else ""
        raise UsageError(
            f"--mesh {meshes[0]} has {product}{plural(meshes[0].world_size, 'rank')}, and --world-size says "
            f"{options.world_size}",
            expected=str(meshes[0].world_size),
            found=str(options.world_size),
            next_step="drop --world-size, or change a size of --mesh",
        )
    if options.placements is not None and options.like is not None:
        raise UsageError("--placements and --like both say how tensors are cut", next_step="drop one of them")
    if options.placements is not None and not meshes:
        raise UsageError(
            "--placements says how tensors are placed on a mesh, and there is no --mesh",
            next_step=f"add --mesh NAME=SIZE,..., for example {EXAMPLE_MESH}",
        )
    return meshes


def requested_mesh(options: ConvertOptions, source: Checkpoint, sources: Sources) -> TargetMesh | None:
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
    pairs = _by_dimensions(_whole_meshes(source), meshes)
    if pairs is not None:
        return _as_source(pairs, [] if _why_no_mesh(source, list(pairs)) else _all_shardings(source, list(pairs)))
    flat = (options.to or source.layout) is Layout.FLATTENED
    hybrid = options.tensor is TensorForm.SHARDED_TENSOR or _has_hybrid(options.flavor or source.flavor)
    dimensions = len(meshes[0].sizes)
    if len(meshes) == 1 and (dimensions == 1 or flat or (hybrid and dimensions == 2)):
        return TargetMesh(meshes, None, _on_rows(meshes[0]))
    raise _how_to_place(meshes, source)


def with_mesh(options: ConvertOptions, source_layout: Layout, mesh: TargetMesh | None) -> ConvertOptions:
    """Set the world size of ``options`` to that of ``mesh``. For flat parameters on two dimensions also set FSDP1's
    sharding groups: the first dimension replicates, the second shards.

    Raises UsageError for flat parameters on a mesh that FSDP1 does not have.
    """
    if mesh is None:
        return options
    sizes = mesh.meshes[0].sizes
    options = replace(options, world_size=mesh.world_size)
    if (options.to or source_layout) is not Layout.FLATTENED:
        return options
    asked = {"--placements": options.placements, "--like": options.like}
    named = [option for option, value in asked.items() if value is not None]
    if (
        named
        or len(mesh.meshes) > 1
        or len(sizes) > 2
        or (len(sizes) == 2 and options.strategy not in (None, Strategy.HYBRID_SHARD))
    ):
        what = f"{named[0]} does" if named else f"{mesh_options(mesh.meshes)} does"
        raise UsageError(
            f"{what} not fit flat parameters",
            why="FSDP1 flattens on one mesh dimension, or with hybrid-shard on two: the first replicates, the second "
            "shards",
            next_step="--mesh replicate=2,shard=4 --strategy hybrid-shard, or --to sharded",
        )
    if len(sizes) == 1:
        return options
    return replace(options, strategy=Strategy.HYBRID_SHARD, shard_size=sizes[1])


def on_mesh(spec: TargetSpec, source: Checkpoint, mesh: TargetMesh | None) -> TargetSpec:
    """``spec`` on ``mesh``; without ``mesh``, on the source's resized to the ranks of ``spec``.

    ShardedTensors, and frameworks that make their own mesh, get one dimension unless another mesh is requested. Raises
    NeedsInformationError if no mesh of that many ranks keeps the source's dimensions.
    """
    flat = spec.layout is Layout.FLATTENED
    alone = (flat and spec.form is None) or (mesh is None and (flat or spec.tensor is TensorForm.SHARDED_TENSOR))
    if spec.layout is Layout.FULL or spec.world_size is None or alone:
        return spec
    if mesh is not None:
        return replace(spec, mesh=mesh)
    meshes = source_meshes(source)
    strange = _why_no_mesh(source, meshes)
    if spec.form is not None and spec.form.mesh.names is not None:  # it has meshes of its own
        return replace(spec, mesh=_of_framework(spec, source, spec.form.mesh, spec.world_size))
    if strange:
        return replace(spec, mesh=_on_one_dimension(spec, source, strange, spec.world_size))
    if not meshes:
        return spec
    targets = _resized(spec, source, meshes, spec.world_size)
    shardings = _all_shardings(source, meshes)
    plain = len(meshes) == 1 and {sharding.placements for sharding in shardings} == {(Shard(0),)}
    return replace(spec, mesh=_as_source(targets, shardings, None if plain else _note(targets)))


def _resized(
    spec: TargetSpec, source: Checkpoint, meshes: Sequence[MeshShape], world_size: int
) -> dict[MeshShape, MeshShape]:
    keep = spec.container is not Container.DCP  # where replicas are stored once
    return resized(_shardings(source, meshes), world_size, source=source.source, keep_replicas=keep)


def _of_framework(spec: TargetSpec, source: Checkpoint, form: MeshForm, world_size: int) -> TargetMesh | None:
    """The framework's own mesh: with replicas if the source has them, else one dimension; the note says so if the
    source has more.
    """
    meshes, names = _whole_meshes(source), form.hybrid
    if len(meshes) == 1 and names and {one.placements for one in _all_shardings(source, meshes)} == {_HYBRID}:
        [(before, target)] = _resized(spec, source, meshes, world_size).items()
        named = replace(target, names=names)
        return TargetMesh((named,), None, _on_rows(named), _note({replace(before, names=names): named}))
    meshes = source_meshes(source)
    if not any(len(mesh.sizes) > 1 for mesh in meshes):
        return None
    rows = on_one_dimension(world_size, form.names)
    flavor = spec.flavor.name if spec.flavor is not None else "the target"
    note = f"the source's mesh {' and '.join(map(str, meshes))} is not kept: {flavor} shards over {rows.mesh} alone"
    return TargetMesh((rows.mesh,), None, rows, note)


_HYBRID = (Replicate(), Shard(0))


def _note(meshes: Mapping[MeshShape, MeshShape]) -> str:
    before, after = (" and ".join(map(str, each)) for each in (meshes, meshes.values()))
    what, verb = ("the source's meshes", "are") if len(meshes) > 1 else ("the source's mesh", "is")
    return f"{what} {verb} kept: {after}" if before == after else f"{what} {before} {verb} resized to {after}"


def _why_no_mesh(source: Checkpoint, meshes: Sequence[MeshShape]) -> str:
    """Why no mesh of all ranks can describe the source's DTensors, with their placements or meshes; "" if one can."""
    tensors = list(source.leaves())
    unknown = {one.placement for one in tensors if one.sharded and one.sharding is None and one.placement[0] == "["}
    if not meshes:
        unknown.discard(placements_text([Shard(0)]))  # rows over one dimension need no mesh
    causes = []
    if unknown:
        how = (
            "a DCP directory does not record the mesh of its tensors, and some are not cut along rows alone"
            if source.container is Container.DCP
            else "the source has DTensors that are packed (a _StridedShard alone), or on a mesh of another order"
        )
        causes.append(f"{how}: {first_of(sorted(unknown), 4)}")
    stages = [str(mesh) for mesh in meshes if mesh.world_size != source.world_size]
    if stages:
        ranks = plural(source.world_size, "rank")
        causes.append(
            f"DTensors are on meshes of some of the {ranks}, as pipeline stages have them: {first_of(stages, 4)}"
        )
    return "; ".join(causes)


def _on_one_dimension(spec: TargetSpec, source: Checkpoint, why: str, world_size: int) -> TargetMesh:
    """One dimension for DCP, which loads on any mesh. Raises NeedsInformationError for rank files."""
    if spec.container is not Container.DCP:
        raise NeedsInformationError(
            f"nothing says how the tensors of {source.source} lie on {plural(world_size, 'rank')}",
            why=why,
            next_step="add --container dcp, which loads on any mesh and into any pipeline stage; or --mesh "
            f"{world_size} for FSDP alone, --mesh NAME=SIZE,... --placements FILE for more",
        )
    rows = on_one_dimension(world_size)
    note = f"all tensors of {source.source} are sharded over one mesh dimension of {world_size} ranks: {why}"
    return TargetMesh((rows.mesh,), None, rows, note)


def _as_source(
    meshes: Mapping[MeshShape, MeshShape], shardings: Sequence[Sharding], note: str | None = None
) -> TargetMesh:
    """Keep the source's placements and replace each mesh. Tensors without placements (of flat parameters) get those of
    all others, if these are alike.
    """
    as_source = AsSource(meshes)
    placed = {as_source.sharding(sharding) for sharding in shardings}
    return TargetMesh(tuple(meshes.values()), as_source, placed.pop() if len(placed) == 1 else None, note)


def _has_hybrid(flavor: str) -> bool:
    """Whether the framework has a mesh of two dimensions that can describe the tensors."""
    known = flavor_named(flavor)
    return known is not None and any(form.mesh.hybrid is not None for form in known.forms)


def _on_rows(mesh: MeshShape) -> Sharding:
    return Sharding(mesh, tuple(_hybrid(mesh).values()))


def _hybrid(mesh: MeshShape) -> dict[str, Placement]:
    """FSDP's default: the last dimension cuts rows, those before it replicate."""
    *before, last = mesh.dimension_names
    return {**dict.fromkeys(before, Replicate()), last: Shard(0)}


def _whole_meshes(checkpoint: Checkpoint) -> list[MeshShape]:
    """The meshes of all ranks that the DTensors of ``checkpoint`` are on, or on submeshes of; else none."""
    meshes = source_meshes(checkpoint)
    return meshes if all(mesh.world_size == checkpoint.world_size for mesh in meshes) else []


def _shardings(checkpoint: Checkpoint, meshes: Sequence[MeshShape]) -> dict[MeshShape, list[Sharding]]:
    """The different shardings on each of ``meshes``."""
    distinct = dict.fromkeys(tensor.sharding for tensor in checkpoint.leaves())
    shardings: dict[MeshShape, list[Sharding]] = {mesh: [] for mesh in meshes}
    for sharding in distinct:
        mesh = whole_of(sharding.mesh, meshes) if sharding is not None else None
        if sharding is not None and mesh is not None:
            shardings[mesh].append(replaced_on(sharding, mesh))
    return shardings


def _all_shardings(checkpoint: Checkpoint, meshes: Sequence[MeshShape]) -> list[Sharding]:
    return [sharding for on_mesh in _shardings(checkpoint, meshes).values() for sharding in on_mesh]


def _by_dimensions(before: Sequence[MeshShape], meshes: Sequence[MeshShape]) -> dict[MeshShape, MeshShape] | None:
    """For each mesh of ``before`` the one of ``meshes`` with the same dimensions; None if they do not pair up."""
    by_names = {mesh.dimension_names: mesh for mesh in meshes}
    if not before or sorted(mesh.dimension_names for mesh in before) != sorted(by_names):
        return None
    return {mesh: by_names[mesh.dimension_names] for mesh in before}


def _like_checkpoint(path: str, options: ConvertOptions, meshes: Sequence[MeshShape], sources: Sources) -> TargetMesh:
    with of_option("--like"):
        other = open_checkpoint(path, sources=sources, locate=False)
    whole = _whole_meshes(other)
    if not whole:
        raise UsageError(
            f"--like {path} does not say how its tensors are placed on a mesh",
            why=f"its tensors are on meshes of some ranks only: {known}"
            if (known := " and ".join(map(str, source_meshes(other))))
            else "only per-rank files of DTensors record their mesh: a DCP directory, ShardedTensors and whole tensors "
            "do not",
            next_step="give the mesh and the placements instead: --mesh NAME=SIZE,... --placements FILE",
        )
    if meshes:
        pairs = _by_dimensions(whole, meshes)
    else:
        pairs = resized(_shardings(other, whole), options.world_size or other.world_size, source=path)
    if pairs is None:
        raise UsageError(
            f"{mesh_options(meshes)} does not have the dimensions of --like {path}",
            expected=" and ".join(", ".join(mesh.dimension_names) for mesh in whole),
            found=" and ".join(", ".join(mesh.dimension_names) for mesh in meshes),
            next_step=f"{mesh_options(whole)} with other sizes, or --placements FILE instead of --like",
        )
    target = AsSource(pairs)
    shardings: dict[str, Sharding | None] = {}
    for named in other.tensors():
        sharding = named.tensor.sharding
        if named.tensor.shape and (named.state is None or sharding is not None):
            shardings.setdefault(named.param, target.sharding(sharding) if sharding is not None else None)
    return TargetMesh(tuple(pairs.values()), Like(path, shardings))


def _how_to_place(meshes: Sequence[MeshShape], source: Checkpoint) -> NeedsInformationError:
    present, mesh = source_meshes(source), meshes[0]
    for one in present:
        if mesh.names is None and one.names is not None and len(one.sizes) == len(mesh.sizes):
            return NeedsInformationError(
                f"--mesh {mesh} has no names, and the mesh of {source.source} has: {one}",
                why="placements are by the names of dimensions",
                next_step=f"did you mean --mesh {replace(one, sizes=mesh.sizes)}?",
            )
    *others, last = mesh.dimension_names
    placed = ", ".join([*(f'"{name}": "Replicate()"' for name in others), f'"{last}": "Shard(0)"'])
    known = " and ".join(map(str, present))
    several = f"give all its meshes ({mesh_options(present)} with other sizes), or " if len(present) > 1 else ""
    return NeedsInformationError(
        f"nothing says how tensors are placed on {mesh_options(meshes)}",
        why=f"{source.source} is on {f'the mesh {known}' if known else 'no mesh of several dimensions'}",
        next_step=f"{several}add --like PATH (per-rank DTensor files of this model on such a mesh), or --placements "
        f'FILE, JSON like {{"GLOB": {{{placed}}}, ...}}',
    )
