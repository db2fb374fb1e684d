"""Parses ``--mesh`` and the JSON file of ``--placements``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnrecognisedError, UsageError, of_option
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir.placements import MeshShape, Placement, Replicate, Shard, Sharding
from fsdpckpt.layouts import as_fully_shard
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural
from fsdpckpt.transform.meshes import mesh_options, shard_dimension
from fsdpckpt.transform.placements import PlacementRule, PlacementRules

EXAMPLE_MESH = f"{flags.mesh('dp_replicate=2,dp_shard=4,tp=2')}"
_DIMENSION = re.compile(r"((?P<name>[^=]*[^=\s]\s*)=\s*)?(?P<size>0*[1-9]\d{0,8})", re.ASCII)
_SHARD = re.compile(r"shard\(\s*(?:dim\s*=\s*)?(\d{1,4})\s*\)", re.IGNORECASE)
_REPLICATE = re.compile(r"replicate(\(\s*\))?", re.IGNORECASE)


def parse_meshes(texts: Sequence[str]) -> tuple[MeshShape, ...]:
    """Parse every ``--mesh``. Raises UsageError unless all have the same number of ranks and no two the same
    dimensions.
    """
    meshes = tuple(map(parse_mesh, texts))
    for mesh in meshes:
        if mesh.world_size > MAX_RANKS:
            raise UsageError(
                f"{flags.mesh(mesh)} has {mesh.world_size:,} ranks",
                expected=f"at most {MAX_RANKS:,}",
                found=str(mesh.world_size),
            )
        if len(meshes) > 1 and mesh.names is None:
            raise UsageError(
                f"{flags.mesh(mesh)} is one of several, but has no names",
                why="the names of its dimensions say which tensors are on a mesh",
                next_step="write NAME=SIZE,... for each",
            )
        if mesh.world_size != meshes[0].world_size:
            raise UsageError(
                f"{flags.mesh(meshes[0])} has {plural(meshes[0].world_size, 'rank')}, and {flags.mesh(mesh)} has "
                f"{mesh.world_size}",
                why="every mesh is of all ranks of the job",
                expected=str(meshes[0].world_size),
                found=str(mesh.world_size),
                next_step="change a size",
            )
    names = [set(mesh.dimension_names) for mesh in meshes]
    twice = next((mesh for mesh, dimensions in zip(meshes, names, strict=True) if names.count(dimensions) > 1), None)
    if twice is not None:
        raise UsageError(
            f"two meshes have the dimensions {', '.join(twice.dimension_names)}",
            found=mesh_options(meshes),
            next_step="drop one of them, or rename a dimension",
        )
    return meshes


def parse_mesh(text: str) -> MeshShape:
    """Parse ``dp_replicate=2,dp_shard=4,tp=2`` or, for a mesh without names, ``2,4``. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    matches = [_DIMENSION.fullmatch(part) for part in parts]
    names = [(match["name"] or "").strip() if match else "" for match in matches]
    wrong = next((part for part, match in zip(parts, matches, strict=True) if match is None), None)
    if wrong is None and len({bool(name) for name in names}) > 1:
        wrong = next(part for part, name in zip(parts, names, strict=True) if not name)
    if wrong is not None:
        raise UsageError(
            f"{flags.mesh(text)}: {wrong!r} is not a dimension and its number of ranks",
            expected="NAME=SIZE,NAME=SIZE,...",
            found=wrong,
            next_step=f"for example {EXAMPLE_MESH}",
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{flags.mesh(text)} names {twice} twice", found=twice, next_step="give each dimension its own name"
        )
    sizes = tuple(int(match["size"]) for match in matches if match)
    return MeshShape(sizes, tuple(names) if names[0] else None)


