"""Reads a directory in a store whose upload is not complete, as it will be."""

from __future__ import annotations

import posixpath

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.union_sources import UnionSources
from fsdpckpt.storage import ByteSource, Entry
from fsdpckpt.storage.local import LocalFile


class AnnouncedSources(UnionSources):
    """For rank 0: the files of a directory in a store whose upload is not complete, as they will be.

    ``names``: all of them, with sizes; those in ``local`` are not there yet, and are read from a disk.
    """

    def __init__(self, group: Group, url: str, names: dict[str, int], local: dict[str, str]) -> None:
        super().__init__(group)
        self._url = url
        self._names = names
        self._local = local

    def list_directory(self, path: str) -> list[Entry]:
        below = path.rstrip("/")
        if below != self._url and not below.startswith(f"{self._url}/"):
            return super().list_directory(path)
        inside = below[len(self._url) :].lstrip("/")
        prefix = f"{inside}/" if inside else ""
        entries: dict[str, Entry] = {}
        for name, nbytes in self._names.items():
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition("/")
                entries[first] = Entry(first, f"{below}/{first}", 0 if rest else nbytes, directory=bool(rest))
        return [entries[name] for name in sorted(entries)]

    def stat(self, path: str) -> Entry | None:
        below = path.rstrip("/")
        if below == self._url:
            return Entry(posixpath.basename(below), below, 0, directory=True)
        parent, _, name = below.rpartition("/")
        if not parent.startswith(self._url):
            return super().stat(path)
        return next((entry for entry in self.list_directory(parent) if entry.name == name), None)

    def open_new(self, path: str) -> ByteSource:
        return LocalFile(self._local[path]) if path in self._local else super().open_new(path)
