"""Keeps a journal of what an upload has sent: which objects are complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any, cast

from fsdpckpt.execute.checks import NO_PARTS
from fsdpckpt.execute.journal import Journal, JournaledWindows, Record, RunIdentity, first_record, windows_record
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage import ByteTarget


@dataclass(frozen=True, slots=True)
class SentObject:
    """The object for the target file ``name`` is complete. The store calls its state ``tag``. ``crc``: its CRC-32.
    ``received``: there are bytes in it that another worker read.
    """

    name: str
    nbytes: int
    tag: str
    crc: int
    received: bool


def sent_objects(records: Sequence[Record]) -> list[SentObject]:
    """What a journal of this program lists."""
    rows = [row for record in records[1:] for row in cast("list[list[Any]]", record.get("sent", []))]
    return [SentObject(*row) for row in rows if len(row) == len(fields(SentObject))]


class SentJournal:
    """The journal of an upload: a record for each object that is complete. See ``Recording``.

    An object is listed with what was read of the source until then, which has at least what it is made of.
    """

    def __init__(self, path: str, identity: Callable[[], RunIdentity]) -> None:
        self.nbytes = 0
        self._journal = Journal(path, lambda: first_record(identity()))
        self._new_parts: Callable[[], Int64Array] = lambda: NO_PARTS
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Say in the journal which run this is, before any object is complete."""
        self._journal.append([])

    def start(self, new_parts: Callable[[], Int64Array]) -> None:
        self._new_parts = new_parts

    def wrote(self, number: int, file: ByteTarget, part: tuple[int, int, int], *, received: bool = False) -> None:
        """A window of an object can be lost until the object is complete."""

    def sent(self, sent: SentObject) -> None:
        with self._lock:
            read_until_now = JournaledWindows(parts=self._new_parts())
            self._journal.append([{"sent": [list(astuple(sent))], **windows_record(read_until_now)}])
            self.nbytes += sent.nbytes

    def retract(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._journal.path)

    def close(self, *, complete: bool, patience: float | None = None) -> None:
        self._journal.close()
