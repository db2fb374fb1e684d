"""Lists and opens files in object stores and on web servers, each in the state in which the run first saw it.

Web servers know neither directories nor, mostly, a list of their files. The files of a directory are those that its
index page links to, those at names that checkpoints use (``.metadata``, which index pages hide), and those that the
lists among them (``fsdpckpt.json``, safetensors' index) name.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

from fsdpckpt.credentials import hidden_in
from fsdpckpt.errors import SourceError, SourceMissingError, SourceUnrecognisedError, to_copy
from fsdpckpt.storage.protocols import UPLOADING, Entry, FileIdentity, remote_identity
from fsdpckpt.storage.remote_file import (
    REQUESTS,
    RangeCache,
    RemoteFile,
    fetcher,
    http_get,
    http_identity,
    http_tag,
    no_ranges_error,
    require_plain,
)
from fsdpckpt.storage.retry import HttpStatusError, store_errors, with_retries

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


EXAMPLES = "s3://, gs://, https://, ..."  # of URLs that can be read


def is_http(url: str) -> bool:
    """Whether ``url`` is on a web server, which has neither directories nor a list of its files, only pages."""
    return url.startswith(("http://", "https://"))


def filesystem_of(url: str, *, examples: str = EXAMPLES) -> tuple[AbstractFileSystem, str]:
    """fsspec's file system for ``url``, and the name of the object in it.

    Raises SourceError, in which ``examples`` are suggested for an unknown kind of URL.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class

    for package in ("gcsfs", "s3fs"):  # they log what they also raise; handlers that the user set still get it
        logging.getLogger(package).addHandler(logging.NullHandler())
    require_port(url)
    try:
        if "::" in url.partition("://")[2]:  # in a name or an IPv6 address: no chain, as in simplecache::s3://
            kind = get_filesystem_class(url.partition("://")[0])
            filesystem, name = kind(**kind._get_kwargs_from_urls(url)), kind._strip_protocol(url)
        else:
            filesystem, name = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise _open_error(url, error, examples) from None
    if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
        raise SourceUnrecognisedError(
            f"{url} is a local file, which is given by its path", file=url, next_step=f"give {name} instead"
        )
    return filesystem, name


def require_port(url: str) -> None:
    """Raises SourceUnrecognisedError if what stands for the port in ``url`` is no port. It is not shown: it may be half
    of a password.
    """
    try:
        port_is_known = not is_http(url) or urlsplit(url).port != 0
    except ValueError as error:  # also of unpaired brackets, in Python's words
        port_is_known = "port" not in str(error).lower()
    if not port_is_known:
        raise SourceUnrecognisedError(
            f"{url} has no usable port",
            file=url,
            expected="a number from 1 to 65535 after the host's colon",
            next_step="correct the URL; in a user name or a password, write / as %2F and : as %3A",
        )


def _open_error(url: str, error: ImportError | ValueError | NotImplementedError, examples: str) -> SourceError:
    said = hidden_in(str(error), url)
    package = _PACKAGES.get(url.partition(":")[0])
    missing = package is not None and find_spec(package.partition(" ")[0]) is None
    if missing or isinstance(error, ImportError):  # fsspec says which package to install
        return SourceError(
            f"{url} cannot be opened: {said}",
            file=url,
            why="fsspec opens this kind of URL with a package that is not installed",
            next_step=to_copy("install it", f"pip install {package}") if package else "install that package",
        )
    if package is not None:
        return SourceError(
            f"{url} cannot be opened: {said}",
            file=url,
            why=f"{package} takes credentials and endpoints from its own environment variables and files",
            next_step="check the URL, and the credentials of this store",
        )
    return SourceUnrecognisedError(
        f"{url} cannot be opened: {said}",
        file=url,
        next_step=f"give a path, or a URL that fsspec knows: {examples}",
    )


class NoFile(Enum):
    """A URL that is not a file: what is there instead."""

    DIRECTORY = "directory"
    NOTHING = "nothing"


