"""Appends JSON records to a file, durable once ``append`` returns, and reads back those whose checksum is right.

A line is the CRC-32 of the record in eight hexadecimal digits, a space, the record, and a newline. A line that a crash
cut short ends the journal: reading stops there, and appending overwrites it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable

from fsdpckpt.storage.local import sync_directory, target_errors

Record = dict[str, object]

_PREFIX = 9  # bytes: the checksum and the space after it


class Journal:
    """The journal at ``path``, created by the first ``append``. A new one starts with the record ``first()``."""

    def __init__(self, path: str, first: Callable[[], Record] | None = None) -> None:
        self.path = path
        self._first = first
        self._fd = -1

    def append(self, records: list[Record]) -> None:
        """Add ``records`` durably, in one write. Raises TargetUnwritableError."""
        with target_errors(self.path):
            new = self._fd < 0 and self._open()
            if new and self._first is not None:
                records = [self._first(), *records]
            data = b"".join(_line(record) for record in records)
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
            os.fdatasync(self._fd)
        if new:
            sync_directory(os.path.dirname(self.path))

    def _open(self) -> bool:
        """Open after the last valid record; returns whether there was none."""
        end = _scan(self.path)[1]
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        return end == 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_records(path: str) -> list[Record]:
    """The valid records of the journal at ``path``, in order; none when there is no such file."""
    return _scan(path)[0]


def _scan(path: str) -> tuple[list[Record], int]:
    """The records, and the offset where the last one ends."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return [], 0
    records: list[Record] = []
    end = 0
    while (stop := data.find(b"\n", end)) >= 0:
        record = _record(data[end:stop])
        if record is None:
            break
        records.append(record)
        end = stop + 1
    return records, end


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    text = line[_PREFIX:]
    if line[:_PREFIX] != b"%08x " % zlib.crc32(text):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None