def parse_placements(path: str, meshes: Sequence[MeshShape], sources: Sources) -> PlacementRules:
    """Read the rules in the JSON file ``path``, whose dimensions are those of ``meshes``.

    Raises UsageError, and SourceError for a file that cannot be read.
    """
    with of_option(flags.placements):
        entry = sources.stat(path)
        if entry is not None and entry.directory:
            raise SourceUnrecognisedError(f"{path} is a directory", file=path, next_step="give a JSON file")
        source = sources.open(path)
        text = source.read(0, source.nbytes)
    try:
        document = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        example = _example_document(meshes)
        raise UsageError(f"{flags.placements(path)} is not JSON: {error}", file=path, next_step=example) from None
    if not isinstance(document, _Pairs) or not document:
        example = _example_document(meshes)
        raise UsageError(f"{flags.placements(path)} is not a JSON object", file=path, next_step=example)
    globs = [glob for glob, _ in document]
    twice = next((glob for glob in globs if globs.count(glob) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} has two entries for {twice}", file=path, key=twice, next_step="remove one of them")
    entries = {glob: _entry(path, glob, placed, meshes) for glob, placed in document}
    dims = _listed_dimensions([entry for entry in entries.values() if entry is not None])
    shardings = {
        glob: None if entry is None else as_fully_shard(entry.mesh, entry.placements, dims[entry.mesh])
        for glob, entry in entries.items()
    }
    return PlacementRules(path, tuple(PlacementRule(glob, sharding) for glob, sharding in shardings.items()))


def _listed_dimensions(entries: Sequence[Sharding]) -> dict[MeshShape, list[int]]:
    """For each mesh its dimensions in the order in which DTensors list them: FSDP2 lists its own, which cuts every
    tensor, before others that cut (tensor parallelism may be outermost in the mesh).
    """
    shardings: dict[MeshShape, list[Sharding]] = {}
    for entry in entries:
        shardings.setdefault(entry.mesh, []).append(entry)
    listed: dict[MeshShape, list[int]] = {}
    for mesh, placed in shardings.items():
        fsdp = shard_dimension(mesh, placed, cuts_all=True)
        cutting = {
            dim for each in placed for dim, placement in enumerate(each.placements) if isinstance(placement, Shard)
        }
        dims = range(len(mesh.sizes))
        after = [dim for dim in dims if fsdp is not None and dim < fsdp and dim in cutting]
        before = [dim for dim in dims if fsdp is not None and dim <= fsdp and dim not in after]
        listed[mesh] = [*before, *after, *(dim for dim in dims if dim not in (*before, *after))]
    return listed


class _Pairs(list[tuple[str, object]]):
    """A JSON object with all its keys, including repeated ones."""


def _entry(path: str, glob: str, placed: object, meshes: Sequence[MeshShape]) -> Sharding | None:
    """What one entry says, with plain shards; None for a tensor that every rank holds whole."""
    if placed is None:
        return None
    if not isinstance(placed, _Pairs) or not placed:
        raise UsageError(
            f"{path}: {glob} has no placements",
            file=path,
            key=glob,
            expected="an object of mesh dimension to placement, or null for a tensor that every rank holds whole",
            found=json.dumps(placed),
            next_step=_example_document(meshes),
        )
    placements: dict[str, Placement] = {}
    dimensions = list(dict.fromkeys(name for mesh in meshes for name in mesh.dimension_names))
    for name, text in placed:
        if name not in dimensions or name in placements:
            raise UsageError(
                f"{path}: {glob} names the mesh dimension {name}"
                + (" twice" if name in placements else f", which {mesh_options(meshes)} does not have"),
                file=path,
                key=glob,
                expected=", ".join(dimensions),
                found=name,
                next_step=f"correct the name, or add the dimension to {flags.mesh}",
            )
        placements[name] = _placement(path, glob, text)
    mesh = _mesh_with(path, glob, list(placements), meshes)
    return Sharding(mesh, tuple(placements.get(name) for name in mesh.dimension_names))


def _mesh_with(path: str, glob: str, names: Sequence[str], meshes: Sequence[MeshShape]) -> MeshShape:
    """The mesh of ``meshes`` that has the dimensions ``names``; any of them if these dimensions hold the same ranks in
    all.

    Raises UsageError if no mesh has them, or several have them with different ranks.
    """
    fitting = [mesh for mesh in meshes if set(names) <= set(mesh.dimension_names)]
    if len({mesh.steps(names) for mesh in fitting}) == 1:
        return fitting[0]
    raise UsageError(
        f"{path}: {glob} does not say on which mesh it is",
        file=path,
        key=glob,
        expected="dimensions of one mesh: " + ", or ".join(", ".join(mesh.dimension_names) for mesh in meshes),
        found=", ".join(names),
        why="several meshes have these dimensions" if fitting else "no mesh has all of these dimensions",
        next_step="add a dimension that only its mesh has" if fitting else "leave out those of the other mesh",
    )


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


def _example_document(meshes: Sequence[MeshShape]) -> str:
    placed = ", ".join(f'"{name}": "Shard(0)"' for name in meshes[0].dimension_names[-1:])
    return f'write globs of parameter names and their placements, for example {{"*": {{{placed}}}}}'
