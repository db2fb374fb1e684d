"""Recognises rank files that differ only in numbers of the rank: one is parsed, of the others only these are read.

The files of ranks often differ in nothing but who saved them: the coordinate in the device mesh, the rank, the number
of a GPU. ``RankTemplate`` holds the pickle of one rank. Where that of another rank differs, inside of numbers only, it
is parsed once more with a ``Hole`` in the place of each of these numbers. If that gives the same tree, these numbers
are nowhere but in meshes and in what no reader looks at, and every rank whose bytes are the same but for them has this
tree too. What the mesh cuts is computed anew for each rank, and its bytes lie where its own zip directory says.

Anything else (other rows, another value, a key more) is an archive of its own, to be parsed as any.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pickletools import genops
from typing import Any, NamedTuple, cast

import numpy as np

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.torch.archive import ComparedRecords, OpenedArchive, TorchArchive, parse_archive
from fsdpckpt.formats.torch.distributed import BoxInFile, BoxInLocal, Cut, CutBoxes, Distributed, DistributedParser
from fsdpckpt.formats.torch.mesh import Hole, Mesh, MeshParser
from fsdpckpt.formats.torch.tensors import StoredTensor, TensorBuilder, Wrapped
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.ir.values import Value
from fsdpckpt.storage import ByteSource

_MAX_DIFFERENT = 64  # bytes in which pickles may differ: its coordinate and the number of a GPU take few
_MAX_OFFSET = 1 << 20  # bytes from the begin on that are searched: a mesh is where it is used first
_INTEGERS = frozenset("KMJ")
_TEXTS = {"X": 4, "\x8c": 1}  # opcodes of texts, and the bytes of the count before them

Differences = Mapping[int, int]
"""The bytes in which a pickle differs from that of the rank that was parsed, by their offset."""


class _Operand(NamedTuple):
    """The number, or the text with a number in it, of the opcode at ``opcode``: bytes [begin, end) of the pickle."""

    opcode: int
    begin: int
    end: int
    text: bool


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What is the same for all ranks of one ``RankTemplate``: ``archive`` except its checksums, path, ranks and worlds.

    ``starts``: where the records of the parsed archive begin, ascending. ``cuts``: the distinct ways in which tensors
    are cut, each with the result for the parsed rank. ``cut_of``: the number of the cut, and the local tensor, of each
    ``Distributed`` by its id.
    """

    archive: TorchArchive
    starts: list[int]
    order: Int64Array
    meshes: list[tuple[object, Mesh]]
    cuts: list[tuple[Cut, CutBoxes]]
    cut_of: Mapping[int, tuple[int, StoredTensor]]

    def record(self, offset: int) -> int:
        """The number of the record that contains the tensor bytes at ``offset``."""
        return bisect_right(self.starts, offset) - 1


@dataclass(frozen=True, slots=True, eq=False)
class RankLocations:
    """Where one rank's file differs: ``starts`` of its records as in ``Shared``, its boxes and mesh for each cut."""

    shared: Shared
    starts: Int64Array
    boxes_by_cut: list[tuple[BoxInLocal, ...]]
    meshes: list[Mesh]

    def offset(self, offset: int) -> int:
        """The offset in this rank's file of the bytes at ``offset`` of the parsed archive."""
        record = self.shared.record(offset)
        return int(self.starts[record]) + offset - self.shared.starts[record]

    def boxes(self, distributed: Distributed) -> Sequence[BoxInFile]:
        number, local = self.shared.cut_of[id(distributed)]
        first = self.offset(local.offset)
        itemsize, stride = local.dtype.itemsize, local.stride
        return [BoxInFile(start, size, first + at * itemsize, stride) for start, size, at in self.boxes_by_cut[number]]

    def holders(self, distributed: Distributed) -> tuple[int, ...]:
        number, _ = self.shared.cut_of[id(distributed)]
        return self.meshes[number].ranks


class _MustBeParsedError(FsdpckptError):
    """The archive may be fine, but its content depends on more than numbers in a mesh."""


class _WithHoles(TensorBuilder):
    """Resolves a pickle in which a text as a persistent id stands for a number."""

    def __init__(self, opened: OpenedArchive, holes: Mapping[str, Hole]) -> None:
        super().__init__(opened.records, opened.source.path)
        self._holes = holes

    def storage(self, persistent_id: object) -> object:
        hole = self._holes.get(persistent_id) if isinstance(persistent_id, str) else None
        return super().storage(persistent_id) if hole is None else hole

    def _tensor(self, arguments: tuple[object, ...], named: object, flags: object) -> object:
        made, storage = super()._tensor(arguments, named, flags), cast(Any, arguments[0])
        if isinstance(made, StoredTensor) and made.offset - storage.offset > storage.nbytes:
            raise _MustBeParsedError(f"{self._file}: an empty tensor lies behind its record")
        return made


