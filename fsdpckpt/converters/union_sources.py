"""Gives rank 0 the files on every rank's disks while it plans.

While rank 0 is in ``UnionSources``, the other ranks are in ``serve_sources``. Rank 0 reads a file that it sees itself,
and any other from the lowest rank that has it. Over a network each question costs a round trip, so that few are asked:

1. A directory is listed once, on all ranks at the same time. What no rank lists does not exist.
2. A reader announces the files that it is about to read (``Sources.prefetch_ends``). Their first bytes come in one
   answer of each rank.
   A reader that knows which ranges it needs says so (``announce``).
3. The first read beyond these fetches the headers of the next announced files, from all ranks at the same time: the
   ranges, or what each rank finds itself. It parses the file as the reader will, and sends what this read.
4. Other ranges that are known in advance (``ByteSource.prefetch``) are one request for each ``STEP`` bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, cast

from fsdpckpt.comm.protocol import Group, decode_error, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, SourceMissingError
from fsdpckpt.formats.safetensors import looks_like_safetensors, read_header
from fsdpckpt.formats.zip import read_directory
from fsdpckpt.storage import ByteSource, Entry, is_url
from fsdpckpt.storage.remote_file import CachedFile, RangeCache
from fsdpckpt.storage.sources import Announced, Sources

STEP = 4 << 20  # bytes of one answer, which both ranks hold in memory
HEAD = 1 << 10  # bytes of each announced file that come at once: what kind of file it is, and its folder's name
HEADERS = 64 << 20  # bytes of headers that rank 0 holds in advance
AT_ONCE = 128  # announced files of one rank whose headers are asked for at a time
MAX_MESH = 1 << 10  # bytes of a tensor that is sent with the headers: the ranks of a mesh are one, and are read
MAX_SMALL_RECORD = 64 << 10  # bytes of a record beside tensors that is sent with the headers, whatever it holds


class ServerRequest(NamedTuple):
    """``kind``: ``list``, ``stat``, ``head``, ``headers`` or ``read``. ``ranges``: (offset, nbytes) to read, or the
    headers if they are known.

    ``budget``: for ``headers``, send none of more bytes than this, because others have been asked as well.
    """

    kind: str
    path: str
    ranges: Sequence[tuple[int, int]] = ()
    budget: int = 0


def serve_sources(group: Group, *, roots: Mapping[str, str] | None = None) -> None:
    """Answer rank 0 until it is done. All ranks but 0. ``roots``: this rank's path for a directory of rank 0's."""
    with Sources() as sources:
        while requests := cast("list[Sequence[object]]", group.receive_object(source=0)):
            group.send_object(answers_to(group, sources, requests, roots or {}), to=0)


def answers_to(
    group: Group, sources: Sources, requests: Sequence[Sequence[object]], roots: Mapping[str, str]
) -> list[object]:
    """The answer to each of rank 0's ``requests``, which are the fields of ``ServerRequest``."""
    answers: list[object] = []
    spent = 0
    for fields in requests:
        request = ServerRequest(*fields)  # type: ignore[arg-type]
        path = _own_path(request.path, roots)
        try:
            answer = _answer(group, sources, request._replace(path=path, budget=request.budget - spent))
        except (FsdpckptError, OSError) as error:  # raised on rank 0, as if its own disk had failed
            answer = encode_error(error)
        if request.kind == "headers" and isinstance(answer, tuple):
            spent += sum(map(len, answer[1]))
        answers.append(answer)
        group.beat()
    return answers


def _own_path(path: str, roots: Mapping[str, str]) -> str:
    for root, resolved in roots.items():
        if path == root or path.startswith(f"{root}/"):
            return resolved + path[len(root) :]
    return path


def _answer(group: Group, sources: Sources, request: ServerRequest) -> object:
    path = request.path
    match request.kind:
        case "read":
            source = sources.open(path)
            return b"".join([source.read(offset, nbytes) for offset, nbytes in request.ranges])
        case "list":
            entries = sources.list_directory(path) if os.path.isdir(path) or is_url(path) else []
            return [[entry.name, entry.nbytes, entry.directory, entry.link] for entry in entries]
        case "stat":
            entry = sources.stat(path)
            return [] if entry is None else [[entry.name, entry.nbytes, entry.directory, entry.link]]
    try:
        source = sources.open(path)
        if request.kind == "head":
            return source.read(0, min(HEAD, source.nbytes))
        return _headers(group, source, request.ranges, request.budget)
    except FsdpckptError:  # the reader meets it again, unless it does not need this file
        return b"" if request.kind == "head" else ([], [])


_Headers: TypeAlias = "tuple[list[int], list[bytes]]"
"""The offsets of ranges of one file, and their bytes."""


class _TooMuchError(Exception):
    """The headers are longer than what may be sent."""


