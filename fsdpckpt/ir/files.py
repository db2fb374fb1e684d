"""Describes where the bytes of chunks come from: files of the source, and bytes that this program makes itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.errors import InternalError


@dataclass(frozen=True, slots=True)
class Stored:
    """A file. ``path``: a path or URL that ``storage`` opens; ``nbytes``: its length when it was read."""

    path: str
    nbytes: int

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Zeros:
    """Not a file: the first ``nbytes`` of a source that reads as zeros everywhere (``storage.local.ZeroFile``)."""

    nbytes: int

    def __str__(self) -> str:
        return "zeros that fsdpckpt makes"


@dataclass(frozen=True, slots=True)
class Inline:
    """Not a file: these bytes."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def __str__(self) -> str:
        return "numbers that fsdpckpt makes"


SourceFile: TypeAlias = Stored | Zeros | Inline
"""Only a ``Stored`` has a path. Its text is for people, of each kind."""


def stored_by_number(files: Iterable[SourceFile]) -> dict[int, Stored]:
    """Those of ``files`` that are files, by the number that chunks know them by."""
    return {number: file for number, file in enumerate(files) if isinstance(file, Stored)}


def paths_in(files: Iterable[SourceFile]) -> list[str]:
    """The paths of those of ``files`` that are files."""
    return [file.path for file in files if isinstance(file, Stored)]


def path_of(files: Sequence[SourceFile], number: int) -> str | None:
    """The path of file ``number``, None if there is none of that number, or it is no file."""
    file = files[number] if 0 <= number < len(files) else None
    return file.path if isinstance(file, Stored) else None


def require_stored(file: SourceFile) -> Stored:
    """``file``, which what was decided before shows to be a file. Raises InternalError."""
    if not isinstance(file, Stored):
        raise InternalError(f"{file} are taken for a file")
    return file


def pack_files(files: Iterable[SourceFile]) -> list[list[object]]:
    """Encode ``files`` for other ranks: the path or the bytes of each, None for zeros, and its length."""
    return [[_content(file), file.nbytes] for file in files]


def _content(file: SourceFile) -> str | bytes | None:
    match file:
        case Stored():
            return file.path
        case Inline():
            return file.data
        case Zeros():
            return None


def unpack_files(rows: Iterable[Sequence[object]]) -> list[SourceFile]:
    """The inverse of ``pack_files``."""
    files: list[SourceFile] = []
    for content, nbytes in rows:
        if isinstance(content, str) and isinstance(nbytes, int):
            files.append(Stored(content, nbytes))
        elif isinstance(content, (bytes, bytearray, memoryview)):
            files.append(Inline(bytes(content)))
        elif content is None and isinstance(nbytes, int):
            files.append(Zeros(nbytes))
        else:
            raise TypeError(f"not a packed file: {content!r}, {nbytes!r}")
    return files
