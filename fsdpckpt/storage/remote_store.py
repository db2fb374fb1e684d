"""What one run sees of object stores and web servers: what is where, and in which state it was first met."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdpckpt.errors import SourceError, SourceMissingError, SourceUnrecognisedError
from fsdpckpt.storage.protocols import Entry, FileIdentity, remote_identity
from fsdpckpt.storage.remote_file import REQUESTS, Extents, RemoteFile, fetcher
from fsdpckpt.storage.retry import tried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["RemoteStore", "filesystem_of", "is_http"]

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp requests",
    "https": "aiohttp requests",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
}


def is_http(url: str) -> bool:
    """A web server has neither directories nor a list of what it holds, only pages."""
    return url.startswith(("http://", "https://"))


def filesystem_of(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system that fsspec opens ``url`` with, and the name of the object there. Raises SourceError."""
    from fsspec.core import url_to_fs

    try:
        filesystem, name = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise _not_opened(url, error) from None
    if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
        raise SourceUnrecognisedError(
            f"{url} is a file of this machine, which is named by its path", file=url, next_step=f"give {name} instead"
        )
    return filesystem, name


def _not_opened(url: str, error: ImportError | ValueError) -> SourceError:
    package = _PACKAGES.get(url.partition(":")[0])
    absent = package is not None and find_spec(package.partition(" ")[0]) is None
    if absent or isinstance(error, ImportError):  # fsspec says which package to install
        return SourceError(
            f"{url} cannot be opened: {error}",
            file=url,
            why="fsspec opens this kind of URL with a package that is not installed",
            next_step=f"pip install {package or 'the package named above'}",
        )
    if package is not None:
        return SourceError(
            f"{url} cannot be opened: {error}",
            file=url,
            why=f"{package} takes credentials and endpoints from its own environment variables and files",
            next_step="check the URL, and the credentials of this store",
        )
    return SourceUnrecognisedError(
        f"{url} cannot be opened: {error}",
        file=url,
        next_step="give a path, or a URL that fsspec knows: s3://, gs://, https://, ...",
    )


class RemoteStore:
    """Listings and identities are asked for once and then remembered, so that a run sees one state of them.

    ``extents``: the metadata that was fetched, of all files together. Any thread may call any method.
    """

    def __init__(self) -> None:
        self.extents = Extents()
        self._known: dict[str, FileIdentity] = {}
        self._listed: dict[str, list[Entry]] = {}
        self._fresh: set[AbstractFileSystem] = set()
        self._lock = threading.Lock()

    def stat(self, url: str) -> Entry | None:
        """What is at ``url``, or None when nothing is."""
        name = _last(url)
        known = self._known.get(url)
        if known is not None:
            return Entry(name, url, known.nbytes, directory=False)
        found = self._look(url)
        if isinstance(found, FileIdentity):
            self._remember(found)
            return Entry(name, url, found.nbytes, directory=False)
        return Entry(name, url, 0, directory=True) if found else None

    def list_directory(self, url: str) -> list[Entry]:
        """The entries of a directory, sorted by name. Raises SourceError."""
        directory = url.rstrip("/")
        if directory not in self._listed:
            identities, below = self._names(directory)
            for identity in identities:
                self._remember(identity)
            entries = [Entry(_last(each.path), each.path, each.nbytes, directory=False) for each in identities]
            entries += [Entry(_last(each), each, 0, directory=True) for each in below]
            self._listed[directory] = sorted(entries, key=lambda entry: entry.name)
        return self._listed[directory]

    def identity(self, url: str, *, again: bool = False) -> FileIdentity:
        """The state in which the object at ``url`` was first met, or ``again``, in which it is now.

        Raises SourceMissingError, SourceError.
        """
        known = self._known.get(url)
        if known is not None and not again:
            return known
        found = self._look(url, again=again)
        if not isinstance(found, FileIdentity):
            raise SourceMissingError(
                f"{url} does not exist", file=url, next_step="check the URL, then run the command again"
            )
        return found if again else self._remember(found)

    def open(self, url: str) -> RemoteFile:
        identity = self.identity(url)
        filesystem, name = self._filesystem(url)
        return RemoteFile(identity, fetcher(filesystem, name, identity), self.extents)

    def identities(self, urls: Sequence[str], *, again: bool = False) -> list[FileIdentity]:
        """``identity`` of each, asked for side by side."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(lambda url: self.identity(url, again=again), urls))

    def _filesystem(self, url: str) -> tuple[AbstractFileSystem, str]:
        filesystem, name = filesystem_of(url)
        with self._lock:
            if filesystem not in self._fresh:  # fsspec keeps listings as long as the process lives
                self._fresh.add(filesystem)
                filesystem.invalidate_cache()
        return filesystem, name

    def _remember(self, identity: FileIdentity) -> FileIdentity:
        with self._lock:
            return self._known.setdefault(identity.path, identity)

    def _look(self, url: str, *, again: bool = False) -> FileIdentity | bool:
        """The identity of an object, True for a directory, False for nothing."""
        filesystem, name = self._filesystem(url)
        if is_http(url):
            from fsdpckpt.storage import http

            return http.look(filesystem, url)
        if again:
            filesystem.invalidate_cache(filesystem._parent(name))
        try:
            info = tried(lambda: filesystem.info(name), url=url, doing="looking it up")
        except SourceMissingError:
            return False
        return True if info["type"] == "directory" else remote_identity(url, info)

    def _names(self, directory: str) -> tuple[list[FileIdentity], list[str]]:
        """The objects right below ``directory``, and its subdirectories."""
        filesystem, name = self._filesystem(directory)
        if is_http(directory):
            from fsdpckpt.storage import http

            return http.names(filesystem, directory)
        identities, below = [], []
        for info in tried(lambda: filesystem.ls(name, detail=True), url=directory, doing="listing it"):
            base = str(info["name"]).rstrip("/").rpartition("/")[2]
            if info["type"] == "directory":
                below.append(f"{directory}/{base}")
            elif base and str(info["name"]).rstrip("/") != name.rstrip("/"):  # else the directory's own placeholder
                identities.append(remote_identity(f"{directory}/{base}", info))
        return identities, below


def _last(url: str) -> str:
    return url.partition("?")[0].rstrip("/").rpartition("/")[2] if is_http(url) else url.rstrip("/").rpartition("/")[2]