class RemoteStore:
    """Remembers every listing and identity, so that a run sees one state of them. Thread-safe.

    ``cache``: the small ranges that were fetched, of all files together.
    """

    def __init__(self) -> None:
        self.cache = RangeCache()
        self._identities: dict[str, FileIdentity] = {}
        self._listings: dict[str, list[Entry]] = {}
        self._refreshed: set[AbstractFileSystem] = set()
        self._lock = threading.Lock()

    def stat(self, url: str) -> Entry | None:
        """The entry at ``url``, or None if there is none."""
        try:
            name = _last_component(url)
        except ValueError as error:  # of a URL with unpaired brackets
            raise _open_error(url, error, EXAMPLES) from None
        answer = self._identities.get(url) or self._look_up(url)
        if isinstance(answer, FileIdentity):
            return Entry(name, url, self._remember(answer).nbytes, directory=False)
        return Entry(name, url, 0, directory=True) if answer is NoFile.DIRECTORY else None

    def list_directory(self, url: str) -> list[Entry]:
        """The entries of a directory, sorted by name. Raises SourceError."""
        directory = url.rstrip("/")
        if directory not in self._listings:
            files, subdirectories = self._list_names(directory)
            entries = [Entry(_last_component(file.path), file.path, file.nbytes, directory=False) for file in files]
            entries += [Entry(_last_component(path), path, 0, directory=True) for path in subdirectories]
            for file in files:
                self._remember(file)
            self._listings[directory] = sorted(entries, key=lambda entry: entry.name)
        return self._listings[directory]

    def identity(self, url: str, *, again: bool = False) -> FileIdentity:
        """The state in which the object at ``url`` was first seen; with ``again`` the state it is in now.

        Raises SourceMissingError, SourceError.
        """
        first = self._identities.get(url)
        if first is not None and not again:
            return first
        answer = self._look_up(url, again=again)
        if not isinstance(answer, FileIdentity):
            raise SourceMissingError(f"{url} does not exist", file=url, next_step="check the URL", run_again=True)
        return answer if again else self._remember(answer)

    def open(self, url: str) -> RemoteFile:
        """The object at ``url``, in the state in which it was first seen. Raises SourceMissingError, SourceError."""
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
            return look_up_url(filesystem, url)
        if again:
            filesystem.invalidate_cache(filesystem._parent(name))
        try:
            info = with_retries(lambda: filesystem.info(name), url=url, action="looking it up")
        except SourceMissingError:
            return NoFile.NOTHING
        except (ValueError, NotImplementedError) as error:  # huggingface_hub looks at the URL only now
            raise _open_error(url, error, EXAMPLES) from None
        return NoFile.DIRECTORY if info["type"] == "directory" else remote_identity(url, info)

    def _list_names(self, directory: str) -> tuple[list[FileIdentity], list[str]]:
        """The objects right below ``directory``, and its subdirectories."""
        filesystem, name = self._filesystem(directory)
        if is_http(directory):
            return names_below_url(filesystem, directory)
        files, subdirectories = [], []
        for info in with_retries(lambda: filesystem.ls(name, detail=True), url=directory, action="listing it"):
            base = str(info["name"]).rstrip("/").rpartition("/")[2]
            if info["type"] == "directory":
                subdirectories.append(f"{directory}/{base}")
            elif base and str(info["name"]).rstrip("/") != name.rstrip("/"):  # else the directory's own placeholder
                files.append(remote_identity(f"{directory}/{base}", info))
        return files, subdirectories


def _last_component(url: str) -> str:
    """The last part of the path of ``url``: the name of a file or directory, as it was before URLs escaped it."""
    path = urlsplit(url).path if is_http(url) else url
    name = path.rstrip("/").rpartition("/")[2]
    return unquote(name) if is_http(url) else name


MAX_LIST = 64 << 20  # bytes: a longer file is not taken for a list of names
MAX_PAGE = 16 << 20  # bytes of an index page that are read: a hundred thousand links

# How to get the names of the other files of a checkpoint out of one that lists them. The DCP reader itself reads a
# directory's .metadata.
_NAMES_IN: dict[str, Callable[[Any], Iterable[str]]] = {
    "fsdpckpt.json": lambda document: document["files"],
    "model.safetensors.index.json": lambda document: set(document["weight_map"].values()),
}
_PROBED = (".metadata", *_NAMES_IN, "units.json", "model.safetensors", UPLOADING)
_ABSENT = frozenset({401, 403, 404, 410})  # stores answer 403 for what does not exist, to clients that may not list
_HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)


def look_up_url(filesystem: Any, url: str) -> FileIdentity | NoFile:
    """The identity of the file at ``url``, or what is there instead. Raises SourceError.

    Raises SourceUnsupportedError if the server does not send ranges of the file.
    """
    answer = _request(filesystem, url)
    if answer is NoFile.NOTHING and _files(filesystem, (f"{url}/{name}" for name in _PROBED)):
        return NoFile.DIRECTORY
    return answer


def names_below_url(filesystem: Any, directory: str) -> tuple[list[FileIdentity], list[str]]:
    """The files of ``directory`` that can be found, and its subdirectories. Raises SourceError."""
    links = _page_links(filesystem, directory)
    files = _files(filesystem, (_join(directory, name) for name in _PROBED))
    listed = [_join(directory, name) for file in files for name in _listed_names(filesystem, file)]
    probed = {file.path for file in files}
    others = [url for url in dict.fromkeys([*links, *listed]) if url not in probed]
    files += _files(filesystem, others)
    subdirectories = [url.rstrip("/") for url in others if url.endswith("/")]
    if not files and not subdirectories:
        raise SourceUnrecognisedError(
            f"{directory}: this server does not list directories",
            file=directory,
            expected=f"an index page with links, or one of {', '.join(_PROBED)}",
            found="none of them",
            why="HTTP has no directories; index pages are switched off here, or the checkpoint is another kind",
            next_step="give the URL of one file, use the store's own scheme (s3://, gs://), or switch index pages on "
            "(nginx: autoindex on)",
        )
    return sorted(files, key=lambda file: file.path), subdirectories