class _Sealed(ByteSource):
    """A file that must not be read: for another rank the same bytes could mean something else."""

    def __init__(self, path: str) -> None:
        self.path, self.nbytes = path, 0

    def read(self, offset: int, nbytes: int) -> bytes:
        raise _MustBeParsedError(f"{self.path}: {nbytes} bytes at {offset} are part of a value")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read(offset, len(buffer))


class _CutParser(DistributedParser):
    """Remembers how each tensor is cut."""

    def __init__(self, source: ByteSource, meshes: MeshParser) -> None:
        super().__init__(source, meshes)
        self._numbers: dict[object, int] = {}
        self._last: tuple[int, StoredTensor] | None = None
        self.cuts: list[tuple[Cut, CutBoxes]] = []
        self.cut_of: dict[int, tuple[int, StoredTensor]] = {}

    def parse(self, wrapped: Wrapped, key: str) -> Distributed:
        self._last = None
        made = super().parse(wrapped, key)
        if not isinstance(made, Distributed) or self._last is None:
            raise _MustBeParsedError(f"{key} is a {wrapped.kind} whose parts do not follow a mesh")
        self.cut_of[id(made)] = self._last
        return made

    def boxes_of(self, cut: Cut, key: str) -> CutBoxes:
        boxes = super().boxes_of(cut, key)
        number = self._numbers.setdefault((id(cut.mesh), id(boxes)), len(self.cuts))
        if number == len(self.cuts):
            self.cuts.append((cut, boxes))
        self._last = number, cut.local
        return boxes


class RankTemplate:
    """The archive of one rank, and whether others are like it. ``shared``: set as soon as one was; ``unlike``: one
    differed in numbers that matter, so others will too.
    """

    def __init__(self, opened: OpenedArchive, root: Value) -> None:
        self._opened, self._root = opened, root
        self._bytes = np.frombuffer(opened.pickle, np.uint8)
        self._offsets: set[int] = set()  # of all bytes that differed in any rank
        self._numbers: list[_Operand] = []
        self.unlike = False
        self.shared: Shared | None = None

    def differences_of(self, opened: OpenedArchive) -> Differences | None:
        """The numbers in which the pickle of another rank differs; None if it is not like this one."""
        ours, theirs = self._opened.records, opened.records
        if len(opened.pickle) != len(self._bytes) or ours.numbers != theirs.numbers:
            return None
        if not np.array_equal(ours.nbytes, theirs.nbytes):
            return None
        other = np.frombuffer(opened.pickle, np.uint8)
        offsets = np.flatnonzero(other != self._bytes)
        if len(offsets) > _MAX_DIFFERENT:
            return None
        differences = dict(zip(offsets.tolist(), other[offsets].tolist(), strict=True))
        known = self._only_known_numbers(differences) or self._learn_numbers(differences)
        return differences if known else None

    def _only_known_numbers(self, differences: Differences) -> bool:
        """Whether each difference is in a number that may differ between ranks, and leaves a number there."""
        if self.shared is None:
            return False
        for offset, byte in differences.items():
            number = next((number for number in self._numbers if number.begin <= offset < number.end), None)
            if number is None or (number.text and not (_is_digit(byte) and _is_digit(self._opened.pickle[offset]))):
                return False
        return True

    def _learn_numbers(self, differences: Differences) -> bool:
        """Parse once more, with holes in place of these numbers and of those found before."""
        if self.unlike:
            return False
        offsets = self._offsets | set(differences)
        numbers = _operands_at(self._opened.pickle, sorted(offsets))
        shared = self._with_holes(numbers) if numbers is not None else None
        if numbers is None or shared is None:
            self.unlike = True
            return False
        self._offsets, self._numbers, self.shared = offsets, numbers, shared
        return self._only_known_numbers(differences)

    def _with_holes(self, numbers: Sequence[_Operand]) -> Shared | None:
        """What is shared if ranks differ in ``numbers``; None unless the tree is the same without them."""
        data, source = self._opened.pickle, self._opened.source
        holes = {f"hole {number}": Hole(number) for number in range(len(numbers))}
        parts: list[bytes] = []
        at = 0
        for name, number in zip(holes, numbers, strict=True):
            parts += [data[at : number.opcode], b"X%b%bQ" % (len(name).to_bytes(4, "little"), name.encode())]
            at = number.end
        builder = _WithHoles(self._opened, holes)
        compared = ComparedRecords(source, self._opened.checksums(0))
        meshes = MeshParser(compared, self._values(numbers, {}))
        parser = _CutParser(compared, meshes)
        holed = OpenedArchive(_Sealed(source.path), self._opened.records, b"".join([*parts, data[at:]]))
        try:
            archive = parse_archive(holed, 0, builder=builder, parser=parser)
        except (FsdpckptError, TypeError):  # a hole in a place that needs a number
            return None
        if not _same_tree(archive.root, self._root):
            return None
        order = np.argsort(holed.records.offset)
        starts = holed.records.offset[order].tolist()
        return Shared(archive, starts, order, meshes.parsed, parser.cuts, parser.cut_of)

    def _values(self, numbers: Sequence[_Operand], differences: Differences) -> list[int | None]:
        """The numbers of a rank with these ``differences``; None for a text, in which no number is read."""
        values: list[int | None] = []
        for number in numbers:
            content = bytes(differences.get(at, self._opened.pickle[at]) for at in range(number.begin, number.end))
            signed = len(content) == 4
            values.append(None if number.text else int.from_bytes(content, "little", signed=signed))
        return values

    def locations_of(self, source: ByteSource, offsets: Int64Array, differences: Differences) -> RankLocations | None:
        """The locations of the rank whose archive, with records at ``offsets``, has these ``differences``.

        None if its tensors do not follow from its coordinate in the mesh: the archive must then be parsed.
        """
        shared = self.shared
        if shared is None:
            return None
        locations = RankLocations(shared, offsets[shared.order], [], [])
        meshes = MeshParser(source, self._values(self._numbers, differences), locations.offset)
        parser = DistributedParser(source, meshes)
        try:
            of_rank = {id(mesh): meshes.mesh(pickled, "") for pickled, mesh in shared.meshes}
            cuts = [cut._replace(mesh=of_rank[id(cut.mesh)]) for cut, _ in shared.cuts]
            cut_boxes = [parser.boxes_of(cut, "") for cut in cuts]
        except FsdpckptError:
            return None
        if any(boxes[1:] != parsed[1:] for boxes, (_, parsed) in zip(cut_boxes, shared.cuts, strict=True)):
            return None
        return replace(locations, boxes_by_cut=[boxes[0] for boxes in cut_boxes], meshes=[cut.mesh for cut in cuts])


