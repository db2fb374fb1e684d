"""Lists and opens files in object stores and on web servers, each in the state in which the run first saw it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdpckpt.errors import SourceError, SourceMissingError, SourceUnrecognisedError, to_copy
from fsdpckpt.storage.protocols import Entry, FileIdentity, NoFile, remote_identity
from fsdpckpt.storage.remote_file import REQUESTS, RangeCache, RemoteFile, fetcher
from fsdpckpt.storage.retry import with_retries

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
    """Whether ``url`` is of a web server, which has neither directories nor a list of its files, only pages."""
    return url.startswith(("http://", "https://"))


def filesystem_of(url: str, *, examples: str = "s3://, gs://, https://, ...") -> tuple[AbstractFileSystem, str]:
    """fsspec's file system for ``url``, and the name of the object in it.

    Raises SourceError, in which ``examples`` are suggested for an unknown kind of URL.
    """
    from fsspec.core import url_to_fs

    for package in ("gcsfs", "s3fs"):  # they log what they also raise; handlers that the user set still get it
        logging.getLogger(package).addHandler(logging.NullHandler())
    try:
        filesystem, name = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise _open_error(url, error, examples) from None
    if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
        raise SourceUnrecognisedError(
            f"{url} is a local file, which is given by its path", file=url, next_step=f"give {name} instead"
        )
    return filesystem, name


def _open_error(url: str, error: ImportError | ValueError, examples: str) -> SourceError:
    package = _PACKAGES.get(url.partition(":")[0])
    missing = package is not None and find_spec(package.partition(" ")[0]) is None
    if missing or isinstance(error, ImportError):  # fsspec says which package to install
        return SourceError(
            f"{url} cannot be opened: {error}",
            file=url,
            why="fsspec opens this kind of URL with a package that is not installed",
            next_step=to_copy("install it", f"pip install {package or 'the package named above'}"),
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
        next_step=f"give a path, or a URL that fsspec knows: {examples}",
    )


class RemoteStore:
    """Remembers every listing and identity, so that a run sees one state of them. Any thread may call any method.

    ``cache``: the small ranges that were fetched, of all files together.
    """

    def __init__(self) -> None:
        self.cache = RangeCache()
        self._identities: dict[str, FileIdentity] = {}
        self._listings: dict[str, list[Entry]] = {}
        self._refreshed: set[AbstractFileSystem] = set()
        self._lock = threading.Lock()

    def stat(self, url: str) -> Entry | None:
        """What is at ``url``, or None when nothing is."""
        name = _last(url)
        answer = self._identities.get(url) or self._look_up(url)
        if isinstance(answer, FileIdentity):
            return Entry(name, url, self._remember(answer).nbytes, directory=False)
        return Entry(name, url, 0, directory=True) if answer is NoFile.DIRECTORY else None

    def list_directory(self, url: str) -> list[Entry]:
        """The entries of a directory, sorted by name. Raises SourceError."""
        directory = url.rstrip("/")
        if directory not in self._listings:
            files, subdirectories = self._list_names(directory)
            entries = [Entry(_last(file.path), file.path, file.nbytes, directory=False) for file in files]
            entries += [Entry(_last(path), path, 0, directory=True) for path in subdirectories]
            for file in files:
                self._remember(file)
            self._listings[directory] = sorted(entries, key=lambda entry: entry.name)
        return self._listings[directory]

    def identity(self, url: str, *, again: bool = False) -> FileIdentity:
        """The state in which the object at ``url`` was first seen; with ``again`` the state it is in now.

        Raises SourceMissingError, SourceError.
        """
        known = self._identities.get(url)
        if known is not None and not again:
            return known
        answer = self._look_up(url, again=again)
        if not isinstance(answer, FileIdentity):
            raise SourceMissingError(f"{url} does not exist", file=url, next_step="check the URL", run_again=True)
        return answer if again else self._remember(answer)

    def open(self, url: str) -> RemoteFile:
        identity = self.identity(url)
        filesystem, name = self._filesystem(url)
        return RemoteFile(identity, fetcher(filesystem, name, identity), self.cache)

    def identities(self, urls: Sequence[str], *, again: bool = False) -> list[FileIdentity]:
        """``identity`` of each URL, requested in parallel."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(lambda url: self.identity(url, again=again), urls))

    def _filesystem(self, url: str) -> tuple[AbstractFileSystem, str]:
        filesystem, name = filesystem_of(url)
        with self._lock:
            if filesystem not in self._refreshed:  # fsspec keeps listings for as long as the process lives
                self._refreshed.add(filesystem)
                filesystem.invalidate_cache()
        return filesystem, name

    def _remember(self, identity: FileIdentity) -> FileIdentity:
        with self._lock:
            return self._identities.setdefault(identity.path, identity)

    def _look_up(self, url: str, *, again: bool = False) -> FileIdentity | NoFile:
        """The identity of the object at ``url``, or what is there instead."""
        filesystem, name = self._filesystem(url)
        if is_http(url):
            from fsdpckpt.storage import http

            return http.look_up(filesystem, url)
        if again:
            filesystem.invalidate_cache(filesystem._parent(name))
        try:
            info = with_retries(lambda: filesystem.info(name), url=url, action="looking it up")
        except SourceMissingError:
            return NoFile.NOTHING
        return NoFile.DIRECTORY if info["type"] == "directory" else remote_identity(url, info)

    def _list_names(self, directory: str) -> tuple[list[FileIdentity], list[str]]:
        """The objects right below ``directory``, and its subdirectories."""
        filesystem, name = self._filesystem(directory)
        if is_http(directory):
            from fsdpckpt.storage import http

            return http.list_names(filesystem, directory)
        files, subdirectories = [], []
        for info in with_retries(lambda: filesystem.ls(name, detail=True), url=directory, action="listing it"):
            base = str(info["name"]).rstrip("/").rpartition("/")[2]
            if info["type"] == "directory":
                subdirectories.append(f"{directory}/{base}")
            elif base and str(info["name"]).rstrip("/") != name.rstrip("/"):  # else the directory's own placeholder
                files.append(remote_identity(f"{directory}/{base}", info))
        return files, subdirectories


def _last(url: str) -> str:
    """The last part of the path of ``url``."""
    return (url.partition("?")[0] if is_http(url) else url).rstrip("/").rpartition("/")[2]
