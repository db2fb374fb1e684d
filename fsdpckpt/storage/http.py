"""Lists what a web server has at a URL. Web servers know neither directories nor, mostly, a list of their files.

The files of a directory are those that its index page links to, those at names that checkpoints use (``.metadata``,
which index pages hide), and those that the lists among them (``fsdpckpt.json``, safetensors' index) name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from typing import Any, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

from fsdpckpt.errors import SourceMissingError, SourceUnrecognisedError
from fsdpckpt.storage.protocols import UPLOADING, FileIdentity, NoFile
from fsdpckpt.storage.remote_file import (
    REQUESTS,
    RangeCache,
    RemoteFile,
    fetcher,
    http_identity,
    http_options,
    http_tag,
    no_ranges_error,
    require_plain,
)
from fsdpckpt.storage.retry import HttpStatusError, store_errors, with_retries

MOST_LIST = 64 << 20  # bytes: a longer file is not taken for a list of names
MOST_PAGE = 16 << 20  # bytes of an index page that are read: a hundred thousand links

# Files that name the other files of a checkpoint, and how. The DCP reader itself reads a directory's .metadata.
_LISTS: dict[str, Callable[[Any], Iterable[str]]] = {
    "fsdpckpt.json": lambda document: document["files"],
    "model.safetensors.index.json": lambda document: set(document["weight_map"].values()),
}
_PROBED = (".metadata", *_LISTS, "units.json", "model.safetensors", UPLOADING)
_ABSENT = frozenset({401, 403, 404, 410})  # stores answer 403 for what does not exist, to clients that may not list
_HREF = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)


def look_up(filesystem: Any, url: str) -> FileIdentity | NoFile:
    """The identity of the file at ``url``, or what is there instead. Raises SourceError.

    Raises SourceUnsupportedError when the server does not send ranges of the file.
    """
    answer = _request(filesystem, url)
    if answer is NoFile.NOTHING and _files(filesystem, (f"{url}/{name}" for name in _PROBED)):
        return NoFile.DIRECTORY
    return answer


def list_names(filesystem: Any, directory: str) -> tuple[list[FileIdentity], list[str]]:
    """The files of ``directory`` that can be found, and its subdirectories. Raises SourceError."""
    links = _links(filesystem, directory)
    files = _files(filesystem, (_join(directory, name) for name in _PROBED))
    listed = [_join(directory, name) for file in files for name in _listed(filesystem, file)]
    known = {file.path for file in files}
    others = [url for url in dict.fromkeys([*links, *listed]) if url not in known]
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
    """As ``look_up``, from one request alone: of the first byte, since its headers describe the file."""
    from fsspec.asyn import sync

    async def first_byte() -> FileIdentity | NoFile:
        session = await filesystem.set_session()
        async with session.get(filesystem.encode_url(url), **http_options(filesystem, 0, 1)) as answer:
            require_plain(url, answer.headers)
            identity = http_identity(url, answer.headers)
            if answer.status in (206, 416) and identity is not None:
                return identity
            if answer.status in _ABSENT:
                return NoFile.DIRECTORY if answer.url.path.endswith("/") else NoFile.NOTHING
            if answer.status != 200:
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


def _links(filesystem: Any, directory: str) -> list[str]:
    """What the directory's page links to right below it; subdirectories end in a slash. Empty without a page."""

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


def _listed(filesystem: Any, identity: FileIdentity) -> list[str]:
    """The file names in the file ``identity``, when it is one of ``_LISTS``."""
    names_of = _LISTS.get(identity.path.rpartition("/")[2])
    if names_of is None or identity.nbytes > MOST_LIST:
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
    """What the page at ``url`` links to; empty when it is not a page.

    Raises FileNotFoundError, HttpStatusError and what the session raises.
    """
    from fsspec.asyn import sync

    async def page() -> str:
        session = await filesystem.set_session()
        async with session.get(filesystem.encode_url(url), **http_options(filesystem)) as answer:
            if answer.status == 404:
                raise FileNotFoundError(url)
            if answer.status != 200:
                raise HttpStatusError(answer.status, answer.reason or "")
            if answer.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower() != "text/html":
                return ""
            data = bytearray()
            while len(data) < MOST_PAGE and (more := await answer.content.readany()):
                data += more
            return data[:MOST_PAGE].decode(errors="ignore")

    return links_of(url, cast(str, sync(filesystem.loop, page)))


def links_of(url: str, text: str) -> list[str]:
    """What the HTML page ``text`` at ``url`` links to on the same server, as whole URLs, sorted."""
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
