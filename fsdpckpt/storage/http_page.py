"""The index page of a directory on a web server: fetched up to a bound, its links found in time that its length bounds.

fsspec's own search for links takes minutes for a page that has one tag with some thousand spaces in it.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import urljoin, urlsplit

from fsdpckpt.storage.remote_errors import Unavailable
from fsdpckpt.storage.remote_ranges import http_timeout

__all__ = ["MOST_PAGE", "fetch_links", "links_of"]

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
