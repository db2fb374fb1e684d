"""Put files into an object store: each appears whole or not at all, and an upload that fails leaves no parts behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage.remote_errors import target_error, tried

__all__ = ["COPIES", "MOST_UPLOADS", "PART", "Uploader", "abort_leftovers"]

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
        stop = threading.Event()

        def ask(method: str, doing: str, **options: Any) -> Any:
            return tried(
                lambda: self.filesystem.call_s3(method, **place, **options), url=url, doing=doing, words=target_error
            )

        upload = ask("create_multipart_upload", "beginning the upload")["UploadId"]

        def send(number: int) -> dict[str, object] | None:
            if stop.is_set():
                return None
            data = _slice(path, number * part, min(part, nbytes - number * part))
            answer = ask(
                "upload_part", f"uploading part {number + 1}", UploadId=upload, PartNumber=number + 1, Body=data
            )
            self.sent(len(data))
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(max(min(MOST_UPLOADS, self.memory // (COPIES * part)), 1)) as pool:
                try:
                    futures = [pool.submit(send, number) for number in range(-(-nbytes // part))]
                    parts = [future.result() for future in futures]
                finally:  # also after a signal: the pool waits for its threads
                    stop.set()
            ask("complete_multipart_upload", "ending the upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            ask("abort_multipart_upload", "removing the parts of a failed upload", UploadId=upload)
            raise
        self.filesystem.invalidate_cache(self.filesystem._parent(name))


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
