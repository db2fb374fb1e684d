"""Describes a checkpoint as ``inspect`` shows it: summary, tensors, param groups, extras, problems. Reads no data."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from fsdpckpt import flags
from fsdpckpt.credentials import without_credentials
from fsdpckpt.globs import matches_any
from fsdpckpt.ir import SectionName
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, NamedSection, NamedTensor, Note, Section
from fsdpckpt.ir.files import Stored, stored_by_number
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.stored_once import have_own_bytes
from fsdpckpt.ir.tensors import Boxes, Stats, Tensor
from fsdpckpt.ir.values import Global, Key, Object, Value, value_text, walk
from fsdpckpt.notebook import table
from fsdpckpt.text import JsonText, plural, shape_text, size_text
from fsdpckpt.transform.selection import require_globs, tensors_of

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

LONGEST_TEXT = 200  # characters of an object's or a bytes value's text in the document
_CACHED_LAYOUTS = 64  # whose boxes are kept as text: a model has few layouts, each of many tensors


@dataclass(frozen=True, slots=True)
class SectionSummary:
    """Totals of one section; bytes that several names share are counted once.

    ``dtypes``: name -> number of tensors; ``parameters``: number of parameter keys.
    """

    tensors: int
    parameters: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True, repr=False)
class Description:
    """``checkpoint`` and a summary of it. ``tensors``: the selected ones, in the checkpoint's order.

    ``stats``: those of each, or None for a tensor that has none; None if they were not computed.
    ``key_type``: of the optimizer as stored; flat shards are shown by name if their units are known.
    """

    checkpoint: Checkpoint
    sections: dict[str, SectionSummary]
    tensors: tuple[NamedTensor, ...]
    stats: tuple[Stats | None, ...] | None = None
    key_type: KeyType | None = None

    def __repr__(self) -> str:
        """One line: the positions of all chunks would fill the screen."""
        checkpoint, source = self.checkpoint, without_credentials(self.checkpoint.source)
        return (
            f"<{source}: {checkpoint.layout}, {checkpoint.container}, world size {checkpoint.world_size}, "
            f"{plural(len(self.tensors), 'tensor')}, {plural(len(checkpoint.problems), 'problem')}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: totals by section, problems, the first tensors."""
        heading = repr(self)[1:-1]
        totals = [
            (name, f"{each.tensors:,}", f"{each.elements:,}", size_text(each.nbytes), ", ".join(each.dtypes))
            for name, each in self.sections.items()
        ]
        problems = [(problem.kind, problem.message) for problem in self.checkpoint.problems]
        rows = (
            (each.label, each.key, each.tensor.dtype.name, shape_text(each.tensor.shape), size_text(each.tensor.nbytes))
            for each in self.tensors
        )
        return (
            table(heading, ("section", "tensors", "elements", "size", "dtypes"), totals, len(totals))
            + table("problems:" if problems else "problems: none", ("kind", "problem"), problems, len(problems))
            + table("tensors:", ("section", "key", "dtype", "shape", "size"), rows, len(self.tensors))
        )

    def to_json(self, *, ranks: bool = False) -> dict[str, Json]:
        """The document of ``inspect --json``; with ``pieces`` for ``ranks``, with ``stats`` if they were computed."""
        document = self.document(ranks=ranks)
        rows = [json.loads(row) if isinstance(row, JsonText) else row for row in document["tensors"]]
        return {**document, "tensors": rows}

    def document(self, *, ranks: bool) -> dict[str, Any]:
        """``to_json`` with an iterator in place of the list of tensors: their chunks are too many to be in memory at
        once.
        """
        checkpoint = self.checkpoint
        optim, account = checkpoint.optim, checkpoint.ledger.account
        return {
            "source": without_credentials(checkpoint.source),
            "layout": str(checkpoint.layout),
            "container": str(checkpoint.container),
            "flavor": checkpoint.flavor,
            "world_size": checkpoint.world_size,
            "key_type": self.key_type,
            "sections": {str(name): json_value(asdict(summary)) for name, summary in self.sections.items()},
            "tensors": _rows_with_chunks(self) if ranks else _rows(self),
            "param_groups": [json_value(group) for group in (optim.param_groups or [])] if optim is not None else [],
            "named": [_named_json(named) for named in checkpoint.named],
            "extra": extra_json(checkpoint),
            "problems": [json_value(problem.to_json()) for problem in checkpoint.problems],
            "notes": [_note_json(note) for note in checkpoint.notes],
            "evidence": list(map(str, checkpoint.evidence)),
            "files": [
                {"path": without_credentials(file.path), "nbytes": file.nbytes} for file in stored_files(checkpoint)
            ],
            "account": {
                "files": [{"path": file.path, "fate": str(file.fate), "detail": file.detail} for file in account.files],
                "entries": [
                    {"part": entry.part, "key": entry.key, "read_as": list(entry.read_as)} for entry in account.entries
                ],
            },
        }


def _note_json(note: Note) -> object:
    """What users may rely on: ``damage`` and ``for_verify`` say what ``verify`` does with it."""
    return json_value({name: value for name, value in asdict(note).items() if name not in ("damage", "for_verify")})


def _named_json(named: NamedSection) -> Json:
    """One of several models or optimizers: how ``--only`` and the state dict call it, and an optimizer's groups."""
    row: dict[str, Json] = {"section": str(named.section), "name": named.name, "path": [str(key) for key in named.path]}
    if isinstance(named.content, Optimizer):
        groups = named.content.param_groups or []
        row |= {"key_type": named.content.key_type, "param_groups": [json_value(group) for group in groups]}
    return row


