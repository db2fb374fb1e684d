"""A DST in an object store, which has no rename: what makes it appear complete or not at all.

Protocol for a directory: 1. an object ``fsdpckpt.uploading`` is put there first: readers refuse a directory that has
it. 2. What says that an older checkpoint there is complete is deleted. 3. The data goes up, side by side. 4. Objects of
an older checkpoint that the new one lacks are deleted. 5. The lists that name the data go up, ``fsdpckpt.json`` and
then, of a DCP directory, ``.metadata``, without which PyTorch loads nothing. 6. ``fsdpckpt.uploading`` is deleted.
A single object needs none of this: it appears, and replaces an older one, when its upload is completed.

``upload`` is all of it by one process. Several share it: one calls ``begin``, then all ``send``, then one ``complete``.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdpckpt.errors import SourceError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.protocols import UPLOADING, is_url
from fsdpckpt.storage.remote_store import filesystem_of, is_http
from fsdpckpt.storage.retry import target_error, tried

__all__ = ["COPIES", "MOST_UPLOADS", "PART", "RemoteTarget", "Sending", "Uploader", "abort_leftovers", "open_target"]

# The later ones name the earlier ones; whoever reads one of these believes that what it names is there.
_LISTS = (".safetensors.index.json", "units.json", "fsdpckpt.json", ".metadata")


@dataclass(frozen=True, slots=True)
class Sending:
    """How files go up: with at most ``memory`` bytes held; ``sent`` is told how many bytes came.

    ``there`` says of a name and what the store says of it whether an earlier run has put it there; ``arrived`` is told
    of each object that has come. ``check`` compares an object (its URL) with its file.
    """

    memory: int
    sent: Callable[[int], None]
    there: Callable[[str, Mapping[str, Any]], bool]
    arrived: Callable[[str, Mapping[str, Any]], None]
    check: Callable[[str, str], None] | None


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """``names``: the objects that are at or below ``url`` now, relative to it ("" is the object ``url`` itself)."""

    url: str
    filesystem: Any
    root: str
    names: tuple[str, ...]

    @property
    def interrupted(self) -> bool:
        """Whether an upload of this program was begun there and has not ended."""
        return UPLOADING in self.names

    def upload(self, files: Mapping[str, str], sending: Sending) -> None:
        """Put the local ``files`` (relative name to path) there, by the protocol above."""
        self.begin({name: os.path.getsize(path) for name, path in files.items()})
        self.send(files, sending)
        self.complete(files, files, sending)

    def begin(self, sizes: Mapping[str, int]) -> None:
        """Steps 1 and 2. ``sizes``: bytes of every file that will be there, by relative name."""
        abort_leftovers(self.filesystem, self.root, self.url)
        if "" not in sizes:
            self._announce(sizes)
            for name in (name for name in self.names if name.endswith(_LISTS)):
                self._delete(name)

    def send(self, files: Mapping[str, str], sending: Sending) -> None:
        """Step 3, for ``files``; others may send the rest of them meanwhile. Lists among them are left out."""
        data = [name for name in files if not name.endswith(_LISTS)]
        small = [name for name in data if os.path.getsize(files[name]) <= PART]
        pool = ThreadPoolExecutor(max(min(MOST_UPLOADS, sending.memory // (COPIES * PART)), 1))
        try:
            list(pool.map(lambda name: self._put(name, files[name], sending), small))
        finally:  # also after a signal: those that wait are not begun any more
            pool.shutdown(cancel_futures=True)
        for name in data:
            if name not in small:
                self._put(name, files[name], sending)

    def complete(self, files: Mapping[str, str], names: Collection[str], sending: Sending) -> None:
        """Steps 4 to 6, once all data is there. ``files``: the lists at least; ``names``: of all files."""
        directory = "" not in names
        for name in self.names:
            if name not in names and name != UPLOADING and not (directory and name.endswith(_LISTS)):
                self._delete(name)
        for ending in _LISTS:
            for name in (name for name in files if name.endswith(ending)):
                self._put(name, files[name], sending)
        if directory:
            self._delete(UPLOADING)

    def _put(self, name: str, path: str, sending: Sending) -> None:
        nbytes = os.path.getsize(path)
        uploader = Uploader(self.filesystem, sending.memory, sending.sent)
        at, url = self._name(name), self._url(name)
        if name in self.names and not name.endswith(_LISTS) and sending.there(name, uploader.info(at, url)):
            sending.sent(nbytes)
            return
        uploader.put(path, at, url)
        info = uploader.require(at, url, nbytes)
        if sending.check is not None:
            sending.check(url, path)
        sending.arrived(name, info)

    def _announce(self, sizes: Mapping[str, int]) -> None:
        text = json.dumps({"program": "fsdpckpt", "files": dict(sizes)})
        tried(
            lambda: self.filesystem.pipe_file(self._name(UPLOADING), text.encode()),
            url=self._url(UPLOADING),
            doing="uploading it",
            words=target_error,
        )

    def _delete(self, name: str) -> None:
        def delete() -> None:
            try:
                self.filesystem.rm_file(self._name(name))
            except FileNotFoundError:
                return

        tried(delete, url=self._url(name), doing="deleting it", words=target_error)

    def _name(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def open_target(url: str, source: str, *, overwrite: bool, resume: bool) -> RemoteTarget:
    """The DST at ``url``, if it may be written.

    Raises UsageError for one that holds or lies in ``source``, TargetExistsError for one that is there already and is
    neither to be overwritten nor resumed, TargetUnwritableError for what cannot be written to at all.
    """
    target = url.rstrip("/")
    if is_http(target):
        raise TargetUnwritableError(
            f"{url}: web servers are read from only",
            file=url,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )
    above, below = source.rstrip("/") + "/", target + "/"
    if above.startswith(below) or below.startswith(above):
        raise UsageError(f"{url} and the source lie within each other", file=url, next_step="give a DST outside of SRC")
    try:
        filesystem, root = filesystem_of(target)
    except SourceError as error:  # it is said of a source, and is true of a target
        next_step = (error.next_step or "give a path").replace(", https://, ...", ", ...")
        raise TargetUnwritableError(error.what, why=error.why, file=url, next_step=next_step) from error
    root = root.rstrip("/")
    if is_url(source):  # s3:// and s3a:// name one object
        other, name = filesystem_of(source)
        above, below = name.rstrip("/") + "/", root + "/"
        if type(other) is type(filesystem) and (above.startswith(below) or below.startswith(above)):
            raise UsageError(
                f"{url} and the source lie within each other", file=url, next_step="give a DST outside of SRC"
            )
    filesystem.invalidate_cache()
    found = tried(lambda: list(filesystem.find(root)), url=url, doing="listing it", words=target_error)
    objects = (str(name) for name in found if not str(name).endswith("/"))  # else it stands for a directory
    names = tuple(name[len(root) :].lstrip("/") for name in objects)
    remote = RemoteTarget(target, filesystem, root, names)
    if names:
        _refuse_existing(remote, overwrite=overwrite, resume=resume)
    return remote


def _refuse_existing(remote: RemoteTarget, *, overwrite: bool, resume: bool) -> None:
    if remote.interrupted:
        if not overwrite and not resume:
            raise TargetExistsError(
                f"{remote.url} holds an upload that has not ended",
                file=f"{remote.url}/{UPLOADING}",
                why="it was interrupted, or still runs on another machine",
                next_step="--resume goes on with it, --overwrite begins again; or give another DST",
            )
        return
    if not overwrite:
        raise TargetExistsError(
            f"{remote.url} exists",
            file=remote.url,
            why="fsdpckpt never replaces anything unasked",
            next_step="give another DST, or add --overwrite to replace it",
        )
    if "/" not in remote.root:
        raise TargetExistsError(
            f"{remote.url} is a whole bucket: --overwrite does not replace that",
            file=remote.url,
            why="everything in it would be deleted",
            next_step="give a DST of its own, one that does not exist yet",
        )


T = TypeVar("T")

PART = 8 << 20  # bytes held of each running request; every store takes parts of this size
MOST_PARTS = 10_000  # of one S3 object
COPIES = 4  # of a part that are held while it is sent: the packages that do it make their own
MOST_UPLOADS = 8  # at a time: the line to a store is full before


@dataclass(frozen=True, slots=True)
class Uploader:
    """Sends files to ``filesystem`` with at most ``memory`` bytes held. ``sent`` is told the bytes that arrived."""

    filesystem: Any
    memory: int
    sent: Callable[[int], None]

    def put(self, path: str, name: str, url: str) -> None:
        """The file at ``path`` becomes the object ``name``. Raises TargetUnwritableError; nothing is visible then."""
        nbytes = os.path.getsize(path)
        part = max(PART, -(-nbytes // MOST_PARTS))
        if nbytes <= part:
            tried(lambda: self._whole(path, name, nbytes), url=url, doing="uploading it", words=target_error)
        elif type(self.filesystem).__module__.startswith("s3fs"):
            self._in_parts(path, name, url, nbytes, part)
        elif type(self.filesystem).__module__.startswith("adlfs"):
            self._in_blocks(path, name, url, nbytes, part)
        else:
            tried(lambda: self._streamed(path, name, part), url=url, doing="uploading it", words=target_error)
            self.sent(nbytes)

    def info(self, name: str, url: str) -> dict[str, Any]:
        """What the store says of the object ``name`` now."""
        self.filesystem.invalidate_cache(self.filesystem._parent(name))
        found: dict[str, Any] = tried(
            lambda: self.filesystem.info(name), url=url, doing="looking it up", words=target_error
        )
        return found

    def require(self, name: str, url: str, nbytes: int) -> dict[str, Any]:
        """What the store says of the object ``name``. Raises TargetUnwritableError when that is not ``nbytes`` long."""
        info = self.info(name, url)
        if info.get("size") != nbytes:
            raise TargetUnwritableError(
                f"{url} did not arrive whole",
                file=url,
                expected=f"{nbytes} bytes",
                found=str(info.get("size")),
                next_step="run the command again with --resume",
            )
        return info

    def _whole(self, path: str, name: str, nbytes: int) -> None:
        self.filesystem.pipe_file(name, _slice(path, 0, nbytes))
        self.sent(nbytes)

    def _streamed(self, path: str, name: str, part: int) -> None:
        """One request after the other, as fsspec does it for stores whose parts have an order."""
        target = self.filesystem.open(name, "wb", block_size=part)
        try:
            with open(path, "rb") as source:
                while data := source.read(part):
                    target.write(data)
        except BaseException:
            target.closed = True  # closing would complete the object with what has come so far
            target.discard()
            raise
        target.close()

    def _in_parts(self, path: str, name: str, url: str, nbytes: int, part: int) -> None:
        bucket, key, _ = self.filesystem.split_path(name)
        place = {"Bucket": bucket, "Key": key}

        def ask(method: str, doing: str, **options: Any) -> Any:
            return tried(
                lambda: self.filesystem.call_s3(method, **place, **options), url=url, doing=doing, words=target_error
            )

        upload = ask("create_multipart_upload", "beginning the upload")["UploadId"]

        def send(number: int, data: bytes) -> dict[str, object]:
            answer = ask(
                "upload_part", f"uploading part {number + 1}", UploadId=upload, PartNumber=number + 1, Body=data
            )
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        try:
            parts = self._side_by_side(path, nbytes, part, send)
            ask("complete_multipart_upload", "ending the upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            ask("abort_multipart_upload", "removing the parts of a failed upload", UploadId=upload)
            raise
        self.filesystem.invalidate_cache(self.filesystem._parent(name))

    def _in_blocks(self, path: str, name: str, url: str, nbytes: int, part: int) -> None:
        """Azure's way: blocks that nobody sees until they are committed; what never is goes away by itself in a week.

        Not by adlfs's own file: that one turns every failure of a block into a RuntimeError.
        """
        from azure.storage.blob import BlobBlock
        from fsspec.asyn import sync

        container, blob, _ = self.filesystem.split_path(name)

        def ask(method: str, doing: str, *arguments: object, **options: object) -> None:
            async def call() -> None:
                async with self.filesystem.service_client.get_blob_client(container, blob) as client:
                    await getattr(client, method)(*arguments, **options)

            tried(lambda: sync(self.filesystem.loop, call), url=url, doing=doing, words=target_error)

        run = uuid.uuid4().hex  # blocks of another upload of this object are none of this one

        def send(number: int, data: bytes) -> str:
            block = f"{run}-{number:06}"  # all of one length, as Azure wants them
            ask("stage_block", f"uploading part {number + 1}", block, data, length=len(data))
            return block

        blocks = [BlobBlock(block) for block in self._side_by_side(path, nbytes, part, send)]
        ask("commit_block_list", "ending the upload", blocks, metadata={"is_directory": "false"})  # as adlfs notes it
        self.filesystem.invalidate_cache(self.filesystem._parent(name))

    def _side_by_side(self, path: str, nbytes: int, part: int, send: Callable[[int, bytes], T]) -> list[T]:
        """What ``send`` returns for each part (number, bytes), in order. After a failure none is begun any more."""
        stop = threading.Event()

        def one(number: int) -> T | None:
            if stop.is_set():
                return None
            data = _slice(path, number * part, min(part, nbytes - number * part))
            answer = send(number, data)
            self.sent(len(data))
            return answer

        with ThreadPoolExecutor(max(min(MOST_UPLOADS, self.memory // (COPIES * part)), 1)) as pool:
            try:
                futures = [pool.submit(one, number) for number in range(-(-nbytes // part))]
                return [answer for future in futures if (answer := future.result()) is not None]
            finally:  # also after a signal: the pool waits for its threads
                stop.set()


def abort_leftovers(filesystem: Any, name: str, url: str) -> None:
    """Remove the invisible parts that a killed upload of the object ``name``, or of objects below it, has left."""
    if not type(filesystem).__module__.startswith("s3fs"):
        return
    bucket, key, _ = filesystem.split_path(name)

    def ask(method: str, **options: Any) -> Any:
        return tried(
            lambda: filesystem.call_s3(method, Bucket=bucket, **options),
            url=url,
            doing="removing the parts of an interrupted upload",
            words=target_error,
        )

    for found in ask("list_multipart_uploads", Prefix=key).get("Uploads", ()):
        if found["Key"] == key or found["Key"].startswith(f"{key}/"):
            ask("abort_multipart_upload", Key=found["Key"], UploadId=found["UploadId"])


def _slice(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)
