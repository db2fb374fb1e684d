"""Describes a checkpoint: sections of named tensors and values, whatever files they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from fsdpckpt.ir.files import SourceFile
from fsdpckpt.ir.ledger import Evidence, EvidenceKind, Ledger, Note, NoteKind, Problem, ProblemKind
from fsdpckpt.ir.optimizer import Optimizer, OwnValue, ParamGroup, ParamKey
from fsdpckpt.ir.origin import Manifest, ManifestFile, Origin
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.terms import Container, KeyType, Layout, Section
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value, leaf_tensors, with_tensors

# Code that uses a checkpoint uses them too.
__all__ = [
    "Container", "Evidence", "EvidenceKind", "KeyType", "Layout", "Ledger", "Manifest", "ManifestFile", "Note",
    "NoteKind", "Origin", "Problem", "ProblemKind", "Section", "SourceFile",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """The CRC-32s that the source records, in columns: ``nbytes`` from ``offset`` of file ``file`` have ``crc``."""

    file: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    crc: Int64Array

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int]]) -> Checksums:
        """From rows of (file, offset, nbytes, crc)."""
        table = np.asarray(rows, np.int64).reshape(len(rows), 4)
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    @classmethod
    def joined(cls, parts: Iterable[Checksums]) -> Checksums:
        """The records of all ``parts``."""
        columns = [(part.file, part.offset, part.nbytes, part.crc) for part in parts]
        return cls(*map(np.concatenate, zip(*columns, strict=True))) if columns else cls.of([])

    def by_offset(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(nbytes, crc) of each record by its (file, offset)."""
        columns = (self.file.tolist(), self.offset.tolist(), self.nbytes.tolist(), self.crc.tolist())
        return {(file, offset): (nbytes, crc) for file, offset, nbytes, crc in zip(*columns, strict=True)}


class ChunkChecksums:
    """The CRC-32s of chunks that are exactly one record of the source."""

    def __init__(self, checksums: Checksums) -> None:
        self._order = np.lexsort((checksums.offset, checksums.file))
        self._keys = self._key(checksums.file, checksums.offset)[self._order]
        self._checksums = checksums

    def of(self, tensor: Tensor, rows: Int64Array | slice = slice(None)) -> Int64Array:
        """The CRC-32 of each of these chunks, -1 for one that is not exactly one record."""
        chunks, checksums = tensor.chunks, self._checksums
        keys = self._key(chunks.file[rows], chunks.offset[rows])
        nbytes = chunks.size[rows].prod(axis=1) * tensor.dtype.itemsize
        crcs = np.full(len(keys), -1, np.int64)
        position = np.searchsorted(self._keys, keys)
        chunk = np.flatnonzero(position < len(self._keys))
        chunk = chunk[self._keys[position[chunk]] == keys[chunk]]
        record = self._order[position[chunk]]
        exact = checksums.nbytes[record] == nbytes[chunk]
        crcs[chunk[exact]] = checksums.crc[record[exact]]
        return crcs

    @staticmethod
    def _key(file: Int64Array, offset: Int64Array) -> Int64Array:
        # Files of less than 2**42 bytes, fewer than 2**21 of them: both fit into one number.
        return (file << np.int64(42)) + offset


@dataclass(slots=True)
class ModelState:
    """``params``: FQN (exactly as in the source) to tensor, in the source's order; buffers included.

    A value that is not a tensor (``_extra_state`` entries) stays a value. ``metadata``: what ``nn.Module.state_dict``
    attaches as ``_metadata``, None if the source has none.
    """

    params: dict[str, Tensor | Value]
    metadata: Value = None

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ModelState:
        """The model with ``change`` applied to every tensor."""
        return ModelState(with_tensors(self.params, change), self.metadata)


@dataclass(frozen=True, slots=True, eq=False)
class NamedSection:
    """A model or an optimizer beside the main one, or one of several of which none is the main one.

    ``name``: what users call it, unique among the models or the optimizers. ``path``: the keys of its dict in the state
    dict. All writers keep it there, among the extras. ``units``: those of its own flat parameters, None if nothing says
    them. ``written_keys``: in a flattened target, the keys that its optimizer gets; until it is written it has names.
    """

    section: Section
    name: str
    path: tuple[Key, ...]
    content: ModelState | Optimizer
    units: Units | None = None
    written_keys: KeyType | None = None

    @property
    def label(self) -> str:
        """What ``--only`` takes: ``model:generator_ema``."""
        return f"{self.section}:{self.name}"

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))

    def problem(self, found: Problem) -> Problem:
        """``found`` in this section alone, as one of the checkpoint: it says which section has it."""
        key = None if found.key is None else f"{self.dotted}.{found.key}"
        return replace(found, message=f"{self.label}: {found.message}", key=key)