def archive_of(locations: RankLocations, checksums: Checksums, path: str) -> TorchArchive:
    """The archive at ``path`` of a rank like the parsed one. Its root's leaves still have the parsed rank's offsets."""
    shared = locations.shared
    return replace(
        shared.archive,
        checksums=checksums,
        path=path,
        ranks=frozenset(mesh.rank for mesh in locations.meshes if mesh.rank is not None),
        worlds=tuple({id(mesh.world): mesh.world for mesh in locations.meshes}.values()),
    )


def _is_digit(byte: int) -> bool:
    return 0x30 <= byte <= 0x39


def _operands_at(pickle: bytes, offsets: Sequence[int]) -> list[_Operand] | None:
    """The numbers and texts that contain ``offsets`` (ascending); None if one of these is in anything else."""
    operands: list[_Operand] = []
    if offsets and offsets[-1] > _MAX_OFFSET:
        return None
    done = 0  # of offsets
    name, begin = "", 0
    for opcode, _, at in genops(pickle):
        inside = bisect_left(offsets, at or 0, done) - done
        if inside:
            counted = _TEXTS.get(name, 0)
            operand = _Operand(begin, begin + 1 + counted, at or 0, bool(counted))
            if not (counted or name in _INTEGERS) or offsets[done] < operand.begin:
                return None
            operands.append(operand)
            done += inside
        if done == len(offsets):
            return operands
        name, begin = opcode.code, at or 0
    return None


def _same_tree(one: object, other: object) -> bool:
    """Whether two trees are equal, in types and in the order of their keys; a NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other) or (isinstance(one, OrderedDict) and vars(one) != vars(other)):
            return False
        return all(_same_tree(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_tree, one, other))
    if isinstance(one, (StoredTensor, Distributed)):
        return all(getattr(one, name) == getattr(other, name) for name in one.__slots__)
    both_nan = isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other)
    return bool(one == other) or both_nan
