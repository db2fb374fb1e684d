"""Names the shards of torch_xla's and fairscale's FSDP by the shard metadata saved beside them.

Every rank's file is rewritten before the ranks are merged: boxes of the parameters take the place of each stored chunk,
as if the parameters had been saved sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.formats.torch import TorchArchive
from fsdpckpt.formats.torch.distributed import all_ranks
from fsdpckpt.ir.checkpoint import UNORDERED, Evidence, EvidenceKind, Note, Problem, Section
from fsdpckpt.ir.values import Key, Value, replaced, without
from fsdpckpt.readers.optimizer_forms import containers, is_optimizer
from fsdpckpt.readers.protocol import KeyPath, dotted
from fsdpckpt.readers.xla_fairscale.models import MAX_NAMES, RankShards, UnnamedError
from fsdpckpt.readers.xla_fairscale.shard_metadata import (
    FAIRSCALE,
    TORCH_XLA,
    ShardMetadata,
    is_shard,
    is_torch_xla_shard,
    metadata_in,
)
from fsdpckpt.text import plural, some_of


@dataclass(slots=True)
class NamedShards:
    """The archives of all ranks, rewritten, and the notes about them. ``producer``: the flavor's name."""

    archives: list[TorchArchive]
    producer: str = ""
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def find_shard_metadata(root: Value) -> ShardMetadata | None:
    """The shard metadata in one file, None without any."""
    return next((metadata for _, metadata in _all_metadata(root) if metadata is not None), None)


def name_shards(archives: Sequence[TorchArchive], ranks: Sequence[int], paths: Mapping[int, str]) -> NamedShards:
    """The archives of ``ranks`` with every shard under its parameters' names; unchanged without shard metadata.

    Raises SourceCorruptError for metadata that contradict themselves, each other or the shards, SourceIncompleteError
    if chunks are missing, SourceUnsupportedError for parameters that differ on every rank.
    """
    roots: dict[int, tuple[int, Value]] = {}  # ranks that are alike share one
    for rank, archive in zip(ranks, archives, strict=True):
        roots.setdefault(id(archive.root), (rank, archive.root))
    of_root = {number: _only_metadata(root, paths[rank]) for number, (rank, root) in roots.items()}
    placed = [of_root[id(archive.root)] for archive in archives]
    found = [metadata for metadata in placed if metadata is not None]
    if not found:
        problems = chain(*(shards_without_metadata(root, paths[rank]) for rank, root in roots.values()))
        return NamedShards(list(archives), problems=list(islice(problems, 1)))
    _require_one_model(placed, ranks, paths)
    result = NamedShards([], found[0][1].producer)
    for rank, archive, (path, metadata) in zip(ranks, archives, found, strict=True):
        report = NamedShards([]) if result.archives else result  # only the first rank is described
        result.archives.append(_name_rank(archive, path, metadata, rank, paths, report))
    return result


def shards_without_metadata(root: Value, file: str) -> Iterator[Problem]:
    """A fatal problem for each dict in ``root`` with shards of either library but no metadata."""
    for path, mapping in containers(root):
        keys = [key for key in mapping if isinstance(key, str) and is_shard(key)]
        if not keys:
            continue
        producer, call = TORCH_XLA, "get_shard_metadata()"
        if not is_torch_xla_shard(keys[0]):
            producer, call = FAIRSCALE, "local_metadata_dict()"
        message = (
            f"{dotted(path)} has {len(keys)} shards of {producer}'s FSDP, first {keys[0]}, and no record of what is in "
            f"them: save model.{call} in the same file"
        )
        yield Problem("flattened", message, file=file or None, key=keys[0])


def _all_metadata(root: Value) -> Iterator[tuple[KeyPath, ShardMetadata | None]]:
    """All shard metadata in ``root`` with their paths; None for those in an unknown form."""
    for path, value in containers(root):
        recognised, metadata = metadata_in(cast("Mapping[object, object]", value))
        if recognised:
            yield path, metadata


def _only_metadata(root: Value, file: str) -> tuple[KeyPath, ShardMetadata] | None:
    placed = list(_all_metadata(root))
    if not placed:
        return None
    path, metadata = placed[0]
    if metadata is None or not path or not metadata.consistent:
        raise SourceCorruptError(
            f"{file}: the shard metadata under {dotted(path)} contradicts itself",
            file=file,
            key=dotted(path),
            expected="names, shapes and lengths that agree",
            why="a version of the library that is not known wrote it, or it was changed",
            next_step="save it again, or report it with the version of the library that saved it",
        )
    if len(placed) > 1:
        raise SourceUnsupportedError(
            f"{file} has the shard metadata of {len(placed)} models",
            details=[dotted(path) for path, _ in placed],
            file=file,
            why="nothing shows which shards belong to which of them",
            next_step="save one model in each file",
        )
    return path, metadata


