"""Reads the plain tensors of a large state dict in bulk, with the same result as reading them one by one.

Beside its name, a tensor of a state dict is a few opcodes that differ between tensors of one shape only in the key of
the storage and in memo numbers. One regular expression, which matches at every place, goes over all opcodes, so that
each match begins at an opcode. It takes such tensors out and puts a number as a persistent id in their place. The rest,
names and values, is checked and loaded as any pickle.

Anything unusual (another opcode or class, a reference to a part of a tensor, a memo number that is written twice, an
error of any kind) is left to the general reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import compress, count
from operator import methodcaller
from struct import Struct
from typing import NamedTuple

import numpy as np

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.torch.archive import TorchArchive, local_tensor, open_archive, parse_archive
from fsdpckpt.formats.torch.tensors import StoredTensor, TensorBuilder
from fsdpckpt.formats.zip import ZipDirectory
from fsdpckpt.ir.dtypes import STORAGE_DTYPES, DType
from fsdpckpt.ir.tensors import Chunks, Int64Array, Tensor
from fsdpckpt.storage import ByteSource

_MAX_TEXT = 255  # bytes of a text that the expression matches; longer ones are few
_GET = rb"(?:h.|j.{4})"
_PUT = rb"(q.|r.{4}|)"
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}))"
_EXTENTS = rb"(\)|" + _INTEGER + rb"(?:\x85|" + _INTEGER + rb"(?:\x86|" + _INTEGER + rb"\x87))|\(" + _INTEGER + rb"++t)"
_NAME = rb"c[^\n]{1,80}\n[^\n]{1,80}\n"


@cache
def _opcodes() -> re.Pattern[bytes]:
    """An expression that matches at every place: a tensor, another opcode, or one byte that is neither."""
    text = rb"X(?:" + b"|".join(rb"\x%02x\x00{3}.{%d}" % (n, n) for n in range(_MAX_TEXT + 1)) + rb")"
    return re.compile(
        rb"((" + _GET + rb"\(\(" + _GET + _GET + rb")X(.\x00{3}\d{1,18})" + _PUT
        + rb"(" + _GET + _INTEGER + rb")t" + _PUT + rb"Q(" + _INTEGER + rb")" + _EXTENTS + _PUT + _EXTENTS + _PUT
        + rb"([\x88\x89]" + _GET + rb")\)R" + _PUT + rb"t" + _PUT + rb"R" + _PUT
        + rb")|(" + text + rb"|[(})\]Nuseab\x81\x85-\x89RQt.]|" + _INTEGER + rb"|G.{8}|" + _GET + rb"|\x80\x02|" + _NAME
        + rb")" + _PUT
        + rb"|\Z|.",
        re.DOTALL,
    )  # fmt: skip


_TEXT_HEAD = Struct("<xI")
_GETS = re.compile(_GET, re.DOTALL)
_SHORT = re.compile(rb"(?:[qh].)*+", re.DOTALL)
_PUTS = re.compile(rb"q.|r.{4}", re.DOTALL)
_WORTH = 1 << 14  # bytes of a pickle from which scanning is faster than loading it unchanged

_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_STORAGE = b"X\x07\x00\x00\x00storage"
_DICT = b"ccollections\nOrderedDict\n"
_CLASSES = {b"ctorch\n%b\n" % name.encode(): dtype for name, dtype in STORAGE_DTYPES.items()}


@dataclass(slots=True, eq=False)
class _Scanned:
    """``out``: the opcodes that are left, those that memoise apart. ``forms``: the common part of tensors of one type
    and shape, with its number: the references before the storage's key, its location and length, the storage offset,
    size, strides, and what follows. ``first_use``: the length of ``out`` when each form appeared first. ``form``,
    ``key``: of each tensor. ``dropped``: the memo numbers that tensors write.
    """

    out: list[bytes] = field(default_factory=list)
    forms: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    first_use: list[int] = field(default_factory=list)
    form: list[int] = field(default_factory=list)
    key: list[bytes] = field(default_factory=list)
    dropped: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


class _NeedsGeneralReaderError(FsdpckptError):
    """The archive may be fine, but must be read tensor by tensor."""


def read_tensors(source: ByteSource, file_id: int) -> TorchArchive:
    """``read_archive``, with each stored tensor as ``local_tensor`` makes it. Raises what that raises."""
    opened = open_archive(source)

    def leaf(stored: StoredTensor) -> Tensor:
        return local_tensor(stored, file_id)

    if len(opened.pickle) < _WORTH:
        return parse_archive(opened, file_id, leaf)
    try:
        scanned = _scan(opened.pickle)
        builder = _Tensors(opened.records, source.path, scanned, file_id)
        return parse_archive(replace(opened, pickle=b"".join(scanned.out)), file_id, leaf, builder)
    except FsdpckptError:  # the general reader reads it, or reports the error
        return parse_archive(opened, file_id, leaf)


def _scan(data: bytes) -> _Scanned:
    """Take the plain tensors out of the pickle. Raises _NeedsGeneralReaderError if it has none."""
    scanned = _Scanned()
    out, forms, form_of, key_of = scanned.out, scanned.forms, scanned.form, scanned.key
    dropped = bytearray()
    at, stop = 0, False
    while not stop:
        for (*(tensor, head, key, p1, storage, p2, first, size, p3, stride, p4, tail, p5, p6, p7, opcode, put),) in map(
            methodcaller("groups", b""), _opcodes().finditer(data, at)
        ):
            if tensor:
                at += len(tensor)
                parts = (head, storage, first, size, stride, tail)
                number = forms.get(parts)
                if number is None:
                    number = forms[parts] = len(forms)
                    scanned.first_use.append(len(out))
                out.append(b"J%bQ" % len(key_of).to_bytes(4, "little"))
                form_of.append(number)
                key_of.append(key)
                if p1 or p2 or p3 or p4 or p5 or p6 or p7:
                    dropped += b"".join((p1, p2, p3, p4, p5, p6, p7))
            elif opcode:
                at += len(opcode) + len(put)
                out.append(opcode)
                if put:
                    out.append(put)
                elif opcode == b".":
                    stop = True
                    break
            else:
                at = _long_text(data, at, scanned)
                break
    if not scanned.key:
        raise _NeedsGeneralReaderError("no tensors in bulk")
    scanned.dropped = _memo_numbers(dropped)
    if len(dropped) and scanned.dropped.max() >= len(data):
        raise _NeedsGeneralReaderError("a memo number that is too large")
    return scanned


def _long_text(data: bytes, at: int, scanned: _Scanned) -> int:
    """Skip the long text at ``at``, and the opcode that memoises it."""
    if data[at : at + 1] != b"X" or at + _TEXT_HEAD.size > len(data):
        raise _NeedsGeneralReaderError("another opcode")
    end = at + _TEXT_HEAD.size + int(_TEXT_HEAD.unpack_from(data, at)[0])
    put = _PUTS.match(data, end)
    scanned.out.append(data[at:end])
    if put is not None:
        scanned.out.append(put[0])
    return end if put is None else put.end()


def _memo_numbers(opcodes: bytes | bytearray) -> Int64Array:
    """The memo numbers that these opcodes write or read."""
    short = len(_SHORT.match(opcodes)[0])  # type: ignore[index]  # it matches nothing, too
    rows = np.frombuffer(opcodes, np.uint8, offset=short) if short < len(opcodes) else np.empty(0, np.uint8)
    if len(rows) % 5 == 0 and np.isin(rows[::5], (ord("r"), ord("j"))).all():
        long = rows.reshape(-1, 5)[:, 1:].copy().view("<u4").ravel()
        return np.concatenate([np.frombuffer(opcodes[1:short:2], np.uint8), long]).astype(np.int64)
    references = re.findall(rb"[qh].|[rj].{4}", opcodes, re.DOTALL)
    return np.array([_memo_number(opcode) for opcode in references], np.int64)


def _memo_number(opcode: bytes) -> int:
    return int.from_bytes(opcode[1:], "little")


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    """The integers in the opcodes of a tuple, or of one integer."""
    numbers: list[int] = []
    at = int(opcodes[:1] == b"(")
    while at < len(opcodes) and opcodes[at] in b"KMJ\x8a":
        kind = opcodes[at]
        if kind == 0x8A:
            at += 1
        width = opcodes[at] if kind == 0x8A else {ord("K"): 1, ord("M"): 2, ord("J"): 4}[kind]
        signed = kind in b"J\x8a"
        numbers.append(int.from_bytes(opcodes[at + 1 : at + 1 + width], "little", signed=signed))
        at += 1 + width
    return tuple(numbers)


class _Form(NamedTuple):
    """Tensors of one storage type and shape. ``nbytes``: of the storage, in which the tensor begins at ``first``."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    first: int
    whole: Chunks
    sharded: bool | None


