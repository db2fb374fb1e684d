"""Describes where the bytes of chunks come from: files of the source, and bytes that this program makes itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Stored:
    """A file. ``path``: a path or URL that ``storage`` opens; ``nbytes``: its length when it was read."""

    path: str
    nbytes: int

    @property
    def generated(self) -> bool:
        """Whether it is not a file but bytes that this program makes."""
        return False


@dataclass(frozen=True, slots=True)
class Zeros:
    """Not a file: the first ``nbytes`` of a source that reads as zeros everywhere (``storage.local.ZeroFile``)."""

    nbytes: int

    @property
    def path(self) -> str:
        """What takes a path's place in messages; it opens nothing."""
        return ZEROS_TEXT

    @property
    def generated(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Inline:
    """Not a file: these bytes."""

    data: bytes

    @property
    def path(self) -> str:
        """What takes a path's place in messages; it opens nothing."""
        return f"bytes:{self.data.hex()}"

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def generated(self) -> bool:
        return True


SourceFile: TypeAlias = Stored | Zeros | Inline

ZEROS_TEXT: Final = "zeros:"


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
