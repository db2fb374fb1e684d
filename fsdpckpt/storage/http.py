"""What is at a URL of a web server, which knows neither directories nor, mostly, what it holds.

A directory's files are those its index page links to, those that lie where checkpoints have them (``.metadata``, which
index pages hide), and those that the lists among these name.
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
from fsdpckpt.storage.protocols import UPLOADING, FileIdentity
from fsdpckpt.storage.remote_file import (
    MOST_DIGITS,
    REQUESTS,
    Extents,
    RemoteFile,
    fetcher,
    http_headers,
    http_tag,
    http_timeout,
    no_ranges,
    require_plain,
)
from fsdpckpt.storage.retry import Unavailable, store_errors, tried

__all__ = ["MOST_PAGE", "fetch_links", "links_of", "look", "names"]

MOST_LIST = 64 << 20  # bytes of a list of names that is believed to be one

# Where a checkpoint says what it consists of, and how. A DCP directory's .metadata is read by its reader.
_LISTS: dict[str, Callable[[Any], Iterable[str]]] = {
    "fsdpckpt.json": lambda document: document["files"],
    "model.safetensors.index.json": lambda document: set(document["weight_map"].values()),
}
_PROBED = (".metadata", *_LISTS, "units.json", "model.safetensors", UPLOADING)
_NOT_HERE = frozenset({401, 403, 404, 410})  # stores answer 403 for what is not there, to whoever may not list


def look(filesystem: Any, url: str) -> FileIdentity | bool:
    """The identity of the file at ``url``; True for a directory, False for nothing. Raises SourceError.

    Raises SourceUnsupportedError when the server does not answer for ranges of it.
    """
    found = _ask(filesystem, url)
    if found is False and any(
        isinstance(each, FileIdentity) for each in _all(filesystem, (f"{url}/{name}" for name in _PROBED))
    ):
        return True
    return found


def names(filesystem: Any, directory: str) -> tuple[list[FileIdentity], list[str]]:
    """The files in ``directory`` that can be found, and its sub-directories. Raises SourceError."""
    linked = _links(filesystem, directory)
    probed = [
        each
        for each in _all(filesystem, (_join(directory, name) for name in _PROBED))
        if isinstance(each, FileIdentity)
    ]
    listed = [name for each in probed for name in _listed(filesystem, each)]
    known = {each.path for each in probed}
    asked = [url for url in dict.fromkeys([*linked, *(_join(directory, name) for name in listed)]) if url not in known]
    found = probed + [each for each in _all(filesystem, asked) if isinstance(each, FileIdentity)]
    below = [url.rstrip("/") for url in asked if url.endswith("/")]
    if not found and not below:
        raise SourceUnrecognisedError(
            f"{directory}: this server does not say what lies there",
            file=directory,
            expected=f"an index page with links, or one of {', '.join(_PROBED)}",
            found="none of them",
            why="HTTP has no directories; index pages are switched off here, or the checkpoint is another kind",
            next_step="give the URL of one file, use the store's own scheme (s3://, gs://), or switch index pages on "
            "(nginx: autoindex on)",
        )
    return sorted(found, key=lambda each: each.path), below


def _ask(filesystem: Any, url: str) -> FileIdentity | bool:
    """One request: of the first byte, since what a server says of it holds for the file."""
    try:
        return tried(lambda: _first_byte(filesystem, url), url=url, doing="looking it up")
    except SourceMissingError:
        return False


def _first_byte(filesystem: Any, url: str) -> FileIdentity | bool:
    from fsspec.asyn import sync

    async def ask() -> FileIdentity | bool:
        session = await filesystem.set_session()
        options = {"timeout": http_timeout(), **filesystem.kwargs, "headers": http_headers(filesystem, 0, 1)}
        async with session.get(filesystem.encode_url(url), **options) as answer:
            require_plain(url, answer.headers)
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status in (206, 416) and total.isdecimal() and len(total) < MOST_DIGITS:
                return FileIdentity(url, int(total), tag=http_tag(answer.headers))
            if answer.status in _NOT_HERE:
                return bool(answer.url.path.endswith("/"))
            if answer.status != 200:
                raise Unavailable(answer.status, answer.reason or "")
            if answer.url.path.endswith("/") or answer.content_type == "text/html":  # an index page, most likely
                return True
            if answer.content_length == 0:
                return FileIdentity(url, 0, tag=http_tag(answer.headers))
            raise no_ranges(url)

    return cast("FileIdentity | bool", sync(filesystem.loop, ask))


def _all(filesystem: Any, urls: Iterable[str]) -> list[FileIdentity | bool]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(lambda url: _ask(filesystem, url), urls))


def _links(filesystem: Any, directory: str) -> list[str]:
    """What the directory's page links to right below it; sub-directories end in a slash. Empty without a page."""

    def links() -> list[str]:
        try:
            return fetch_links(filesystem, f"{directory}/")
        except store_errors() as error:
            if isinstance(error, FileNotFoundError) or getattr(error, "status", None) in _NOT_HERE:
                return []  # no page: then what lies there is looked for by its names
            raise

    found = tried(links, url=directory, doing="listing it")
    base = unquote(urlsplit(directory).path).rstrip("/") + "/"  # servers and users escape differently
    names = []
    for link in found:
        path = unquote(urlsplit(link).path)
        name = path[len(base) :] if path.startswith(base) else ""
        if name.strip("/") and "/" not in name.rstrip("/"):
            names.append(_join(directory, name))
    return sorted(set(names))


