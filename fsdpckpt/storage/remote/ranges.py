"""One range of one remote object, straight into a buffer: how each kind of store is asked.

S3 and HTTP answers are copied into the buffer as they arrive, so that a range costs no second copy in memory, and each
answer says which state of the object it is from. Other stores are asked through fsspec in steps of ``STEP`` bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.storage.identity import FileIdentity, change_between, changed_error
from fsdpckpt.storage.remote.errors import ShortAnswerError, Unavailable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["Fetch", "fetcher", "http_headers", "http_timeout", "no_ranges", "require_plain"]

Fetch = Callable[[int, memoryview], None]
"""(offset, buffer): one attempt to fill the buffer. Raises what the store's package raises, or ShortAnswerError."""

STEP = 4 << 20  # bytes of one request to a store whose answers cannot be streamed into a buffer
MOST_DIGITS = 20  # of a length: Python refuses to read a number of thousands of them
STALLED = 30.0  # seconds without a byte after which a server is asked again


def fetcher(filesystem: AbstractFileSystem, name: str, identity: FileIdentity) -> Fetch:
    """How to fetch ranges of the object ``name``, which has to be what ``identity`` says."""
    kind = type(filesystem).__module__.partition(".")[0]
    if kind == "s3fs":
        return _S3(filesystem, name, identity).fetch
    if type(filesystem).__name__ == "HTTPFileSystem":
        return _Http(filesystem, name, identity).fetch
    return _Other(filesystem, name).fetch


class _Other:
    def __init__(self, filesystem: AbstractFileSystem, name: str) -> None:
        self._filesystem = filesystem
        self._name = name

    def fetch(self, offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), STEP):
            count = min(STEP, len(buffer) - begin)
            data = self._filesystem.cat_file(self._name, start=offset + begin, end=offset + begin + count)
            if len(data) != count:
                raise ShortAnswerError(f"{len(data)} of {count} bytes came")
            buffer[begin : begin + count] = data


class _S3:
    def __init__(self, filesystem: Any, name: str, identity: FileIdentity) -> None:
        self._filesystem = filesystem
        self._bucket, self._key, self._version = filesystem.split_path(name)
        self._identity = identity

    def fetch(self, offset: int, buffer: memoryview) -> None:
        from fsspec.asyn import sync

        sync(self._filesystem.loop, self._fetch, offset, buffer)

    async def _fetch(self, offset: int, buffer: memoryview) -> None:
        version = {"VersionId": self._version} if self._version else {}
        answer = await self._filesystem._call_s3(  # what s3fs itself calls: the public one cannot be awaited
            "get_object",
            Bucket=self._bucket,
            Key=self._key,
            Range=f"bytes={offset}-{offset + len(buffer) - 1}",
            **version,
        )
        body = answer["Body"]
        try:
            there = str(answer.get("ContentRange", ""))
            _require_same(self._identity, f"ETag={answer.get('ETag')}", there.rpartition("/")[2])
            if there or len(buffer) != self._identity.nbytes:  # a server may answer with all of it, where that is asked
                _require_range(there, offset, len(buffer))
            await _pour(lambda: body.read(1 << 18), buffer)
        finally:
            body.close()


class _Http:
    def __init__(self, filesystem: Any, url: str, identity: FileIdentity) -> None:
        self._filesystem = filesystem
        self._url = url
        self._identity = identity

    def fetch(self, offset: int, buffer: memoryview) -> None:
        from fsspec.asyn import sync

        sync(self._filesystem.loop, self._fetch, offset, buffer)

    async def _fetch(self, offset: int, buffer: memoryview) -> None:
        session = await self._filesystem.set_session()
        options = {"timeout": http_timeout(), **self._filesystem.kwargs}
        options["headers"] = http_headers(self._filesystem, offset, len(buffer))
        async with session.get(self._filesystem.encode_url(self._url), **options) as answer:
            if answer.status == 200:  # the whole file; nobody reads it, so that the connection is closed
                if offset or answer.content_length != len(buffer):
                    raise no_ranges(self._url)
            elif answer.status == 416:  # the file has become shorter than it was
                raise changed_error(self._url, f"shrank from {self._identity.nbytes} bytes")
            elif answer.status != 206:
                if answer.status == 404:
                    raise FileNotFoundError(self._url)
                raise Unavailable(answer.status, answer.reason or "")
            require_plain(self._url, answer.headers)
            there = answer.headers.get("Content-Range", "")
            _require_same(self._identity, http_tag(answer.headers), there.rpartition("/")[2])
            if answer.status == 206:
                _require_range(there, offset, len(buffer))
            await _pour(answer.content.readany, buffer)


async def _pour(more: Callable[[], Awaitable[bytes]], buffer: memoryview) -> None:
    """Fill ``buffer`` with what ``more`` returns until it returns nothing."""
    done = 0
    while done < len(buffer):
        data = (await more())[: len(buffer) - done]
        if not data:
            raise ShortAnswerError(f"{done} of {len(buffer)} bytes came")
        buffer[done : done + len(data)] = data
        done += len(data)


def _require_same(identity: FileIdentity, tag: str, total: str) -> None:
    nbytes = int(total) if total.isdecimal() and len(total) < MOST_DIGITS else identity.nbytes
    same_kind = tag.partition("=")[0] == identity.tag.partition("=")[0]
    now = FileIdentity(identity.path, nbytes, tag=tag if same_kind else identity.tag)
    change = change_between(identity, now)
    if change is not None:
        raise changed_error(identity.path, change)


def _require_range(there: str, offset: int, nbytes: int) -> None:
    """Raises ShortAnswerError unless ``there``, the Content-Range of an answer, is what was asked for."""
    wanted = f"bytes {offset}-{offset + nbytes - 1}"
    if there.partition("/")[0].strip() != wanted:
        raise ShortAnswerError(f"{there or 'bytes of no stated range'} came, not {wanted}")


def require_plain(url: str, headers: Any) -> None:
    """Raises SourceUnsupportedError when the body of an answer is a compressed form of the file."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise SourceUnsupportedError(
            f"{url}: this server compresses what it sends ({encoding}), although it was asked not to",
            file=url,
            why="positions in a compressed file are none of the checkpoint's",
            next_step=f"switch compression off for these files, or download it first (curl -O --compressed {url})",
        )


def http_tag(headers: Any) -> str:
    """What tells one state of a file behind HTTP from another, in the form of ``FileIdentity.tag``."""
    for name in ("ETag", "Last-Modified"):
        if headers.get(name):
            return f"{name}={headers[name]}"
    return ""


def http_headers(filesystem: Any, offset: int, nbytes: int) -> dict[str, str]:
    """Those of the user, and the range; the bytes themselves, not a compressed form of them."""
    headers = dict(filesystem.kwargs.get("headers", {}))
    return {**headers, "Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}


def http_timeout() -> Any:
    """No limit on a whole transfer, one on every wait within it."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=STALLED, sock_read=STALLED)


def no_ranges(url: str) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{url}: this server sends whole files only (it ignores Range requests)",
        file=url,
        why="a checkpoint is read at many places, each of which would cost the whole file",
        next_step=f"download it first (curl -O {url}), or serve it from nginx, Apache or an object store",
    )
