"""Reads the header of a safetensors file strictly, and says how a checkpoint with an optimizer lies in such files.

Format (safetensors README, "Format"): 8 bytes little-endian header length, a JSON object of that length (padded with
spaces), then the data. Each tensor names its dtype, shape and ``data_offsets`` [begin, end) in the data; together they
cover the data without overlap and without holes. ``__metadata__`` maps strings to strings.

What a checkpoint has beyond named tensors is one JSON document under ``METADATA_KEY`` of ``__metadata__``, beside
``"format": "pt"``. When a group of shards carries it, it stands in the first shard only (any shard is accepted when
reading); several documents in one group are joined entry by entry. Files without it are plain weights.

Tensor keys
    directory form: three groups of files, read separately,
        ``model.safetensors`` or ``model-0000i-of-0000N.safetensors`` with ``model.safetensors.index.json``,
            key = the model FQN itself;
        ``optimizer.safetensors`` or ``optimizer-0000i-of-0000N.safetensors`` with ``optimizer.safetensors.index.json``,
            key = ``state.<param>.<state>``;
        ``extra_state.safetensors``: all extras.
    one file that holds one section only: the same keys as in the directory form.
    one file that holds both: ``"sections": true``, keys ``model.<fqn>`` and ``optimizer.state.<param>.<state>``.
    a tensor inside extras or param groups: any key (the writer uses ``extra.<path>``, ``optimizer.<path>``), found
    through the ``{"$tensor": key}`` that stands in its place in the encoded value.

The document (every entry but ``version`` may be absent; "encoded" means ``ir.values.encode``)
    ``version``          1
    ``sections``         true when both sections share one file, see above
    ``model_aliases``    {alias: key}: tied weights, stored once under ``key`` (a model FQN)
    ``model_order``      [fqn, ...]: every model entry in the source's order, aliases and values included
    ``model_values``     encoded {fqn: value}: model entries that are not tensors (``_extra_state``)
    ``model_metadata``   encoded ``_metadata`` of the state dict
    ``optim``            {
        ``key_type``     "id" or "name": the type of the parameter keys
        ``param_keys``   [[key, ...], ...]: the keys of each param group
        ``order``        encoded [[param, [state name, ...]], ...]: every state in the source's order
        ``state_values`` encoded {param: {state: value}}: states that are not tensors
        ``param_groups`` encoded list of groups, null when the source has none
        ``extra``        encoded: top-level entries beside ``state`` and ``param_groups``
    }
    ``extra``            encoded extras under the source's own keys
    ``raw``              {tensor key: [torch dtype name, [shape]]}: dtypes safetensors has no code for, stored as
                         ``U8`` with shape ``[nbytes]``
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from fsdpckpt.errors import COPY_AGAIN, SourceError, SourceUnsupportedError, damaged
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS, SAFETENSORS_DTYPES, DType
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text, plural, truncate

METADATA_KEY = "fsdpckpt"
VERSION = 1
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

_LONG = 1 << 20  # bytes: a longer header is checked before it is parsed
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

# Codes that newer libraries write, and that the safetensors version this program writes for cannot read.
_READ_ONLY_CODES = {"F8_E8M0": DTYPES["float8_e8m0fnu"]}


class HeaderTensor(NamedTuple):
    """One tensor: row-major elements, ``nbytes`` from byte ``offset`` of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """``tensors`` in the header's own order; ``begin`` and ``end`` are the bytes of the whole blob in the file."""

    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]
    begin: int
    end: int