def _files(filesystem: Any, urls: Iterable[str]) -> list[FileIdentity]:
    """The identities of those of ``urls`` that are files, requested in parallel."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = pool.map(lambda url: _request(filesystem, url), urls)
        return [answer for answer in answers if isinstance(answer, FileIdentity)]


def _request(filesystem: Any, url: str) -> FileIdentity | NoFile:
    """``look_up_url`` with a single request: for the first byte, since its headers describe the file."""
    from fsspec.asyn import sync

    async def first_byte() -> FileIdentity | NoFile:
        async with http_get(filesystem, url, 0, 1, expected={200, 206, 416, *_ABSENT}) as answer:
            require_plain(url, answer.headers)
            identity = http_identity(url, answer.headers)
            if answer.status in (206, 416) and identity is not None:
                return identity
            if answer.status in _ABSENT:
                return NoFile.DIRECTORY if answer.url.path.endswith("/") else NoFile.NOTHING
            if answer.status != 200:  # a range without its place in the file
                raise HttpStatusError(answer.status, answer.reason or "")
            if answer.url.path.endswith("/") or answer.content_type == "text/html":  # most likely an index page
                return NoFile.DIRECTORY
            if answer.content_length == 0:
                return FileIdentity(url, 0, tag=http_tag(answer.headers))
            raise no_ranges_error(url)

    try:
        request = with_retries(lambda: sync(filesystem.loop, first_byte), url=url, action="looking it up")
        return cast("FileIdentity | NoFile", request)
    except SourceMissingError:
        return NoFile.NOTHING


def _page_links(filesystem: Any, directory: str) -> list[str]:
    """The links on the directory's page to entries right below it; subdirectories end in a slash. Empty
    without a page.
    """

    def fetch() -> list[str]:
        try:
            return _fetch_links(filesystem, f"{directory}/")
        except store_errors() as error:
            if isinstance(error, FileNotFoundError) or getattr(error, "status", None) in _ABSENT:
                return []  # no page: the usual names are tried instead
            raise

    links = with_retries(fetch, url=directory, action="listing it")
    base = unquote(urlsplit(directory).path).rstrip("/") + "/"  # servers and users escape differently
    names = []
    for link in links:
        path = unquote(urlsplit(link).path)
        name = path[len(base) :] if path.startswith(base) else ""
        if name.strip("/") and "/" not in name.rstrip("/"):
            names.append(_join(directory, name))
    return sorted(set(names))


def _listed_names(filesystem: Any, identity: FileIdentity) -> list[str]:
    """The file names in the file ``identity``, if it is one of ``_NAMES_IN``."""
    names_of = _NAMES_IN.get(identity.path.rpartition("/")[2])
    if names_of is None or identity.nbytes > MAX_LIST:
        return []
    file = RemoteFile(identity, fetcher(filesystem, identity.path, identity), RangeCache())
    try:
        names = [str(name) for name in names_of(json.loads(file.read(0, file.nbytes)))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # its reader reports what is wrong with it
    return [name for name in names if name and "/" not in name]


def _join(directory: str, name: str) -> str:
    return f"{directory}/{quote(name, safe='/')}"


def _fetch_links(filesystem: Any, url: str) -> list[str]:
    """The links on the page at ``url``; empty if it is not a page.

    Raises FileNotFoundError, HttpStatusError and what the session raises.
    """
    from fsspec.asyn import sync

    async def page() -> str:
        async with http_get(filesystem, url, expected={200}) as answer:
            if answer.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower() != "text/html":
                return ""
            data = bytearray()
            while len(data) < MAX_PAGE and (more := await answer.content.readany()):
                data += more
            return data[:MAX_PAGE].decode(errors="ignore")

    return links_of(url, cast(str, sync(filesystem.loop, page)))


def links_of(url: str, text: str) -> list[str]:
    """The links to the same server in the HTML page ``text`` at ``url``, as whole URLs, sorted."""
    from html import unescape  # its table of entities takes time

    server = urlsplit(url).netloc
    links: set[str] = set()
    for part in text.split("<")[1:]:
        tag = part.partition(">")[0]
        if tag[:1] not in ("a", "A") or not tag[1:2].isspace():
            continue
        href = _HREF.search(tag, 1)
        if href is None:
            continue
        try:
            link = urlsplit(urljoin(url, unescape(next(filter(None, href.groups()), ""))))
            if link[:2] in (("http", server), ("https", server)):
                links.add(link.geturl())
        except ValueError:  # not a URL
            continue
    return sorted(links)
