"""Put files into an object store: each appears whole or not at all, and an upload that fails leaves no parts behind."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage.remote.errors import target_error, tried

__all__ = ["COPIES", "MOST_UPLOADS", "PART", "Uploader", "abort_leftovers"]

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