def looks_like_safetensors(head: bytes, nbytes: int) -> bool:
    """Whether ``head`` (the first 9 bytes or more of ``nbytes``) can begin a safetensors blob."""
    if len(head) <= LENGTH_BYTES:
        return False
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    return 2 <= length <= min(MAX_HEADER_BYTES, nbytes - LENGTH_BYTES) and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def read_header(source: ByteSource, *, begin: int = 0, end: int | None = None) -> Header:
    """The header of the blob in [begin, end) of ``source``, by default all of it.

    Raises SourceCorruptError for anything the format forbids, SourceUnsupportedError that lists every tensor whose
    dtype torch does not have.
    """
    end = source.nbytes if end is None else end
    parser = _HeaderParser(source.path)
    if end - begin < LENGTH_BYTES:
        parser.refuse("the file is too short for a safetensors header", found=f"{end - begin} bytes")
    length = int.from_bytes(source.read(begin, LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        parser.refuse("the header is impossibly long", expected=f"at most {MAX_HEADER_BYTES} bytes", found=str(length))
    data_begin = begin + LENGTH_BYTES + length
    if data_begin > end:
        parser.refuse(
            "the header ends after the file",
            expected=f"at least {bytes_text(data_begin - begin)}",
            found=str(end - begin),
        )
    table = parser.parse(source.read(begin + LENGTH_BYTES, length))
    metadata = parser.metadata(table.pop("__metadata__", {}))
    tensors = parser.tensors(table, data_begin, end)
    return Header(tensors, metadata, begin, end)


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return table


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


class _HeaderParser:
    """Checks one header; every error names the file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def refuse(
        self, what: str, *, key: str | None = None, expected: str | None = None, found: str | None = None
    ) -> NoReturn:
        why = "the file was truncated, is still being written, or is not a safetensors file"
        raise damaged(self.file, what, expected, found, key=key, why=why, next_step=COPY_AGAIN)

    def parse(self, text: bytes) -> dict[str, object]:
        if not text.startswith(b"{"):
            self.refuse("the header does not begin with '{'", found=repr(text[:8]))
        if len(text) > _LONG:
            self._check_punctuation(text)
        try:
            table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        except _DuplicateKey as error:
            self.refuse("a key appears twice in the header", key=str(error), found=str(error))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            self.refuse("the header is not valid JSON", found=f"{type(error).__name__}: {error}"[:200])
        if not isinstance(table, dict):
            self.refuse("the header is not a JSON object", found=type(table).__name__)
        return table

    def _check_punctuation(self, text: bytes) -> None:
        """Refuse a header with more objects and lists than any honest one: three bytes of JSON make a list of sixty."""
        plain = _STRINGS.sub(b"", text)
        objects, lists, pairs, items = (plain.count(mark) for mark in (b"{", b"[", b":", b","))
        if objects > 2 + pairs // 3 or lists > 2 * objects or items > pairs + MAX_DIMENSIONS * objects:
            self.refuse(
                "the header is not valid JSON of tensors",
                expected="dtype, shape and data_offsets of each",
                found=f"{objects} objects, {lists} lists",
            )

    def metadata(self, data: object) -> dict[str, str]:
        if data is None:  # as without it
            return {}
        if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
            self.refuse("__metadata__ is not a map of strings to strings", key="__metadata__", found=truncate(data))
        return {str(key): str(value) for key, value in data.items()}

    def tensors(self, table: Mapping[str, object], data_begin: int, end: int) -> dict[str, HeaderTensor]:
        tensors: dict[str, HeaderTensor] = {}
        unknown: list[str] = []
        spans: list[tuple[int, int, str]] = []
        for key, entry in table.items():
            code, shape, begin, stop = self._entry(key, entry)
            dtype = SAFETENSORS_DTYPES.get(code) or _READ_ONLY_CODES.get(code)
            if dtype is None:
                unknown.append(f"{key}: {code}")
                continue
            nbytes = dtype.itemsize
            for extent in shape:
                nbytes *= extent
            if nbytes != stop - begin:
                self.refuse(
                    f"{key} does not have as many bytes as its shape",
                    key=key,
                    expected=f"{bytes_text(nbytes)} for {code} {list(shape)}",
                    found=bytes_text(stop - begin),
                )
            spans.append((begin, stop, key))
            tensors[key] = HeaderTensor(dtype, shape, data_begin + begin, nbytes)
        if unknown:
            raise self._unknown_dtypes(unknown)
        self._check_cover(spans, end - data_begin)
        return tensors

    def _entry(self, key: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self.refuse(f"{key} does not have dtype, shape and data_offsets", key=key, found=truncate(entry))
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(code) is not str:
            self.refuse(f"the dtype of {key} is not a string", key=key, found=truncate(code))
        if not _is_counts(shape):
            self.refuse(f"the shape of {key} is not a list of sizes", key=key, found=truncate(shape))
        # Dimensions without elements count for strides; torch fails too: "Stride calculation overflowed".
        if len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) >= 1 << 59:
            self.refuse(f"the shape of {key} is larger than any can be", key=key, found=truncate(shape))
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self.refuse(f"the data_offsets of {key} are not a range", key=key, found=truncate(offsets))
        return code, tuple(shape), offsets[0], offsets[1]

    def _unknown_dtypes(self, unknown: list[str]) -> SourceError:
        return SourceUnsupportedError(
            f"{self.file}: {plural(len(unknown), 'tensor', 'have')} a dtype that has no whole-byte torch counterpart",
            details=unknown[:50],
            why="a newer library wrote the file, or it holds packed sub-byte numbers",
            next_step="save these tensors in another dtype",
            file=self.file,
            key=unknown[0].partition(":")[0],
        )

    def _check_cover(self, spans: list[tuple[int, int, str]], nbytes: int) -> None:
        """Check that tensors neither overlap nor leave gaps, and that nothing follows the last one."""
        position = 0
        for begin, stop, key in sorted(spans):
            if begin < position:
                self.refuse(f"{key} overlaps the tensor before it", key=key, found=f"byte {begin} before {position}")
            if begin > position:
                self.refuse(f"bytes before {key} belong to no tensor", key=key, found=f"{position} to {begin}")
            position = stop
        if position != nbytes:
            self.refuse(
                "the data does not have the length that the header says",
                expected=bytes_text(position),
                found=bytes_text(nbytes),
            )


def _is_counts(value: object) -> bool:
    return type(value) is list and all(type(item) is int and item >= 0 for item in value)


def model_key(fqn: str, *, sections: bool) -> str:
    """The safetensors key of a model entry."""
    return f"model.{fqn}" if sections else fqn


OWN_VALUE = ""
"""The name in the document of a value that a user put into an optimizer's ``state`` in place of states."""


def state_key(param: int | str, state: str, *, sections: bool) -> str:
    """The safetensors key of one optimizer state of one parameter."""
    return f"optimizer.state.{param}.{state}" if sections else f"state.{param}.{state}"
