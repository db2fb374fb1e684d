"""Decides on which device mesh a target is sharded: ``--mesh``, ``--placements``, ``--like``, else the source's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import NeedsInformationError, UsageError, of_option
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.mesh import MeshShape, Placement, Replicate, Shard, Sharding, placements_text
from fsdpckpt.ir.vocabulary import Container, Layout, Strategy
from fsdpckpt.layouts.sharded import on_one_dimension
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.producers.forms import MeshForm
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of, plural
from fsdpckpt.transform.placements import (
    AsSource,
    Like,
    Rule,
    Rules,
    TargetMesh,
    is_submesh,
    replaced_on,
    resized,
    source_mesh,
    source_meshes,
)

_EXAMPLE = "--mesh dp_replicate=2,dp_shard=4,tp=2"
_SHARD = re.compile(r"shard\(\s*(?:dim\s*=\s*)?(\d+)\s*\)", re.IGNORECASE)
_REPLICATE = re.compile(r"replicate(\(\s*\))?", re.IGNORECASE)


def check_mesh(options: ConvertOptions) -> MeshShape | None:
    """What ``--mesh`` says. Raises UsageError when it says nothing, or the options contradict each other.

    Nothing is opened.
    """
    mesh = parse_mesh(options.mesh) if options.mesh is not None else None
    if mesh is not None and mesh.world_size > MAX_RANKS:
        raise UsageError(
            f"--mesh {mesh} has {mesh.world_size:,} ranks",
            expected=f"at most {MAX_RANKS:,}",
            found=str(mesh.world_size),
        )
    if mesh is not None and options.world_size not in (None, mesh.world_size):
        raise UsageError(
            f"--mesh {mesh} has {plural(mesh.world_size, 'rank')}, and --world-size says {options.world_size}",
            expected=str(mesh.world_size),
            found=str(options.world_size),
            next_step="drop --world-size, or change a size of --mesh",
        )
    if options.placements is not None and options.like is not None:
        raise UsageError("--placements and --like both say how tensors are cut", next_step="drop one of them")
    if options.placements is not None and mesh is None:
        raise UsageError(
            "--placements says how tensors lie on a mesh, and there is no --mesh",
            next_step=f"add --mesh NAME=SIZE,..., for example {_EXAMPLE}",
        )
    return mesh


def requested_mesh(options: ConvertOptions, source: Checkpoint, sources: Sources) -> TargetMesh | None:
    """The mesh that ``--mesh``, ``--placements`` and ``--like`` ask for; None without any of them.

    Raises what ``check_mesh`` raises, UsageError for placements or another checkpoint that do not fit the mesh,
    NeedsInformationError where nothing says how tensors lie on it.
    """
    mesh = check_mesh(options)
    if mesh is not None and options.placements is not None:
        return TargetMesh(mesh, parse_placements(options.placements, mesh, sources))
    if options.like is not None:
        return _like(options.like, options, mesh, sources)
    if mesh is None:
        return None
    own = source_mesh(source)
    if own is not None and own.dimension_names == mesh.dimension_names:
        return _as_source({own: mesh}, [] if _strange(source, [own]) else _shardings(source, own))
    flat = (options.to or source.layout) is Layout.FLATTENED
    hybrid = options.tensor is TensorForm.SHARDED_TENSOR or _has_hybrid(options.flavor or source.flavor)
    if len(mesh.sizes) == 1 or flat or (hybrid and len(mesh.sizes) == 2):
        return TargetMesh(mesh, None, _rows(mesh))
    raise _how_to_place(mesh, source)


def with_mesh(options: ConvertOptions, source_layout: Layout, mesh: TargetMesh | None) -> ConvertOptions:
    """``options`` with the world size of ``mesh``; of flat parameters on two dimensions with the sharding groups that
    FSDP1 makes of them: the first replicates, the second shards.

    Raises UsageError for flat parameters on a mesh that FSDP1 does not have.
    """
    if mesh is None:
        return options
    sizes = mesh.mesh.sizes
    options = replace(options, world_size=mesh.mesh.world_size)
    if (options.to or source_layout) is not Layout.FLATTENED:
        return options
    asked = {"--placements": options.placements, "--like": options.like}
    named = [option for option, value in asked.items() if value is not None]
    if named or len(sizes) > 2 or (len(sizes) == 2 and options.strategy not in (None, Strategy.HYBRID_SHARD)):
        what = f"{named[0]} does" if named else f"--mesh {mesh.mesh} does"
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
    """``spec`` on ``mesh``, without one on that of the source with as many ranks as ``spec`` has.

    ShardedTensors, and frameworks that make their own mesh, get one dimension unless they are asked for another.
    Raises NeedsInformationError where no mesh of that many ranks keeps what the source has.
    """
    flat = spec.layout is Layout.FLATTENED
    alone = (flat and spec.form is None) or (mesh is None and (flat or spec.tensor is TensorForm.SHARDED_TENSOR))
    if spec.layout is Layout.FULL or spec.world_size is None or alone:
        return spec
    if mesh is not None:
        return replace(spec, mesh=mesh)
    meshes = source_meshes(source)
    strange = _strange(source, meshes)
    if spec.form is not None and spec.form.mesh.names is not None:  # it has meshes of its own
        return replace(spec, mesh=_of_framework(spec, source, spec.form.mesh, spec.world_size))
    if strange:
        return replace(spec, mesh=_on_one_dimension(spec, source.source, strange, spec.world_size))
    if not meshes:
        return spec
    targets = {own: _resized(spec, source, own, spec.world_size, only=len(meshes) == 1) for own in meshes}
    shardings = _shardings(source, meshes[0]) if len(meshes) == 1 else []
    note = _note(targets) if len(meshes) > 1 or len(meshes[0].sizes) > 1 else None
    return replace(spec, mesh=_as_source(targets, shardings, note))


def _resized(spec: TargetSpec, source: Checkpoint, own: MeshShape, world_size: int, *, only: bool = True) -> MeshShape:
    keep = spec.container is not Container.DCP  # where replicas are stored once
    shardings = _shardings(source, own)
    return resized(own, shardings, world_size, source=source.source, keep_replicas=keep, only=only)


def _of_framework(spec: TargetSpec, source: Checkpoint, form: MeshForm, world_size: int) -> TargetMesh | None:
    """A framework's own mesh: that of replicas for a source with replicas, else its one dimension, which is said where
    the source has more."""
    own, names = source_mesh(source), form.hybrid
    if own is not None and names is not None and {one.placements for one in _shardings(source, own)} == {_HYBRID}:
        found = replace(_resized(spec, source, own, world_size), names=names)
        return TargetMesh(found, None, _rows(found), _note({replace(own, names=names): found}))
    meshes = source_meshes(source)
    if not any(len(mesh.sizes) > 1 for mesh in meshes):
        return None
    rows = on_one_dimension(world_size, form.names)
    flavor = spec.flavor.name if spec.flavor is not None else "the target"
    note = f"the source's mesh {' and '.join(map(str, meshes))} is not kept: {flavor} shards over {rows.mesh} alone"
    return TargetMesh(rows.mesh, None, rows, note)


_HYBRID = (Replicate(), Shard(0))


def _note(meshes: Mapping[MeshShape, MeshShape]) -> str:
    before, after = (" and ".join(map(str, each)) for each in (meshes, meshes.values()))
    what, verb = ("the source's meshes", "are") if len(meshes) > 1 else ("the source's mesh", "is")
    return f"{what} {verb} kept: {after}" if before == after else f"{what} {before} {verb} resized to {after}"


def _strange(source: Checkpoint, meshes: Sequence[MeshShape]) -> list[str]:
    """What DTensors of the source are on where no mesh of all ranks says how: placements, or the mesh itself."""
    tensors = [named.tensor for named in source.tensors()]
    unknown = {one.placement for one in tensors if one.sharded and one.sharding is None and one.placement[0] == "["}
    if not meshes:
        unknown.discard(placements_text([Shard(0)]))  # rows over one dimension need no mesh
    return sorted(unknown) + [str(mesh) for mesh in meshes if mesh.world_size != source.world_size]


def _on_one_dimension(spec: TargetSpec, source: str, strange: Sequence[str], world_size: int) -> TargetMesh:
    """For DCP, which loads on any mesh. Raises NeedsInformationError for files by rank."""
    why = (
        "the source has DTensors that are packed (a _StridedShard alone), or on a mesh of some ranks or of another "
        f"order: {first_of(strange, 4)}"
    )
    if spec.container is not Container.DCP:
        raise NeedsInformationError(
            f"nothing says how the tensors of {source} lie on {plural(world_size, 'rank')}",
            why=why,
            next_step=f"add --mesh {world_size} --placements FILE for one dimension, --mesh NAME=SIZE,... --placements "
            "FILE for several, or write a DCP directory (--container dcp), which loads on any mesh",
        )
    rows = on_one_dimension(world_size)
    note = f"all tensors of {source} are sharded over one mesh dimension of {world_size} ranks: {why}"
    return TargetMesh(rows.mesh, None, rows, note)


def _as_source(
    meshes: Mapping[MeshShape, MeshShape], shardings: Sequence[Sharding], note: str | None = None
) -> TargetMesh:
    """The source's placements, each mesh replaced; tensors without any (of flat parameters) lie as all others do, if
    all are alike."""
    first = next(iter(meshes.values()))
    placed = {replaced_on(sharding, first) for sharding in shardings}
    return TargetMesh(first, AsSource(meshes), placed.pop() if len(placed) == 1 else None, note)


def _has_hybrid(flavor: str) -> bool:
    """Whether a framework's own mesh of two dimensions says how tensors lie on it."""
    known = flavor_named(flavor)
    return known is not None and any(form.mesh.hybrid is not None for form in known.forms)