class _Recorded(ByteSource):
    """``source``, with the ranges that were read of it, at most ``budget`` bytes."""

    def __init__(self, group: Group, source: ByteSource, budget: int) -> None:
        self.path, self.nbytes = source.path, source.nbytes
        self.ranges: dict[int, bytes] = {}
        self._group = group
        self._source = source
        self._left = budget

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._left -= len(buffer)
        if self._left < 0:
            raise _TooMuchError
        self._source.read_into(offset, buffer)
        if len(buffer) > len(self.ranges.get(offset, b"")):
            self.ranges[offset] = bytes(buffer)
        self._group.beat()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Nothing needs to come ahead; but only what is needed is to be read, as from a peer."""
        return True


def _headers(group: Group, source: ByteSource, ranges: Sequence[tuple[int, int]], budget: int) -> _Headers | None:
    """The ranges that a reader will read of a file before any tensor: their offsets, and their bytes.

    ``ranges``: those that it has announced, if any. None if they are longer than ``budget``. A file that cannot be
    parsed is refused by the reader.
    """
    recorded = _Recorded(group, source, budget)
    try:
        with suppress(FsdpckptError):
            for offset, nbytes in ranges:
                recorded.read(offset, nbytes)
            if not ranges:
                _read_headers(recorded)
    except _TooMuchError:
        return None
    return list(recorded.ranges), list(recorded.ranges.values())


def _read_headers(source: _Recorded) -> None:
    """Read what the file's format has beside tensors, as its reader will."""
    head = source.read(0, min(HEAD, source.nbytes))
    if head.startswith(b"PK\3\4"):
        for record in read_directory(source).values():
            most = MAX_MESH if record.name.startswith("data/") else MAX_SMALL_RECORD
            if record.nbytes <= most or record.name == "data.pkl":
                source.read(record.offset, record.nbytes)
    elif looks_like_safetensors(head, source.nbytes):
        read_header(source)


class UnionSources(Sources):
    """For rank 0: ``Sources`` that also include what only other ranks see, while these are in ``serve_sources``.

    ``opened``: every path that was read, in order. ``heads``: the first bytes of announced files. ``headers``: bytes of
    headers that are fetched at a time, before they are needed.
    """

    def __init__(self, group: Group, *, headers: int = HEADERS) -> None:
        super().__init__()
        self.opened: dict[str, None] = {}
        self.heads: dict[str, bytes] = {}
        self._group = group
        self._requesting = threading.Lock()
        self._listed: dict[str, list[Entry]] = {}  # directories, without a slash at the end
        self._found: dict[str, Entry] = {}  # what other ranks have
        self._holders: dict[str, int] = {}  # the rank that has the file of a path
        self._announced: dict[str, Announced] = {}  # files whose headers are not here yet, in order
        self._budget = headers
        self._headers = RangeCache(2 * headers)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for rank in range(1, self._group.world_size) if exception[0] is None else ():
            self._group.send_object([], to=rank)

    # questions

    def ask(self, requests: Mapping[int, Sequence[ServerRequest]]) -> dict[int, list[object]]:
        """The answers of each rank to its requests, in their order. The ranks answer at the same time.

        Raises the error with which a request failed.
        """
        with self._requesting:
            for rank, asked in requests.items():
                self._group.send_object([list(request) for request in asked], to=rank)
            answers = {rank: cast("list[object]", self._group.receive_object(source=rank)) for rank in requests}
        for answered in answers.values():
            for answer in answered:
                if isinstance(answer, dict):
                    raise decode_error(answer)
        return answers

    def _ask_all(self, kind: str, path: str) -> list[Entry]:
        """What each other rank says of ``path``, by rank. The lowest rank that has an entry is its holder."""
        ranks = range(1, self._group.world_size)
        entries: list[Entry] = []
        parent = os.path.join(path, "") if kind == "list" else ""
        for rank, (answer,) in self.ask({rank: [ServerRequest(kind, path)] for rank in ranks}).items():
            for name, nbytes, directory, link in cast("list[tuple[str, int, bool, str]]", answer):
                entry = Entry(name, f"{parent}{name}" if parent else path, nbytes, directory, link)
                self._found.setdefault(entry.path, entry)
                self._holders.setdefault(entry.path, rank)
                entries.append(entry)
        return entries

    # directories

    def stat(self, path: str) -> Entry | None:
        entry = super().stat(path)
        if entry is not None or self._group.world_size == 1 or is_url(path):
            return entry
        if path in self._found:
            return self._found[path]
        parent, _, name = path.rpartition("/")
        if parent in self._listed and name not in ("", ".", ".."):  # all ranks were asked what is in there
            return None
        return next(iter(self._ask_all("stat", path)), None)

    def list_directory(self, path: str) -> list[Entry]:
        if self._group.world_size == 1 or is_url(path):
            return super().list_directory(path)
        key = path.rstrip("/")
        entries = super().list_directory(path) if os.path.isdir(path) else []
        by_name = {entry.name: entry for entry in entries}
        if key not in self._listed:
            self._listed[key] = self._ask_all("list", path)
        for entry in self._listed[key]:
            by_name.setdefault(entry.name, entry)
        return [by_name[name] for name in sorted(by_name)]

    # files

    def open(self, path: str) -> ByteSource:
        self.opened.setdefault(path)
        return super().open(path)

    def open_new(self, path: str) -> ByteSource:
        try:
            return super().open_new(path)
        except SourceMissingError:
            entry = self.stat(path)
            if entry is None or entry.directory or path not in self._holders:
                raise
        return _PeerFile(entry, self, self._headers)

    def prefetch_ends(self, paths: Sequence[str], *, tails: bool = True) -> None:
        super().prefetch_ends(paths, tails=tails)
        new = [path for path in paths if path not in self.heads and self._is_elsewhere(path)]
        by_rank: dict[int, list[str]] = {}
        for path in new:
            by_rank.setdefault(self._holders[path], []).append(path)
        requests: dict[int, list[ServerRequest]] = {}
        for rank, held in by_rank.items():
            requests[rank] = [ServerRequest("head", path) for path in held]
        heads = self.ask(requests)
        for rank, held in by_rank.items():
            self.heads.update(zip(held, cast("list[bytes]", heads[rank]), strict=True))
        self._announced.update(dict.fromkeys(new, _none))

    def announce(self, path: str, ranges: Announced) -> None:
        if self._is_elsewhere(path):
            self._announced[path] = ranges

    def _is_elsewhere(self, path: str) -> bool:
        """Whether ``path`` is a file that only other ranks are known to have."""
        return path in self._holders and not self._found[path].directory and super().stat(path) is None

    def fetch_headers(self, path: str) -> bool:
        """Fetch the headers of ``path``, and of files announced after it; False if that has been done."""
        if path not in self._announced:
            return False
        by_rank: dict[int, list[str]] = {self._holders[path]: [path]}
        announced = list(self._announced)
        for other in announced[announced.index(path) + 1 :]:
            held = by_rank.setdefault(self._holders[other], [])
            if len(held) < AT_ONCE:
                held.append(other)
        budget = self._budget // len(by_rank)
        requests: dict[int, list[ServerRequest]] = {}
        for rank, held in by_rank.items():
            requests[rank] = [self._headers_request(each, budget) for each in held]
        requests[self._holders[path]][0] = self._headers_request(path, 1 << 62)  # this one is needed now
        for rank, answers in self.ask(requests).items():
            for each, answer in zip(by_rank[rank], cast("list[_Headers | None]", answers), strict=True):
                if answer is None:  # for later
                    continue
                for offset, data in zip(*answer, strict=True):
                    self._headers.add(each, offset, data)
                del self._announced[each]
        return True

    def _headers_request(self, path: str, budget: int) -> ServerRequest:
        return ServerRequest("headers", path, joined_ranges(self._announced[path]()), budget)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> bytes:
        """The bytes of ``ranges`` (offset, nbytes) of a file that another rank has, one after the other."""
        rank, total = self._holders[path], sum(nbytes for _, nbytes in ranges)
        ((data,),) = self.ask({rank: [ServerRequest("read", path, ranges)]}).values()
        if not isinstance(data, bytes) or len(data) != total:
            raise InternalError(f"worker {rank} did not send the {total} bytes of {path} that were requested")
        return data