class NamedTensor(NamedTuple):
    """One tensor with its address. ``param`` is the FQN or id as text, or the dotted path in the extras.

    ``state``: the optimizer state's name. For a tensor inside a state or inside a model's value (SOAP's lists,
    bitsandbytes' dicts, ``_extra_state``) with the dotted path to it; None for the model's own tensors and for extras.
    ``of``: the named section that it is in, None for the main ones and for extras.
    """

    section: Section
    param: str
    state: str | None
    tensor: Tensor
    of: NamedSection | None = None

    def __repr__(self) -> str:
        return f"<{self.label} {self.key}: {self.tensor.dtype.name} {list(self.tensor.shape)}, {self.tensor.placement}>"

    @property
    def key(self) -> str:
        """The dotted address within the section: the FQN for ``model``, ``<param>.<state>`` for ``optim``, the dotted
        path for ``extra``. In a named section it begins with the keys of that."""
        key = self.param if self.state is None else f"{self.param}.{self.state}"
        return key if self.of is None else f"{self.of.dotted}.{key}"

    @property
    def label(self) -> str:
        """The section as users name it: ``optim``, ``model:generator_ema``."""
        return str(self.section) if self.of is None else self.of.label


def problem_of(
    kind: ProblemKind,
    tensors: Sequence[NamedTensor],
    what: str,
    *,
    file: str | None = None,
    rank: int | None = None,
    fatal: bool = True,
) -> Problem:
    """The problem ``what`` of ``tensors``, with the key of the first; without any, a problem of the file."""
    if not tensors:
        return Problem(kind, what, fatal, file, rank=rank)
    first, more = tensors[0], len(tensors) - 1
    names = f"{first.section} {first.key}"
    if more:
        names += f" and {more} more {'tensor' if more == 1 else 'tensors'}"
    return Problem(kind, f"{names}: {what}", fatal, file, first.key, rank, first.section)