def _rows(mesh: MeshShape) -> Sharding:
    return Sharding(mesh, tuple(_hybrid(mesh).values()))


def _hybrid(mesh: MeshShape) -> dict[str, Placement]:
    """What FSDP does without being told: the last dimension cuts rows, those before it replicate."""
    *before, last = mesh.dimension_names
    return {**dict.fromkeys(before, Replicate()), last: Shard(0)}


def _shardings(checkpoint: Checkpoint, mesh: MeshShape) -> list[Sharding]:
    found = {named.tensor.sharding for named in checkpoint.tensors()}
    own = [sharding for sharding in found if sharding is not None]
    return [replaced_on(sharding, mesh) for sharding in own if is_submesh(sharding.mesh, mesh)]


def _like(path: str, options: ConvertOptions, mesh: MeshShape | None, sources: Sources) -> TargetMesh:
    with of_option("--like"):
        other = open_checkpoint(path, sources=sources, locate=False)
    own = source_mesh(other)
    if own is None:
        raise UsageError(
            f"--like {path} does not say how its tensors lie on a mesh",
            why=f"its tensors are on several meshes, or on some ranks only: {known}"
            if (known := " and ".join(map(str, source_meshes(other))))
            else "only per-rank files of DTensors record their mesh: a DCP directory, ShardedTensors and whole tensors "
            "do not",
            next_step="give the mesh and the placements instead: --mesh NAME=SIZE,... --placements FILE",
        )
    if mesh is None:
        mesh = resized(own, _shardings(other, own), options.world_size or own.world_size, source=path)
    elif mesh.dimension_names != own.dimension_names:
        raise UsageError(
            f"--mesh {mesh} does not have the dimensions of --like {path}",
            expected=", ".join(own.dimension_names),
            found=", ".join(mesh.dimension_names),
            next_step=f"--mesh {own} with other sizes, or --placements FILE instead of --like",
        )
    shardings: dict[str, Sharding | None] = {}
    for named in other.tensors():
        sharding = named.tensor.sharding
        if named.tensor.shape and (named.state is None or sharding is not None):
            shardings.setdefault(named.param, replaced_on(sharding, own) if sharding is not None else None)
    return TargetMesh(mesh, Like(path, shardings))


