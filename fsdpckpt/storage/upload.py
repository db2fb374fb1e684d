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
or several call ``send`` (step 3), then one calls ``complete`` (steps 4 to 6).
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fsdpckpt.errors import SourceError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage import UPLOADING, is_url
from fsdpckpt.storage.remote_store import filesystem_of, is_http
from fsdpckpt.storage.retry import target_error, with_retries
from fsdpckpt.text import bytes_text

T = TypeVar("T")

_ask = partial(with_retries, make_error=target_error)

PART = 8 << 20  # bytes buffered for each running request; every store accepts parts of this size
MOST_PARTS = 10_000  # of one S3 object
COPIES = 4  # of a part in memory while it is sent: the stores' packages make copies of their own
MOST_UPLOADS = 8  # at a time: fewer fill the line to a store already

# Later ones name earlier ones: a reader of such a list relies on everything that it names being there.
_LISTS = (".safetensors.index.json", "units.json", "fsdpckpt.json", ".metadata")


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """How files are uploaded: with at most ``memory`` bytes of buffers.

    ``advance(nbytes)`` is called as bytes arrive. ``is_uploaded(name, info)`` says, from the store's ``info``, whether
    an earlier run uploaded the object; ``on_uploaded(name, info)`` is called after each upload. ``check(url, path)``
    compares an object with its file.
    """

    memory: int
    advance: Callable[[int], None]
    is_uploaded: Callable[[str, Mapping[str, Any]], bool]
    on_uploaded: Callable[[str, Mapping[str, Any]], None]
    check: Callable[[str, str], None] | None