def describe(
    checkpoint: Checkpoint, keys: Sequence[str] = (), section: Section | SectionName | None = None
) -> Description:
    """Summarise ``checkpoint`` and list its tensors, without statistics.

    ``keys``: only those with a key that one of these globs matches; ``section``: only those in it. Raises UsageError
    for globs that match none, and for a section that ``checkpoint`` does not have.
    """
    every = list(checkpoint.tensors())
    of_section = every if section is None else list(tensors_of(checkpoint, section))
    if keys:
        require_globs(flags.keys, keys, [(named.key,) for named in of_section], checkpoint.source)
    by_section: dict[str, list[NamedTensor]] = {}
    for named in every:
        by_section.setdefault(named.label, []).append(named)
    chosen = [named for named in of_section if not keys or matches_any(named.key, keys)]
    sections = {name: _summary(tensors) for name, tensors in by_section.items()}
    key_type = checkpoint.optim.key_type if checkpoint.optim is not None else None
    return Description(checkpoint, sections, tuple(chosen), key_type=key_type)


def stored_files(checkpoint: Checkpoint) -> list[Stored]:
    """The files of ``checkpoint``, without the values that this program computed."""
    return list(stored_by_number(checkpoint.files).values())


def _summary(tensors: list[NamedTensor]) -> SectionSummary:
    own = have_own_bytes([named.tensor for named in tensors])
    once = [named.tensor for named, has_bytes in zip(tensors, own, strict=True) if has_bytes]
    return SectionSummary(
        tensors=len(tensors),
        parameters=len({named.param for named in tensors}),
        elements=sum(tensor.numel for tensor in once),
        nbytes=sum(tensor.nbytes for tensor in once),
        dtypes=dict(Counter(named.tensor.dtype.name for named in tensors)),
    )


def _rows(description: Description) -> Iterator[dict[str, Json]]:
    """One JSON object for each tensor, without its chunks."""
    for number, named in enumerate(description.tensors):
        tensor = named.tensor
        row: dict[str, Json] = {
            "section": named.label,
            "param": named.param,
            "state": named.state,
            "key": named.key,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "numel": tensor.numel,
            "nbytes": tensor.nbytes,
            "placement": tensor.placement,
        }
        if description.stats is not None:
            stats = description.stats[number]
            row["stats"] = json_value(asdict(stats)) if stats is not None else None
        yield row


def _rows_with_chunks(description: Description) -> Iterator[JsonText]:
    for row, chunks in zip(_rows(description), _chunk_texts(description), strict=True):
        head = json.dumps(row, ensure_ascii=False, allow_nan=False)
        yield JsonText(f'{head[:-1]}, "pieces": {chunks}}}')


def _chunk_texts(description: Description) -> Iterator[str]:
    """The chunks of each tensor as one JSON text: an object for each of millions of chunks takes longer."""
    paths = [
        json.dumps(without_credentials(file.path), ensure_ascii=False) if isinstance(file, Stored) else "null"
        for file in description.checkpoint.files
    ]
    box_texts: dict[tuple[Boxes, int], list[str]] = {}  # of tensors that are cut alike
    for named in description.tensors:
        chunks, itemsize = named.tensor.chunks, named.tensor.dtype.itemsize
        layout = chunks.boxes, itemsize
        if layout not in box_texts:
            if len(box_texts) == _CACHED_LAYOUTS:
                box_texts.clear()
            nbytes = (chunks.size.prod(axis=1) * itemsize).tolist()
            boxes = np.stack([chunks.start, chunks.start + chunks.size], axis=2).tolist()
            box_texts[layout] = [f'"nbytes": {size}, "box": {box}}}' for size, box in zip(nbytes, boxes, strict=True)]
        files = [paths[file] if 0 <= file < len(paths) else "null" for file in chunks.file.tolist()]
        columns = zip(chunks.rank.tolist(), files, chunks.offset.tolist(), box_texts[layout], strict=True)
        rows = [f'{{"rank": {rank}, "file": {file}, "offset": {offset}, {rest}' for rank, file, offset, rest in columns]
        yield f"[{', '.join(rows)}]"


def extra_json(checkpoint: Checkpoint) -> list[Json]:
    """Everything but the tensors of model and optimizer: extras by dotted key, then the extras of each rank."""
    rows: list[Json] = []
    extras: list[tuple[int | None, dict[Key, Value]]] = [(None, checkpoint.extra)]
    extras += list(enumerate(checkpoint.rank_extra))
    if checkpoint.optim is not None:
        extras.append((None, checkpoint.optim.extra))
    for rank, extra in extras:
        for path, value in walk(extra) if extra else ():
            row: dict[str, Json] = {
                "key": ".".join(map(str, path)),
                "type": type_name(value),
                "value": json_value(value),
            }
            if rank is not None:
                row["rank"] = rank
            rows.append(row)
    return rows


def type_name(value: Value) -> str:
    """The name of a value's type: ``int``, ``tensor``, ``numpy.ndarray``, ..."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Object):
        return str(value.function)
    return "None" if value is None else type(value).__name__


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as Python and JSON write them


def json_value(value: object) -> Json:
    """``value`` as JSON, for people: tuples become lists, tensors and objects text, NaN a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): json_value(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(child) for child in value]
    if isinstance(value, (set, frozenset)):
        return sorted((json_value(child) for child in value), key=str)
    return str(value) if isinstance(value, Global) else value_text(value, LONGEST_TEXT)