def _how_to_place(mesh: MeshShape, source: Checkpoint) -> NeedsInformationError:
    for own in source_meshes(source):
        if mesh.names is None and own.names is not None and len(own.sizes) == len(mesh.sizes):
            return NeedsInformationError(
                f"--mesh {mesh} has no names, and the mesh of {source.source} has: {own}",
                why="placements are by the names of dimensions",
                next_step=f"did you mean --mesh {replace(own, sizes=mesh.sizes)}?",
            )
    *others, last = mesh.dimension_names
    placed = ", ".join([*(f'"{name}": "Replicate()"' for name in others), f'"{last}": "Shard(0)"'])
    known = " and ".join(map(str, source_meshes(source)))
    return NeedsInformationError(
        f"nothing says how tensors lie on --mesh {mesh}",
        why=f"{source.source} is on {f'the mesh {known}' if known else 'no mesh of several dimensions'}",
        next_step="add --like PATH (per-rank DTensor files of this model on such a mesh), or --placements FILE, "
        f'JSON like {{"GLOB": {{{placed}}}, ...}}',
    )


def parse_mesh(text: str) -> MeshShape:
    """``dp_replicate=2,dp_shard=4,tp=2`` or, for a mesh without names, ``2,4``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    pairs = [part.rpartition("=") for part in parts]
    names = [name.strip() for name, _, _ in pairs]
    sizes = [size.strip() for _, _, size in pairs]
    wrong = next((part for part, size in zip(parts, sizes, strict=True) if not size.isdecimal() or int(size) < 1), None)
    if wrong is None and len({bool(name) for name in names}) > 1:
        wrong = next(part for part, name in zip(parts, names, strict=True) if not name)
    if wrong is not None:
        raise UsageError(
            f"--mesh {text}: {wrong!r} is not a dimension and its number of ranks",
            expected="NAME=SIZE,NAME=SIZE,...",
            found=wrong,
            next_step=f"for example {_EXAMPLE}",
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--mesh {text} names {twice} twice", found=twice, next_step="give each dimension its own name"
        )
    return MeshShape(tuple(map(int, sizes)), tuple(names) if names[0] else None)


def parse_placements(path: str, mesh: MeshShape, sources: Sources) -> Rules:
    """The rules in the JSON file ``path``, whose dimensions are those of ``mesh``. Raises UsageError."""
    source = sources.open(path)
    try:
        document = json.loads(source.read(0, source.nbytes), object_pairs_hook=_Pairs)
    except ValueError as error:
        raise UsageError(f"--placements {path} is not JSON: {error}", file=path, next_step=_form(mesh)) from None
    if not isinstance(document, _Pairs) or not document:
        raise UsageError(f"--placements {path} is not a JSON object", file=path, next_step=_form(mesh))
    globs = [glob for glob, _ in document]
    twice = next((glob for glob in globs if globs.count(glob) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} has two entries for {twice}", file=path, key=twice, next_step="remove one of them")
    return Rules(path, tuple(Rule(glob, _entry(path, glob, placed, mesh)) for glob, placed in document))


class _Pairs(list[tuple[str, object]]):
    """A JSON object with all its keys, equal ones too."""


def _entry(path: str, glob: str, placed: object, mesh: MeshShape) -> Mapping[str, Placement] | None:
    if placed is None:
        return None
    if not isinstance(placed, _Pairs) or not placed:
        raise UsageError(
            f"{path}: {glob} has no placements",
            file=path,
            key=glob,
            expected="an object of mesh dimension to placement, or null for a tensor that every rank holds whole",
            found=json.dumps(placed),
            next_step=_form(mesh),
        )
    found: dict[str, Placement] = {}
    for name, text in placed:
        if name not in mesh.dimension_names or name in found:
            raise UsageError(
                f"{path}: {glob} names the mesh dimension {name}"
                + (" twice" if name in found else f", which --mesh {mesh} does not have"),
                file=path,
                key=glob,
                expected=", ".join(mesh.dimension_names),
                found=name,
                next_step="correct the name, or add the dimension to --mesh",
            )
        found[name] = _placement(path, glob, text)
    return found


def _placement(path: str, glob: str, text: object) -> Placement:
    if isinstance(text, str):
        shard = _SHARD.fullmatch(text.strip())
        if shard is not None:
            return Shard(int(shard[1]))
        if _REPLICATE.fullmatch(text.strip()):
            return Replicate()
    strided = isinstance(text, str) and "strided" in text.lower()
    raise UsageError(
        f"{path}: {glob} has a placement that cannot be written: {text}",
        file=path,
        key=glob,
        expected="Shard(DIM), Replicate()",
        found=str(text),
        why="_StridedShard follows from the mesh: where two dimensions cut one, the last cuts first, as FSDP after "
        "tensor parallelism does"
        if strided
        else None,
        next_step="write Shard(DIM)" if strided else 'for example "Shard(0)"',
    )


def _form(mesh: MeshShape) -> str:
    placed = ", ".join(f'"{name}": "Shard(0)"' for name in mesh.dimension_names[-1:])
    return f'write globs of parameter names and their placements, for example {{"*": {{{placed}}}}}'