@dataclass(frozen=True, slots=True)
class Announcement:
    """An upload that was begun: its id, and the ``names`` of all objects that are its own or that it replaces."""

    upload: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """``names``: the objects that are at or below ``url`` now, relative to it ("" is the object ``url`` itself)."""

    url: str
    filesystem: Any
    root: str
    names: tuple[str, ...]

    @property
    def interrupted(self) -> bool:
        """Whether an fsdpckpt upload to there was started and not completed."""
        return UPLOADING in self.names

    def announced(self) -> Announcement:
        """What the interrupted upload there says of itself."""
        name = self._name(UPLOADING)
        data = _ask(lambda: self.filesystem.cat_file(name), url=self._url(UPLOADING), action="reading it")
        try:
            marker = json.loads(data)
            names = frozenset((UPLOADING, *marker["files"], *marker["replaced"]))
            return Announcement(str(marker["upload"]), names)
        except (ValueError, LookupError, TypeError):  # it is not what this version writes
            return Announcement("", frozenset({UPLOADING}))

    def begin(self, sizes: Mapping[str, int], upload: str) -> None:
        """Steps 1 and 2. ``sizes``: bytes of every file to be uploaded, by relative name. ``upload``: its id."""
        _abort_leftovers(self.filesystem, self.root, self.url)
        if "" not in sizes:
            self._announce(sizes, upload)
            for name in (name for name in self.names if name.endswith(_LISTS)):
                self._delete(name)

    def send(self, files: Mapping[str, str], options: UploadOptions) -> None:
        """Step 3, for ``files`` except lists; other processes may upload other files at the same time."""
        data = [name for name in files if not name.endswith(_LISTS)]
        small = [name for name in data if os.path.getsize(files[name]) <= PART]
        pool = ThreadPoolExecutor(max(min(MOST_UPLOADS, options.memory // (COPIES * PART)), 1))
        try:
            list(pool.map(lambda name: self._put(name, files[name], options), small))
        finally:  # also after a signal: uploads that have not begun are dropped
            pool.shutdown(cancel_futures=True)
        for name in data:
            if name not in small:
                self._put(name, files[name], options)

    def complete(self, files: Mapping[str, str], names: Collection[str], options: UploadOptions) -> None:
        """Steps 4 to 6, after all data is uploaded. ``files``: at least the lists; ``names``: those of all files."""
        directory = "" not in names
        for name in self.names:
            if name not in names and name != UPLOADING and not (directory and name.endswith(_LISTS)):
                self._delete(name)
        for ending in _LISTS:
            for name in (name for name in files if name.endswith(ending)):
                self._put(name, files[name], options)
        if directory:
            self._delete(UPLOADING)

    def _put(self, name: str, path: str, options: UploadOptions) -> None:
        nbytes = os.path.getsize(path)
        uploader = Uploader(self.filesystem, options.memory, options.advance)
        at, url = self._name(name), self._url(name)
        if name in self.names and not name.endswith(_LISTS) and options.is_uploaded(name, uploader.info(at, url)):
            options.advance(nbytes)
            return
        uploader.put(path, at, url)
        info = uploader.require(at, url, nbytes)
        if options.check is not None:
            options.check(url, path)
        options.on_uploaded(name, info)

    def _announce(self, sizes: Mapping[str, int], upload: str) -> None:
        replaced = [name for name in self.names if name != UPLOADING]
        text = json.dumps({"program": "fsdpckpt", "upload": upload, "files": dict(sizes), "replaced": replaced})
        _ask(
            lambda: self.filesystem.pipe_file(self._name(UPLOADING), text.encode()),
            url=self._url(UPLOADING),
            action="uploading it",
        )

    def _delete(self, name: str) -> None:
        def delete() -> None:
            try:
                self.filesystem.rm_file(self._name(name))
            except FileNotFoundError:
                return

        _ask(delete, url=self._url(name), action="deleting it")

    def _name(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def open_target(url: str, source: str, *, overwrite: bool) -> RemoteTarget:
    """The DST at ``url``, if it may be written.

    Raises UsageError when it contains or lies in ``source``, TargetExistsError when it is complete and not to be
    overwritten, TargetUnwritableError when nothing can be written there.
    """
    target = url.rstrip("/")
    if is_http(target):
        raise TargetUnwritableError(
            f"{url}: fsdpckpt reads from web servers, and does not write to them",
            file=url,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )
    _refuse_source(url, source, target)
    try:
        filesystem, root = filesystem_of(target, examples="s3://, gs://, ...")
    except SourceError as error:  # the same is true of a target
        raise TargetUnwritableError(error.what, why=error.why, file=url, next_step=error.next_step) from error
    root = root.rstrip("/")
    if is_url(source):  # s3:// and s3a:// name one object
        other, name = filesystem_of(source)
        if type(other) is type(filesystem):
            _refuse_source(url, name, root)
    filesystem.invalidate_cache()
    listed = _ask(lambda: list(filesystem.find(root)), url=url, action="listing it")
    objects = (str(name) for name in listed if not str(name).endswith("/"))  # else it is a directory's placeholder
    names = tuple(name[len(root) :].lstrip("/") for name in objects)
    remote = RemoteTarget(target, filesystem, root, names)
    if names and not remote.interrupted:
        _refuse_existing(remote, overwrite=overwrite)
    return remote


def _refuse_source(url: str, source: str, target: str) -> None:
    above, below = source.rstrip("/") + "/", target + "/"
    if above.startswith(below) or below.startswith(above):
        raise UsageError(
            f"one of {url} and the source is inside the other", file=url, next_step="give a DST outside of SRC"
        )


def _refuse_existing(remote: RemoteTarget, *, overwrite: bool) -> None:
    if not overwrite:
        raise TargetExistsError(
            f"{remote.url} exists",
            file=remote.url,
            why="fsdpckpt won't replace existing files without --overwrite",
            next_step="give another DST, or add --overwrite to replace it",
        )
    if "/" not in remote.root:
        raise TargetExistsError(
            f"{remote.url} is a whole bucket: --overwrite does not replace that",
            file=remote.url,
            why="everything in it would be deleted",
            next_step="give a DST that does not exist yet",
        )


@dataclass(frozen=True, slots=True)
class Uploader:
    """Uploads files to ``filesystem`` with at most ``memory`` bytes of buffers, calling ``advance(nbytes)``."""

    filesystem: Any
    memory: int
    advance: Callable[[int], None]

    def put(self, path: str, name: str, url: str) -> None:
        """Upload the file at ``path`` as the object ``name``. Raises TargetUnwritableError; then nothing is visible."""
        nbytes = os.path.getsize(path)
        part = max(PART, -(-nbytes // MOST_PARTS))
        if nbytes <= part:
            _ask(lambda: self._whole(path, name, nbytes), url=url, action="uploading it")
        elif type(self.filesystem).__module__.startswith("s3fs"):
            self._in_parts(path, name, url, nbytes, part)
        elif type(self.filesystem).__module__.startswith("adlfs"):
            self._in_blocks(path, name, url, nbytes, part)
        else:
            _ask(lambda: self._streamed(path, name, part), url=url, action="uploading it")
            self.advance(nbytes)

    def info(self, name: str, url: str) -> dict[str, Any]:
        """The store's description of the object ``name`` now."""
        self.filesystem.invalidate_cache(self.filesystem._parent(name))
        info: dict[str, Any] = _ask(lambda: self.filesystem.info(name), url=url, action="looking it up")
        return info

    def require(self, name: str, url: str, nbytes: int) -> dict[str, Any]:
        """As ``info``. Raises TargetUnwritableError when the object is not ``nbytes`` long."""
        info = self.info(name, url)
        if info.get("size") != nbytes:
            raise TargetUnwritableError(
                f"{url} was not uploaded completely",
                file=url,
                expected=bytes_text(nbytes),
                found=str(info.get("size")),
                next_step="run the command again",
            )
        return info

    def _whole(self, path: str, name: str, nbytes: int) -> None:
        self.filesystem.pipe_file(name, _slice(path, 0, nbytes))
        self.advance(nbytes)

    def _streamed(self, path: str, name: str, part: int) -> None:
        """One request after the other, for stores that need the parts in order."""
        target = self.filesystem.open(name, "wb", block_size=part)
        try:
            with open(path, "rb") as source:
                while data := source.read(part):
                    target.write(data)
        except BaseException:
            target.closed = True  # closing would complete the object with the parts sent so far
            target.discard()
            raise
        target.close()

    def _in_parts(self, path: str, name: str, url: str, nbytes: int, part: int) -> None:
        bucket, key, _ = self.filesystem.split_path(name)
        place = {"Bucket": bucket, "Key": key}

        def ask(method: str, doing: str, **options: Any) -> Any:
            return _ask(lambda: self.filesystem.call_s3(method, **place, **options), url=url, action=doing)

        upload = ask("create_multipart_upload", "beginning the upload")["UploadId"]

        def send(number: int, data: bytes) -> dict[str, object]:
            answer = ask(
                "upload_part", f"uploading part {number + 1}", UploadId=upload, PartNumber=number + 1, Body=data
            )
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        try:
            parts = self._in_parallel(path, nbytes, part, send)
            ask("complete_multipart_upload", "ending the upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            ask("abort_multipart_upload", "removing the parts of a failed upload", UploadId=upload)
            raise
        self.filesystem.invalidate_cache(self.filesystem._parent(name))

    def _in_blocks(self, path: str, name: str, url: str, nbytes: int, part: int) -> None:
        """For Azure: blocks are invisible until they are committed; Azure deletes uncommitted ones after a week.

        adlfs's own file object is not used: it turns every failure of a block into a RuntimeError.
        """
        from azure.storage.blob import BlobBlock
        from fsspec.asyn import sync

        container, blob, _ = self.filesystem.split_path(name)

        def ask(method: str, doing: str, *arguments: object, **options: object) -> None:
            async def call() -> None:
                async with self.filesystem.service_client.get_blob_client(container, blob) as client:
                    await getattr(client, method)(*arguments, **options)

            _ask(lambda: sync(self.filesystem.loop, call), url=url, action=doing)

        run = uuid.uuid4().hex  # keeps blocks of other uploads of this object apart

        def send(number: int, data: bytes) -> str:
            block = f"{run}-{number:06}"  # all names have one length, as Azure requires
            ask("stage_block", f"uploading part {number + 1}", block, data, length=len(data))
            return block

        blocks = [BlobBlock(block) for block in self._in_parallel(path, nbytes, part, send)]
        ask("commit_block_list", "ending the upload", blocks, metadata={"is_directory": "false"})  # as adlfs marks it
        self.filesystem.invalidate_cache(self.filesystem._parent(name))

    def _in_parallel(self, path: str, nbytes: int, part: int, send: Callable[[int, bytes], T]) -> list[T]:
        """What ``send(number, data)`` returns for each part, in order. After a failure no further part is sent."""
        stop = threading.Event()

        def one(number: int) -> T | None:
            if stop.is_set():
                return None
            data = _slice(path, number * part, min(part, nbytes - number * part))
            answer = send(number, data)
            self.advance(len(data))
            return answer

        with ThreadPoolExecutor(max(min(MOST_UPLOADS, self.memory // (COPIES * part)), 1)) as pool:
            try:
                futures = [pool.submit(one, number) for number in range(-(-nbytes // part))]
                return [answer for future in futures if (answer := future.result()) is not None]
            finally:  # also after a signal: leaving the pool waits for its threads
                stop.set()


def _abort_leftovers(filesystem: Any, name: str, url: str) -> None:
    """Remove the invisible parts that killed uploads of the object ``name``, or of objects below it, left behind."""
    if not type(filesystem).__module__.startswith("s3fs"):
        return
    bucket, key, _ = filesystem.split_path(name)

    def ask(method: str, **options: Any) -> Any:
        return _ask(
            lambda: filesystem.call_s3(method, Bucket=bucket, **options),
            url=url,
            action="removing the parts of an interrupted upload",
        )

    for upload in ask("list_multipart_uploads", Prefix=key).get("Uploads", ()):
        if upload["Key"] == key or upload["Key"].startswith(f"{key}/"):
            ask("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])


def _slice(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)
