"""Gives the shards of torch_xla's and fairscale's FSDP the names and shapes that are recorded beside them.

Every rank's file is rewritten by itself, before the ranks are put together: in the place of a stored chunk stand the
boxes of the parameters it holds, as if the parameters had been saved sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from fsdpckpt.formats.torch.archive import TorchArchive
from fsdpckpt.ir.checkpoint import UNORDERED, Evidence, EvidenceKind, Note, Problem, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.flat_slices import is_optimizer, mappings
from fsdpckpt.readers.sections import replaced
from fsdpckpt.readers.xla_fairscale.errors import (
    contradicting_record,
    different_records,
    several_records,
    unnamed_ids,
    unrecorded_tensors,
    without_record,
)
from fsdpckpt.readers.xla_fairscale.models import (
    RecordedModels,
    Unnamed,
    named_optimizer,
    names_of_ids,
    unnamed_optimizer,
)
from fsdpckpt.readers.xla_fairscale.parse import (
    FAIRSCALE,
    TORCH_XLA,
    fairscale_record,
    is_fairscale,
    is_shard,
    is_torch_xla,
    is_torch_xla_shard,
    torch_xla_record,
)
from fsdpckpt.readers.xla_fairscale.shard_metadata import Record, ranks_of

__all__ = ["Recorded", "record_beside", "recorded", "shards_without_record"]

_Path: TypeAlias = tuple[Key, ...]
_SHOWN = 5


@dataclass(slots=True)
class Recorded:
    """The archives of all ranks, rewritten, and what there is to say about them. ``producer``: the flavor's name."""

    archives: list[TorchArchive]
    producer: str = ""
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def record_beside(root: Value) -> Record | None:
    """The record in one file, None without any."""
    return next((record for _, record in _records(root) if record is not None), None)


def recorded(archives: Sequence[TorchArchive], ranks: Sequence[int], paths: Mapping[int, str]) -> Recorded:
    """The archives of ``ranks`` with every recorded shard under its parameters' names; as they are without a record.

    Raises SourceCorruptError for records that contradict themselves, each other or the shards, SourceIncompleteError
    when the chunks are not all, SourceUnsupportedError for parameters of which every rank has its own.
    """
    found = [_only(archive.root, paths[rank]) for rank, archive in zip(ranks, archives, strict=True)]
    known = [one for one in found if one is not None]
    if not known:
        strays = (one for rank, archive in zip(ranks, archives, strict=True)
                  for one in shards_without_record(archive.root, paths[rank]))  # fmt: skip
        return Recorded(list(archives), problems=[one for one in [next(strays, None)] if one is not None])
    _require_one_model(found, ranks, paths)
    result = Recorded([], known[0][1].producer)
    for rank, archive, (path, record) in zip(ranks, archives, known, strict=True):
        result.archives.append(_OneRank(archive, path, record, rank, len(ranks), paths[rank]).rewritten(result))
    return result


def shards_without_record(root: Value, file: str) -> Iterator[Problem]:
    """A fatal problem for each dict in ``root`` with shards of either producer, where nothing says what they are."""
    for path, mapping in mappings(root):
        found = [key for key in mapping if isinstance(key, str) and is_shard(key)]
        if found and is_torch_xla_shard(found[0]):
            yield without_record(_dotted(path), found, TORCH_XLA, "get_shard_metadata()", file)
        elif found:
            yield without_record(_dotted(path), found, FAIRSCALE, "local_metadata_dict()", file)


def _records(root: Value) -> Iterator[tuple[_Path, Record | None]]:
    """Every record in ``root`` and where it stands; None for one in a form that is not known."""
    for path, value in mappings(root):
        entry = cast("Mapping[object, object]", value)
        if is_torch_xla(entry):
            yield path, torch_xla_record(entry)
        elif is_fairscale(entry):
            yield path, fairscale_record(entry)


def _only(root: Value, file: str) -> tuple[_Path, Record] | None:
    found = list(_records(root))
    if not found:
        return None
    path, record = found[0]
    if record is None or not path or not record.consistent:
        raise contradicting_record(file, _dotted(path))
    if len(found) > 1:
        raise several_records(file, [_dotted(path) for path, _ in found])
    return path, record