@dataclass(slots=True, repr=False)
class Checkpoint:
    """Everything a reader learned, without tensor data.

    ``files``: what ``Chunks.file`` indexes. ``extra``: what is neither model nor optimizer, under the source's own keys
    (nesting kept). ``rank_extra``: the extras of each rank if ranks saved different ones (RNG states), index = rank;
    empty otherwise. ``named``: further models and optimizers, or all of several if none is the main one;
    ``ir.sections`` has what is done with them. ``beside``: of a section that was taken out alone, the other optimizers
    of its model, for what they say of its ids and of what is trained. ``units``: those beside the checkpoint.
    ``lacking``: of a checkpoint to write, why the target's framework does not load it until something is done by hand.
    ``copies``: where the model section has the optimizer's weights, those in another dtype that the model computed
    with, under the same names. They are compared (``verify.masters``) and never written.
    """

    origin: Origin
    files: tuple[SourceFile, ...]
    model: ModelState | None = None
    optim: Optimizer | None = None
    extra: dict[Key, Value] = field(default_factory=dict)
    rank_extra: tuple[dict[Key, Value], ...] = ()
    named: tuple[NamedSection, ...] = ()
    beside: tuple[Optimizer, ...] = ()
    units: Units | None = None
    checksums: Checksums = field(default_factory=lambda: Checksums.of([]))
    ledger: Ledger = field(default_factory=Ledger)
    lacking: tuple[str, ...] = ()
    copies: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def params(self) -> Mapping[str, Tensor | Value]:
        """The parameters and buffers of the model by name; none without a model."""
        return self.model.params if self.model is not None else {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of ``params`` that is a tensor."""
        return {name: leaf.shape for name, leaf in self.params.items() if isinstance(leaf, Tensor)}

    @property
    def states(self) -> Mapping[ParamKey, Mapping[str, Tensor | Value]]:
        """The states of each parameter of the optimizer by its key; none without an optimizer."""
        return self.optim.state if self.optim is not None else {}

    @property
    def groups(self) -> Sequence[ParamGroup]:
        """The param groups of the optimizer; none without any."""
        return (self.optim.groups or ()) if self.optim is not None else ()

    @property
    def source(self) -> str:
        return self.origin.source

    @property
    def layout(self) -> Layout:
        return self.origin.layout

    @property
    def container(self) -> str:
        return self.origin.container

    @property
    def flavor(self) -> str:
        return self.origin.flavor

    @property
    def world_size(self) -> int:
        return self.origin.world_size

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence of the ledger, and what the origin says of the order of keys."""
        return (*self.ledger.evidence, *self.origin.evidence())

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.ledger.problems

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes of the ledger, and those on what a conversion may still change."""
        return (*self.ledger.notes, *self.origin.open_notes())

    def noted(self, *notes: Note) -> Checkpoint:
        """The checkpoint with further notes."""
        return replace(self, ledger=self.ledger.with_notes(*notes)) if notes else self

    def lacks(self, *messages: str) -> Checkpoint:
        """The checkpoint with further reasons why the target's framework does not load it, each of which is noted."""
        lacking = replace(self, lacking=(*self.lacking, *messages))
        return lacking.noted(*(Note("unconfigured", message, warning=True) for message in messages))

    def with_problems(self, *problems: Problem) -> Checkpoint:
        """The checkpoint with further problems."""
        return replace(self, ledger=self.ledger.with_problems(*problems)) if problems else self

    def without_order(self) -> Checkpoint:
        """The checkpoint as one whose keys are not in the order of the state dict that they were saved from."""
        return replace(self, origin=replace(self.origin, keys_in_order=False))

    def __repr__(self) -> str:
        """One line: everything in it would fill the screen."""
        return f"<{self.source}: {self.layout}, {self.container}, world size {self.world_size}>"

    def has(self, section: Section) -> bool:
        """Whether it has a model, or an optimizer: the main one or others."""
        main = self.model if section is Section.MODEL else self.optim
        return main is not None or any(named.section is section for named in self.named)

    def with_extras(self, change: Callable[[dict[Key, Value]], dict[Key, Value]]) -> Checkpoint:
        """The checkpoint with ``change`` applied to ``extra`` and to the extras of each rank."""
        return replace(self, extra=change(self.extra), rank_extra=tuple(map(change, self.rank_extra)))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Checkpoint:
        """The checkpoint with ``change`` applied to every tensor but those in param groups."""
        model = self.model.map_tensors(change) if self.model is not None else None
        optim = self.optim.map_tensors(change) if self.optim is not None else None
        named = tuple(replace(section, content=section.content.map_tensors(change)) for section in self.named)
        changed = replace(self, model=model, optim=optim, named=named)
        return changed.with_extras(lambda extra: with_tensors(extra, change))

    def leaves(self) -> Iterator[Tensor]:
        """What ``tensors`` lists, without names, which take time to make: four times as fast."""
        values: list[Iterable[Value]] = []
        for content in (self.model, self.optim, *(section.content for section in self.named)):
            if isinstance(content, ModelState):
                values.append(content.params.values())
            elif content is not None:
                entries = (entry for _, entry in content.items())
                values += [[each.value] if isinstance(each, OwnValue) else each.values() for each in entries]
                values.append([list(content.param_groups or []), content.extra])
        values.append([self.extra, *self.rank_extra])
        for value in chain.from_iterable(values):
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (dict, list, tuple)):
                yield from (tensor for _, tensor in leaf_tensors(value))

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor of every section: model, then optimizer (the user's entries last), named sections, extra."""
        if self.model is not None:
            yield from _named_tensors(Section.MODEL, _model_entries(self.model))
        if self.optim is not None:
            yield from _named_tensors(Section.OPTIM, _optim_entries(self.optim))
        for named in self.named:
            content = named.content
            entries = _model_entries(content) if isinstance(content, ModelState) else _optim_entries(content)
            yield from _named_tensors(named.section, entries, named)
        of_ranks: Value = {f"rank{rank}": extra for rank, extra in enumerate(self.rank_extra)}
        yield from _named_tensors(Section.EXTRA, [(None, None, self.extra), (None, None, of_ranks)])


_Entries: TypeAlias = Iterable[tuple[ParamKey | None, str | None, Value]]
"""What may hold tensors: parameter, optimizer state, value. Without a parameter, a dict of what belongs to none."""


def _named_tensors(section: Section, entries: _Entries, named: NamedSection | None = None) -> Iterator[NamedTensor]:
    for param, state, value in entries:
        if isinstance(value, Tensor):
            yield NamedTensor(section, str(param), state, value, named)
        elif isinstance(value, (dict, list, tuple)):
            for path, tensor in leaf_tensors(value):
                if param is None:
                    yield NamedTensor(section, ".".join(map(str, path)), None, tensor, named)
                else:
                    inner = path if state is None else (state, *path)
                    yield NamedTensor(section, str(param), ".".join(map(str, inner)), tensor, named)


def _model_entries(model: ModelState) -> _Entries:
    return ((name, None, leaf) for name, leaf in model.params.items())


def _optim_entries(optim: Optimizer) -> _Entries:
    for key, entry in optim.items():
        if isinstance(entry, OwnValue):
            yield key, None, entry.value
        else:
            yield from ((key, state, leaf) for state, leaf in entry.items())
    groups: Value = list(optim.param_groups or [])
    yield None, None, {"param_groups": groups, **optim.extra}