class _Tensors(TensorBuilder):
    """Resolves a pickle whose tensors were taken out: their numbers are its persistent ids."""

    def __init__(self, records: ZipDirectory, file: str, scanned: _Scanned, file_id: int) -> None:
        super().__init__(records, file)
        memo = _TensorMemo(scanned)
        forms = [
            self._form(form, memo, before, file_id)
            for form, before in zip(scanned.forms, scanned.first_use, strict=True)
        ]
        if any(key[0] != len(key) - 4 for key in scanned.key):
            raise _NeedsGeneralReaderError("a key of another length")
        record = np.array([records.numbers.get(f"data/{key[4:].decode()}", -1) for key in scanned.key], np.int64)
        needed = np.array([(form.nbytes, form.first) for form in forms], np.int64)[scanned.form]
        if (record < 0).any() or (needed[:, 0] > records.nbytes[record]).any():
            raise _NeedsGeneralReaderError("a storage without a record of its own")
        offsets = (records.offset[record] + needed[:, 1]).reshape(-1, 1)
        self._made: list[Tensor] = []
        for number, offset in zip(scanned.form, offsets, strict=True):
            dtype, shape, _, _, whole, sharded = forms[number]
            chunks = Chunks(whole.rank, whole.file, offset, whole.boxes)
            self._made.append(Tensor(dtype, shape, chunks, sharded))

    def _form(self, opcodes: tuple[bytes, ...], memo: _TensorMemo, before: int, file_id: int) -> _Form:
        """What ``TensorBuilder`` makes of these, with its checks."""
        head, storage, first, size, stride, tail = opcodes
        function, word, kind, location, after = _references(head, storage, tail)
        dtype = _CLASSES.get(memo.at(kind, before))
        expected = ((function, _REBUILD), (word, _STORAGE), (after, _DICT))
        if dtype is None or any(memo.at(get, before) != opcode for get, opcode in expected):
            raise _NeedsGeneralReaderError("another function or class")
        if not memo.at(location, before).startswith(b"X"):
            raise _NeedsGeneralReaderError("another location")
        (numel,), (begin,) = _numbers(storage[len(location) :]), _numbers(first)
        shape, strides, extent = self._shape(_numbers(size), _numbers(stride))
        if numel < 0 or begin < 0 or (extent and begin + extent > numel):
            raise _NeedsGeneralReaderError("a tensor that does not fit its storage")
        at = begin * dtype.itemsize
        whole = Chunks.whole(file=file_id, offset=at, shape=shape, stride=strides)
        return _Form(dtype, shape, numel * dtype.itemsize, at, whole, None if shape else False)

    def storage(self, persistent_id: object) -> object:
        """The tensor of that number: in the file itself every persistent id is a tuple (``_TensorMemo``)."""
        return self._made[persistent_id] if type(persistent_id) is int else super().storage(persistent_id)