def _listed(filesystem: Any, identity: FileIdentity) -> list[str]:
    """The names in a list that lies beside the files."""
    read = _LISTS.get(identity.path.rpartition("/")[2])
    if read is None or identity.nbytes > MOST_LIST:
        return []
    file = RemoteFile(identity, fetcher(filesystem, identity.path, identity), Extents())
    try:
        found = [str(each) for each in read(json.loads(file.read(0, file.nbytes)))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # its reader says what is wrong with it
    return [name for name in found if name and "/" not in name]


def _join(directory: str, name: str) -> str:
    return f"{directory}/{quote(name, safe='/')}"


MOST_PAGE = 16 << 20  # bytes of a page that are looked at: a hundred thousand links
_TARGET = re.compile(r"""\shref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)


def fetch_links(filesystem: Any, url: str) -> list[str]:
    """What the page at ``url`` links to, as whole URLs of the same server; none when it is no page.

    Raises FileNotFoundError, Unavailable and what the session raises.
    """
    from fsspec.asyn import sync

    async def page() -> str:
        session = await filesystem.set_session()
        options = {"timeout": http_timeout(), **filesystem.kwargs}
        async with session.get(filesystem.encode_url(url), **options) as answer:
            if answer.status == 404:
                raise FileNotFoundError(url)
            if answer.status != 200:
                raise Unavailable(answer.status, answer.reason or "")
            if answer.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower() != "text/html":
                return ""
            data = bytearray()
            while len(data) < MOST_PAGE and (more := await answer.content.readany()):
                data += more
            return data[:MOST_PAGE].decode(errors="ignore")

    text: str = sync(filesystem.loop, page)
    return links_of(url, text)


def links_of(url: str, text: str) -> list[str]:
    """What the page ``text`` at ``url`` links to on the same server, as whole URLs, sorted."""
    server = urlsplit(url).netloc
    found: set[str] = set()
    for part in text.split("<")[1:]:
        tag = part.partition(">")[0]
        if tag[:1] not in ("a", "A") or not tag[1:2].isspace():
            continue
        target = _TARGET.search(tag, 1)
        if target is None:
            continue
        try:
            link = urlsplit(urljoin(url, unescape(next(filter(None, target.groups()), ""))))
            if link[:2] in (("http", server), ("https", server)):
                found.add(link.geturl())
        except ValueError:  # no URL
            continue
    return sorted(found)