def _none() -> Sequence[tuple[int, int]]:
    """The headers of a file of which no ranges were announced: its holder finds them."""
    return ()


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ``ranges`` (offset, nbytes) in ascending order; those that touch are one."""
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if joined and offset <= sum(joined[-1]):
            begin = joined[-1][0]
            joined[-1] = begin, max(sum(joined[-1]), offset + nbytes) - begin
        else:
            joined.append((offset, nbytes))
    return joined


class _PeerFile(CachedFile):
    """A file that only another rank sees."""

    def __init__(self, entry: Entry, peers: UnionSources, cache: RangeCache) -> None:
        super().__init__(entry.path, entry.nbytes, self._fetch, cache, requests=1)
        self._peers = peers

    def read(self, offset: int, nbytes: int) -> bytes:
        self.require_inside(offset, nbytes)
        head = self._peers.heads.get(self.path, b"")
        if offset + nbytes <= len(head):
            return head[offset : offset + nbytes]
        data = self._cache.get(self.path, offset, nbytes)
        if data is None and self._peers.fetch_headers(self.path):
            data = self._cache.get(self.path, offset, nbytes)
        return super().read(offset, nbytes) if data is None else data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        self._peers.fetch_headers(self.path)
        pending: list[tuple[int, int]] = []
        for offset, nbytes in joined_ranges(ranges):
            count = min(nbytes, self.nbytes - offset)
            if 0 < count <= STEP and self._cache.get(self.path, offset, count) is None:
                pending.append((offset, count))
        while pending:
            taken = total = 0
            while taken < len(pending) and total + pending[taken][1] <= STEP:
                total += pending[taken][1]
                taken += 1
            data, at = self._peers.read_ranges(self.path, pending[:taken]), 0
            for offset, nbytes in pending[:taken]:
                self._cache.add(self.path, offset, data[at : at + nbytes])
                at += nbytes
            pending = pending[taken:]
        return True

    def _fetch(self, offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), STEP):
            count = min(STEP, len(buffer) - begin)
            buffer[begin : begin + count] = self._peers.read_ranges(self.path, [(offset + begin, count)])