class _TensorMemo:
    """What the memo holds at the numbers that tensors which were taken out refer to.

    Raises _NeedsGeneralReaderError where opcodes refer to a number that such a tensor writes, where a number that
    tensors refer to is written twice, and where the opcodes that are left make a tensor otherwise, or a persistent id
    that is no tuple.
    """

    def __init__(self, scanned: _Scanned) -> None:
        out = scanned.out
        used = {get for head, storage, *_, tail in scanned.forms for get in _references(head, storage, tail)}
        gets = used.union(filter(methodcaller("startswith", (b"h", b"j")), out))
        numbers = _memo_numbers(b"".join(gets))
        if np.isin(scanned.dropped, numbers).any():
            raise _NeedsGeneralReaderError("a part of a tensor is referred to")
        looked_at = {b"Q", *(put for get in used for put in _puts(_memo_number(get)))}
        self._written: dict[
            int, tuple[int, bytes]
        ] = {}  # by memo number: how many opcodes are before it, and what is put
        for number in compress(count(), map(looked_at.__contains__, out)):
            opcode = out[number]
            if opcode == b"Q":
                if b"t" not in (out[number - 1], out[number - 2]):
                    raise _NeedsGeneralReaderError("a persistent id that is not a tuple")
            elif self._written.setdefault(_memo_number(opcode), (number, out[number - 1]))[0] != number:
                raise _NeedsGeneralReaderError("a memo number that is written twice")
        names = filter(methodcaller("startswith", b"c"), out)
        if any(b"_rebuild" in name and name != _REBUILD for name in names):
            raise _NeedsGeneralReaderError("tensors of another kind")

    def at(self, get: bytes, before: int) -> bytes:
        """The opcode of what ``get`` refers to, which must be written before that many opcodes."""
        number, opcode = self._written.get(_memo_number(get), (before, b""))
        if number >= before:
            raise _NeedsGeneralReaderError("a memo number that is written later")
        return opcode


def _references(head: bytes, storage: bytes, tail: bytes) -> list[bytes]:
    return [*_GETS.findall(head), _GETS.findall(storage)[0], tail[1:]]


def _puts(number: int) -> list[bytes]:
    long = b"r" + number.to_bytes(4, "little")
    return [b"q%c" % number, long] if number < 256 else [long]
