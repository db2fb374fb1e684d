"""Uploads files to an object store, so that DST appears complete or not at all, although stores have no rename.

Protocol for a directory:

1. Put an object ``fsdpckpt.uploading`` there: readers refuse a directory that has it. It lists what is uploaded and
   what is replaced, so that a later run deletes nothing else.
2. Delete the lists of an older checkpoint, which say that it is complete.
3. Upload the data files, in parallel.
4. Delete objects of an older checkpoint that the new one does not have.
5. Upload the lists that name the data: ``fsdpckpt.json`` and then a DCP directory's ``.metadata``, without which
   PyTorch loads nothing.
6. Delete ``fsdpckpt.uploading``.

A single object needs none of this: it appears, and replaces an older one, when its upload is completed. Either way an
upload that fails leaves no invisible parts behind. One process calls ``RemoteTarget.begin`` (steps 1 and 2), then one
or several call ``send`` (step 3), then one calls ``finish`` (steps 4 to 6). A DST that is complete may be compared
instead (``differing``).
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fsdpckpt import flags
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, to_copy
from fsdpckpt.storage.parts import (
    MAX_PARTS,
    PartsUpload,
    abort_leftovers,
    begin_parts,
    package_of,
    request_target,
    takes_parts,
)
from fsdpckpt.storage.protocols import UPLOADING, remote_identity
from fsdpckpt.storage.retry import is_missing
from fsdpckpt.text import bytes_text

T = TypeVar("T")

PART = 8 << 20  # bytes buffered for each running request; every store accepts parts of this size
COPIES = 4  # of a part in memory while it is sent: the stores' packages make copies of their own
MAX_UPLOADS = 8  # at a time: fewer fill the line to a store already

# Later ones name earlier ones: a reader of such a list relies on everything that it names being there.
UPLOADED_LAST = (".safetensors.index.json", "units.json", "fsdpckpt.json", ".metadata")


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """How files are uploaded: with at most ``memory`` bytes of buffers.

    ``advance(nbytes)`` is called as bytes arrive. ``is_uploaded(name, info)`` says, from the store's ``info``, whether
    an earlier run uploaded the object; ``on_uploaded(name, info)`` is called after each upload. ``check(url, path)``
    compares an object with its file. ``require_own()`` is called before an object in a directory is sent.
    """

    memory: int
    advance: Callable[[int], None]
    is_uploaded: Callable[[str, Mapping[str, Any]], bool]
    on_uploaded: Callable[[str, Mapping[str, Any]], None]
    check: Callable[[str, str], None] | None
    require_own: Callable[[], None]

    def uploads(self, part: int) -> int:
        """How many parts of ``part`` bytes may be sent at a time."""
        return max(min(MAX_UPLOADS, self.memory // (COPIES * part)), 1)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """``names``: the objects that are at or below ``url`` now, relative to it ("" is the object ``url`` itself).

    ``root``: the path of ``url`` in ``filesystem``.
    """

    url: str
    filesystem: Any
    root: str
    names: tuple[str, ...]

    @property
    def interrupted(self) -> bool:
        """Whether an fsdpckpt upload to there was started and not completed."""
        return UPLOADING in self.names

    def announced(self) -> tuple[str, frozenset[str]]:
        """The id of the interrupted upload there, and the names of all objects that it uploads or replaces."""
        path = self._path(UPLOADING)
        data = request_target(lambda: self.filesystem.cat_file(path), url=self._url(UPLOADING), action="reading it")
        try:
            marker = json.loads(data)
            return str(marker["upload"]), frozenset((UPLOADING, *marker["files"], *marker["replaced"]))
        except (ValueError, LookupError, TypeError):  # it is not what this version writes
            return "", frozenset({UPLOADING})

    def is_own(self, upload: str) -> bool:
        """Whether the upload with the id ``upload`` is still the one that is announced there: another machine may have
        begun one since, with ``--overwrite`` or ``--resume``, and completed it.
        """
        try:
            return self.announced()[0] == upload
        except TargetUnwritableError as error:
            cause = error.__context__  # also of an error whose cause must not be shown
            if cause is not None and is_missing(cause):
                return False
            raise

    def require_own(self, upload: str) -> None:
        """Raises TargetExistsError unless ``is_own``."""
        if not self.is_own(upload):
            raise TargetExistsError(
                f"another run has written to {self.url} since this one began",
                file=self.url,
                why=f"it was started with {flags.overwrite} or {flags.resume}; files of both runs may be there",
                next_step=to_copy("once that run has ended", f"fsdpckpt verify {shlex.quote(self.url)}"),
                resumable=False,
            )

    @property
    def complete(self) -> bool:
        """Whether something is there that no upload has left unfinished."""
        return bool(self.names) and not self.interrupted

    def differing(self, files: Mapping[str, str], same_bytes: Callable[[str, str], bool]) -> str | None:
        """The first of ``files`` that is not there, or of which ``same_bytes(url, path)`` says that it differs."""
        for name, path in files.items():
            if name not in self.names or self._info(name).get("size") != os.path.getsize(path):
                return name
            if not same_bytes(self._url(name), path):
                return name
        return None

    def begin(self, sizes: Mapping[str, int], upload: str) -> None:
        """Steps 1 and 2. ``sizes``: bytes of every file to be uploaded, by relative name. ``upload``: its id."""
        if "" not in sizes:
            self._announce(sizes, upload)
            for name in self.names:
                if name.endswith(UPLOADED_LAST):
                    self.delete(name)

    def send(self, files: Mapping[str, str], options: UploadOptions) -> None:
        """Step 3, for ``files`` except lists; other processes may upload other files at the same time."""
        data = [name for name in files if not name.endswith(UPLOADED_LAST)]
        small = [name for name in data if os.path.getsize(files[name]) <= PART]
        pool = ThreadPoolExecutor(options.uploads(PART))
        try:
            list(pool.map(lambda name: self._put(name, files[name], options), small))
        finally:  # also after a signal: uploads that have not begun are dropped
            pool.shutdown(cancel_futures=True)
        for name in data:
            if name not in small:
                self._put(name, files[name], options)

    def finish(self, files: Mapping[str, str], names: Collection[str], options: UploadOptions, *, upload: str) -> None:
        """Steps 4 to 6, after all data is uploaded. ``files``: at least the lists; ``names``: those of all files;
        ``upload``: as for ``begin``. Raises TargetExistsError if another one has been begun since.
        """
        directory = "" not in names
        if directory:
            self.require_own(upload)
        for name in self.names:
            if name not in names and name != UPLOADING and not (directory and name.endswith(UPLOADED_LAST)):
                self.delete(name)
        for ending in UPLOADED_LAST:
            for name in (name for name in files if name.endswith(ending)):
                self._put(name, files[name], options)
        if directory:
            self.delete(UPLOADING)

    def _put(self, name: str, path: str, options: UploadOptions) -> None:
        """Upload the file at ``path``, unless it is there already. Raises TargetUnwritableError."""
        nbytes = os.path.getsize(path)
        may_be_there = name in self.names and not name.endswith(UPLOADED_LAST)
        if may_be_there and options.is_uploaded(name, self._info(name)):
            options.advance(nbytes)
            return
        if name:
            options.require_own()
        self._upload(name, path, nbytes, options)
        info = self._require_length(name, nbytes)
        if options.check is not None:
            options.check(self._url(name), path)
        options.on_uploaded(name, info)

    def _require_length(self, name: str, nbytes: int) -> dict[str, Any]:
        """The store's description of the object ``name``. Raises TargetUnwritableError unless it is ``nbytes`` long."""
        info = self._info(name)
        size = info.get("size")
        if size != nbytes:
            raise TargetUnwritableError(
                f"{self._url(name)} was not uploaded completely",
                file=self._url(name),
                expected=bytes_text(nbytes),
                found=bytes_text(size) if isinstance(size, int) else "an object of unknown length",
                next_step="run the command again",
            )
        return info

    def _info(self, name: str) -> dict[str, Any]:
        """The store's description of the object ``name`` now."""
        path = self._path(name)
        self._forget_listing(path)
        look_up = partial(self.filesystem.info, path)
        info: dict[str, Any] = request_target(look_up, url=self._url(name), action="looking it up")
        return info

    def _upload(self, name: str, path: str, nbytes: int, options: UploadOptions) -> None:
        """Upload a file. Raises TargetUnwritableError; then nothing is visible."""
        part = max(PART, -(-nbytes // MAX_PARTS))
        if nbytes > part and self._uploads_in_parts:
            self._in_parts(name, path, part, options)
        else:
            write = self._whole if nbytes <= part else self._streamed
            request_target(lambda: write(self._path(name), path, part), url=self._url(name), action="uploading it")
            options.advance(nbytes)

    def _whole(self, target: str, path: str, part: int) -> None:
        self.filesystem.pipe_file(target, _slice(path, 0, part))

    def _streamed(self, target: str, path: str, part: int) -> None:
        """One request after the other, for stores that need the parts in order."""
        remote = self.filesystem.open(target, "wb", block_size=part)
        try:
            with open(path, "rb") as source:
                while data := source.read(part):
                    remote.write(data)
        except BaseException:
            with suppress(Exception):  # the next attempt replaces what is left, and the cause is what matters
                self._discard(remote, target)
            raise
        remote.close()

    def _discard(self, remote: Any, target: str) -> None:
        """Remove what was written to ``remote``, the file that was opened at ``target``."""
        from fsspec.spec import AbstractBufferedFile

        if isinstance(remote, AbstractBufferedFile):
            remote.closed = True  # closing would complete the object with the parts sent so far
            remote.discard()
        else:  # of a store without parts: it is visible already
            remote.close()
            self.filesystem.rm_file(target)

    def _in_parts(self, name: str, path: str, part: int, options: UploadOptions) -> None:
        parts = self.in_parts(name)
        try:
            _in_parallel(path, part, parts.send, options)
            parts.complete()
        except BaseException:
            parts.abort()
            raise
        self._forget_listing(self._path(name))

    @property
    def _uploads_in_parts(self) -> bool:
        """Whether a finished file is sent in parts: to Google it goes as gcsfs sends it, one part after the other."""
        return takes_parts(self.filesystem) and package_of(self.filesystem) != "gcsfs"

    def in_parts(self, name: str, upload: str = "") -> PartsUpload:
        """Begin to send the object ``name`` in parts, or join the ``upload`` of another process."""
        return begin_parts(self.filesystem, self._path(name), self._url(name), upload)

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Make ``data`` the object ``name``, in one request."""
        path = self._path(name)
        request_target(lambda: self.filesystem.pipe_file(path, bytes(data)), url=self._url(name), action="uploading it")
        self._forget_listing(path)

    def tag_of(self, name: str, nbytes: int) -> str:
        """What the store says of the object ``name`` that was sent. Raises TargetUnwritableError if it is not
        ``nbytes`` long.
        """
        return remote_identity(name, self._require_length(name, nbytes)).tag

    def move(self, name: str, to: str) -> None:
        """Give an object another name, inside the store: ``to`` appears, or is replaced, at once."""
        source, target = self._path(name), self._path(to)
        copy = partial(self.filesystem.cp_file, source, target)
        request_target(copy, url=self._url(to), action="moving it into place")
        self._forget_listing(target)
        self.delete(name)

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(self._path(name))

        request_target(delete, url=self._url(name), action="deleting it")

    def withdraw(self) -> None:
        """Undo ``begin``: nothing is uploaded here."""
        self.delete(UPLOADING)

    def abort_leftovers(self, names: Collection[str]) -> None:
        """Remove the invisible parts that killed uploads of finished files to here left behind. ``names``: of the
        objects that are sent next.
        """
        if self._uploads_in_parts:
            self.abort_parts("", names)

    def abort_parts(self, name: str, below: Collection[str] | None = None) -> None:
        """Remove those of killed uploads of the object ``name``. ``below``: and of objects below it, among which these
        are sent next.
        """
        abort_leftovers(self.filesystem, self._path(name), self._url(name), below)

    def _announce(self, sizes: Mapping[str, int], upload: str) -> None:
        replaced = [name for name in self.names if name != UPLOADING]
        text = json.dumps({"program": "fsdpckpt", "upload": upload, "files": dict(sizes), "replaced": replaced})
        self.put(UPLOADING, text.encode())

    def _forget_listing(self, path: str) -> None:
        self.filesystem.invalidate_cache(self.filesystem._parent(path))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _in_parallel(path: str, part: int, send: Callable[[int, bytes], T], options: UploadOptions) -> list[T]:
    """What ``send(number, data)`` returns for each part of the file, in order. After a failure no further part is
    sent.
    """
    stop = threading.Event()

    def send_part(number: int) -> T:
        data = _slice(path, number * part, part)
        answer = send(number, data)
        options.advance(len(data))
        return answer

    def send_unless_stopped(number: int) -> list[T]:
        return [] if stop.is_set() else [send_part(number)]

    with ThreadPoolExecutor(options.uploads(part)) as pool:
        try:
            count = -(-os.path.getsize(path) // part)
            futures = [pool.submit(send_unless_stopped, number) for number in range(count)]
            return [answer for future in futures for answer in future.result()]
        finally:  # also after a signal: leaving the pool waits for its threads
            stop.set()


def _slice(path: str, offset: int, nbytes: int) -> bytes:
    """At most ``nbytes`` bytes of a file from ``offset``."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)
