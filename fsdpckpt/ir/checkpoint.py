"""Describes a checkpoint: sections of named tensors and values, whatever files they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from fsdpckpt.flags import Message
from fsdpckpt.ir.account import Account
from fsdpckpt.ir.files import SourceFile
from fsdpckpt.ir.optimizer import BARE_VALUE, Optimizer, ParamKey
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.terms import Container, KeyType, Layout, Section
from fsdpckpt.ir.units import RankOrder, Units
from fsdpckpt.ir.values import Key, Value, leaf_tensors, with_tensors

# From ``ir``: code that uses a checkpoint uses them too.
__all__ = ["Container", "KeyType", "Layout", "Section", "SourceFile"]

STRAY: Final = "stray"
"""The kind of notes on files of another save that lie among those of a checkpoint."""

NoteKind: TypeAlias = (
    Literal["found-below", "model-found", "optimizer-found", "part-of", "several-models", "several-optimizers", "stray"]
    | Literal["chunks-corrected", "empty-entries", "ids-repaired", "inferred", "orders", "replicas", "repeated", "tied"]
    | Literal["buffer-type", "master-weights", "normalised", "unread", "unshared", "unused", "zero-3"]
    | Literal["missing-state", "odd-states", "undetermined", "unlisted", "unmatched", "unnamed", "unproved-order"]
    | Literal["units", "units-ambiguous", "units-unreadable", "flattened-names", "unflattened"]
    | Literal["cast", "config-dtype", "dropped", "encoded", "filled", "ignored", "rekeyed", "renamed"]
    | Literal["groups-flattened", "groups-rebuilt", "plain", "resumption", "unconfigured"]
    | Literal["carried", "cleared", "copies", "linked", "manifest", "not-carried", "resumed", "staged", "unchecked"]
    | Literal["left-behind", "not-synced", "unlocked"]
)
"""What a note is about, in ``fsdpckpt.json`` and ``--json``: what was found, how it was read, and what was written."""

ProblemKind: TypeAlias = (
    Literal["checksum", "digest", "length", "missing-file", "missing-rank", "not-finite", "truncated", "unreadable"]
    | Literal["aliased-states", "incomplete", "local-shape", "outside", "overlap", "quantized", "replica", "step"]
    | Literal["flattened", "flattened-lost", "names", "parameter-order", "rank-mismatch", "state", "units"]
    | Literal["config", "copies", "manifest", "missing-key", "missing-section", "shape", "stray"]
)
"""What is wrong, in ``--json``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint. ``fatal``: converting it would lose or invent data.

    ``section``: None if the whole checkpoint is concerned. A conversion that leaves a section out ignores its problems.
    """

    kind: ProblemKind
    message: str
    fatal: bool = True
    file: str | None = None
    key: str | None = None
    rank: int | None = None
    section: Section | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Message(self.message))


@dataclass(frozen=True, slots=True)
class Note:
    """Something that was inferred, cast, dropped, renamed, repaired or not carried over: every summary shows it.

    ``key``: the one key concerned; ``keys``: all of them if there are many. ``warning``: whether a framework will stop
    because of it, start afresh, or train in another way than before, or something has to be done by hand; then it is
    shown as a warning.
    """

    kind: NoteKind
    message: str
    key: str | None = None
    keys: tuple[str, ...] = ()
    warning: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", Message(self.message))


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


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """Length and CRC-32 of a whole file. ``crc`` is None for a file that was linked, not read.

    ``stored``: how many of its bytes belong to tensors of the checkpoint; None if that is not known.
    """

    nbytes: int
    crc: int | None
    stored: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of the ``fsdpckpt.json`` at ``path``: ``files`` in ``directory`` by name, and ``digests``.

    A digest is the SHA-256 of one tensor's row-major bytes, by ``<section> <key>``; most conversions record none.
    """

    path: str
    directory: str
    files: Mapping[str, ManifestFile]
    digests: Mapping[str, str]

    def path_of(self, name: str) -> str:
        """The path of one of ``files``."""
        return f"{self.directory}/{name}" if self.directory else name


class EvidenceKind(StrEnum):
    """What a piece of evidence is about."""

    CONTAINER = "container"
    SECTIONS = "sections"
    LAYOUT = "layout"
    ORDER = "order"
    METADATA = "metadata"
    FLAVOR = "flavor"
    MANIFEST = "manifest"
    UNITS = "units"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reason why a checkpoint was read the way it was: ``kind`` is for code, ``message`` for people."""

    kind: EvidenceKind
    message: str

    def __str__(self) -> str:
        return self.message


UNORDERED = Evidence(EvidenceKind.ORDER, "keys are not in the order of the state dict they were saved from")
"""Marks a checkpoint whose order of keys must not be taken for that of the parameters."""


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
    dict. All writers keep it there, among the extras.
    """

    section: Section
    name: str
    path: tuple[Key, ...]
    content: ModelState | Optimizer

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
    empty otherwise. ``evidence``: what was recognised and why. ``container``: one of ``Container``, or the name of a
    format that can only be read. ``units``: those beside the checkpoint, and ``units_from`` the file they come from.
    ``directory``: where it was found, at ``source`` or below; "" for one file. ``mesh_devices``: the device types of
    its DTensors' meshes. ``manifest``: that of the directory, if this program wrote it. ``nesting``: the path of keys
    to each main section in its file or DCP directory, and ``flattened_keys`` whether the optimizer's keys are
    ``state.<name>.<state>``. ``orders``: of the ranks whose optimizers number parameters in another order, according to
    the units or ``param_names``; in the IR an id is the same parameter on all ranks. ``ignored``: the files and
    directories below ``source`` that the user asked to leave out, as relative paths. ``named``: further models and
    optimizers, or all of several if none is the main one; ``ir.sections`` has what is done with them.
    ``account``: what became of every file below ``source`` and of every entry in those that were read.
    """

    source: str
    layout: Layout
    container: str
    flavor: str
    world_size: int
    files: tuple[SourceFile, ...]
    model: ModelState | None
    optim: Optimizer | None
    extra: dict[Key, Value]
    rank_extra: tuple[dict[Key, Value], ...] = ()
    checksums: Checksums = field(default_factory=lambda: Checksums.of([]))
    evidence: tuple[Evidence, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    units: Units | None = None
    units_from: str = ""
    directory: str = ""
    manifest: Manifest | None = None
    nesting: Mapping[Section, tuple[Key, ...]] = field(default_factory=dict)
    flattened_keys: bool = False
    mesh_devices: frozenset[str] = frozenset()
    orders: tuple[RankOrder, ...] = ()
    ignored: tuple[str, ...] = ()
    account: Account = field(default_factory=Account)
    named: tuple[NamedSection, ...] = ()

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
                values += [states.values() for states in content.state.values()]
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
    for key, states in optim.state.items():
        for state, leaf in states.items():
            yield key, None if state == BARE_VALUE else state, leaf
    groups: Value = list(optim.param_groups or [])
    yield None, None, {"param_groups": groups, **optim.extra}