def _require_one_model(
    placed: Sequence[tuple[KeyPath, ShardMetadata] | None], ranks: Sequence[int], paths: Mapping[int, str]
) -> None:
    first_path, first = next(entry for entry in placed if entry is not None)
    different = {
        paths[rank]: "no metadata" if entry is None else "of other parameters, or of a different number of ranks"
        for rank, entry in zip(ranks, placed, strict=True)
        if entry is None or entry[0] != first_path or not entry[1].same_model(first)
    }
    if different:
        raise SourceCorruptError(
            "the shard metadata differ between ranks",
            details=[f"{path}: {how}" for path, how in different.items()],
            files=list(different),
            file=paths[ranks[0]],
            why="files of different runs are mixed",
            next_step="give a directory with the files of one save",
        )


def _name_rank(
    archive: TorchArchive,
    path: KeyPath,
    metadata: ShardMetadata,
    named_rank: int,
    paths: Mapping[int, str],
    report: NamedShards,
) -> TorchArchive:
    """The archive with its shards named. If ``metadata`` does not record the rank, the file's name decides."""
    rank = metadata.rank if metadata.rank is not None else named_rank
    world_size = metadata.world_size if metadata.world_size is not None else len(paths)
    shards = RankShards(archive.root, metadata, rank, world_size, paths[named_rank])
    _describe(shards, dotted(path), report)
    root = archive.root
    for place, model in shards.models().items():
        root = replaced(root, place, cast(Value, model))
    for place, optimizer in containers(archive.root):
        if (
            is_optimizer(optimizer) and "param_id_map" not in optimizer
        ):  # with it, the optimizer was gathered before it was saved
            named = _name_optimizer(shards, cast("dict[Key, object]", optimizer), dotted(place), report)
            root = replaced(root, place, cast(Value, named))
    return replace(
        archive,
        root=without(root, path),
        ranks=frozenset({rank}) if metadata.rank is not None else frozenset(),
        worlds=(all_ranks(world_size),),
        forms=frozenset({f"{metadata.producer} FSDP shard"}),
    )


def _name_optimizer(
    shards: RankShards, optimizer: dict[Key, object], title: str, report: NamedShards
) -> dict[Key, object]:
    try:
        named, ids, params = shards.named_optimizer(optimizer)
    except UnnamedError as error:
        message = (
            f"{title}: its ids cannot be named: {error}. An optimizer made with model.named_parameters() saves the "
            f"names; {flags.only('model')} converts the rest"
        )
        report.problems.append(Problem("flattened", message, file=shards.file, key=title, section=Section.OPTIM))
        return shards.unnamed_optimizer(optimizer)
    message = f"{title}: {ids} ids are {params} parameters, by the lengths of the recorded shards"
    report.notes.append(Note("unflattened", message))
    return named


def _describe(shards: RankShards, title: str, report: NamedShards) -> None:
    metadata = shards.metadata
    count = sum(len(tensor.params) for tensor in metadata.tensors)
    content = f"{plural(count, 'parameter')} in {plural(len(metadata.tensors), 'tensor')}"
    message = f"{title} is {metadata.producer}'s record of {content}"
    report.evidence.append(Evidence(EvidenceKind.METADATA, message))
    if not metadata.in_model_order:
        report.evidence.append(UNORDERED)
    report.notes.append(Note("not-carried", f"{title} is left out: it describes the shards of the source"))
    absent, unlisted, retyped = shards.absent(), shards.unlisted(), shards.retyped()
    if absent:
        message = f"{len(absent)} recorded tensors are not there, first {absent[0]}"
        report.problems.append(Problem("missing-key", message, fatal=False, key=absent[0], section=Section.MODEL))
    if unlisted:
        more = f"; {len(unlisted) - 1} more are like it" if len(unlisted) > 1 else ""
        message = (
            f"{unlisted[0]} is neither a recorded parameter nor a buffer, so it may be one rank's shard{more}: a "
            "parameter that shares the storage of another one is recognised only if the file shares it too"
        )
        report.problems.append(Problem("flattened", message, file=shards.file, key=unlisted[0], section=Section.MODEL))
    if retyped:
        shown = some_of(retyped, MAX_NAMES)
        message = f"buffers had a different dtype before they were wrapped, and keep the one saved: {shown}"
        report.notes.append(Note("buffer-type", message, keys=tuple(retyped)))