def _require_one_model(
    found: Sequence[tuple[_Path, Record] | None], ranks: Sequence[int], paths: Mapping[int, str]
) -> None:
    first = next(one for one in found if one is not None)
    wrong = [
        f"{paths[rank]}: {'no record' if one is None else 'of other parameters, or of another number of ranks'}"
        for rank, one in zip(ranks, found, strict=True)
        if one is None or one[0] != first[0] or not one[1].same_model(first[1])
    ]
    if wrong:
        raise different_records(wrong, paths[ranks[0]])


class _OneRank:
    """One rank's file. ``files``: how many there are, which is the number of ranks where the record has none."""

    def __init__(self, archive: TorchArchive, path: _Path, record: Record, rank: int, files: int, file: str) -> None:
        self.archive = archive
        self.path = path
        self.record = record
        self.file = file
        self.rank = record.rank if record.rank is not None else rank
        self.world_size = record.world_size if record.world_size is not None else files
        self.models = RecordedModels(archive.root, record, self.rank, self.world_size, file)

    def rewritten(self, result: Recorded) -> TorchArchive:
        """The archive with its shards named. What there is to say goes to ``result`` with the first rank."""
        said = result if not result.archives else Recorded([])
        self._say(said)
        root = self.archive.root
        for at, model in self.models.by_name().items():
            root = replaced(root, at, cast(Value, model))
        for at, optimizer in mappings(self.archive.root):
            if is_optimizer(optimizer) and "param_id_map" not in optimizer:  # with it, it was gathered already
                root = replaced(root, at, cast(Value, self._optimizer(cast("dict[Key, object]", optimizer), at, said)))
        return replace(
            self.archive,
            root=_without(root, self.path),
            ranks=frozenset({self.rank}) if self.record.rank is not None else frozenset(),
            worlds=(ranks_of(self.world_size),),
            forms=frozenset({f"{self.record.producer} FSDP shard"}),
        )

    def _optimizer(self, optimizer: dict[Key, object], at: _Path, said: Recorded) -> dict[Key, object]:
        producer = self.record.producer
        try:
            ids = names_of_ids(optimizer, self.models.order(), self.world_size, self.models.padded_to)
        except Unnamed as error:
            said.problems.append(unnamed_ids(_dotted(at), str(error), self.file))
            return unnamed_optimizer(optimizer, rank=self.rank, world_size=self.world_size, producer=producer)
        names = sum(len(backing.params) for backing in ids.values())
        message = f"{_dotted(at)}: {len(ids)} ids are {names} parameters, by the lengths of the recorded shards"
        said.notes.append(Note("unflattened", message))
        return named_optimizer(optimizer, ids, self.record, rank=self.rank, world_size=self.world_size)

    def _say(self, said: Recorded) -> None:
        at, record = _dotted(self.path), self.record
        count = sum(len(backing.params) for backing in record.backings)
        message = f"{at} is {record.producer}'s record of {count} parameters in {len(record.backings)} tensors"
        said.evidence.append(Evidence(EvidenceKind.METADATA, message))
        if not record.in_model_order:
            said.evidence.append(UNORDERED)
        said.notes.append(Note("not-carried", f"{at} is not carried: it describes the shards of the source"))
        absent = self.models.absent()
        if absent:
            message = f"{len(absent)} recorded tensors are not there, first {absent[0]}"
            said.problems.append(Problem("missing-key", message, fatal=False, key=absent[0], section=Section.MODEL))
        unrecorded = self.models.unrecorded()
        if unrecorded:
            said.problems.append(unrecorded_tensors(unrecorded, self.file))
        retyped = self.models.retyped()
        if retyped:
            shown = ", ".join(retyped[:_SHOWN]) + (", ..." if len(retyped) > _SHOWN else "")
            message = f"buffers had another type before they were wrapped, and keep the one saved: {shown}"
            said.notes.append(Note("buffer-type", message, keys=tuple(retyped)))


def _without(value: Value, path: _Path) -> Value:
    """``value`` without the entry at ``path``."""
    *above, key = path
    holder: Value = value
    for step in above:
        holder = cast("dict[Key, Value]", holder)[step]
    rest = {name: entry for name, entry in cast("dict[Key, Value]", holder).items() if name != key}
    return replaced(value, tuple(above), rest)


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path)) or "the top level"
