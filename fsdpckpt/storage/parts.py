"""Sends one object to a store in parts, in any order, of which nothing is visible before all of it is complete.

- S3: a multipart upload. What is not completed stays, and costs, until it is aborted.
- Google: the XML API's multipart upload, which is like that of S3; the JSON API, which gcsfs uses otherwise, takes
  parts only one after the other.
- Azure: blocks of a blob, which exist for readers once a list of them is committed. Azure deletes others after a week.

A store is known by the package of its fsspec file system.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage.retry import OF_AN_UPLOAD, is_missing, target_error, with_retries

_SENDING, _ENDING = OF_AN_UPLOAD
MAX_PARTS = 10_000  # of one object in S3 and Google; Azure takes more

Leftovers: TypeAlias = "Iterator[tuple[str, Callable[[], object]]]"
"""The names of objects that killed uploads were sending, and what removes the parts of each."""

request_target = partial(with_retries, make_error=target_error)


def package_of(filesystem: Any) -> str:
    return type(filesystem).__module__.partition(".")[0]


class PartsUpload(ABC):
    """An upload of the object at ``path`` of ``filesystem``, which messages call ``url``. Thread-safe.

    ``upload``: what the store calls it. Who is told that may send parts of the same object; ``tags`` are what the store
    answered to each part by its number, and who completes the object needs those of all. Raises TargetUnwritableError.
    """

    def __init__(self, filesystem: Any, path: str, url: str, upload: str = "") -> None:
        self._filesystem = filesystem
        self._bucket, self._key = filesystem.split_path(path)[:2]
        self._url = url
        self.tags: dict[int, str] = {}
        self.upload = upload or self._begin()

    @abstractmethod
    def _begin(self) -> str:
        """Begin a new upload."""

    def send(self, number: int, data: bytes | bytearray) -> None:
        """Send part ``number``, counted from 0. Raises TargetUnwritableError."""
        self.tags[number] = self._send(number, data, f"{_SENDING} {number + 1}")

    @abstractmethod
    def _send(self, number: int, data: bytes | bytearray, action: str) -> str: ...

    @abstractmethod
    def complete(self) -> None:
        """Make the object of all parts in ``tags``. Raises TargetUnwritableError."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the parts that were sent, if the store does not do so itself. Raises nothing."""

    @classmethod
    @abstractmethod
    def leftovers(cls, filesystem: Any, bucket: str, prefix: str, url: str) -> Leftovers:
        """Those of objects in ``bucket`` whose names begin with ``prefix``, if the store does not remove them itself.
        Raises TargetUnwritableError.
        """


class S3Upload(PartsUpload):
    def _begin(self) -> str:
        return str(self._call("create_multipart_upload", "beginning the upload")["UploadId"])

    def _send(self, number: int, data: bytes | bytearray, action: str) -> str:
        part = {"UploadId": self.upload, "PartNumber": number + 1, "Body": data}
        return str(self._call("upload_part", action, **part)["ETag"])

    def complete(self) -> None:
        parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in sorted(self.tags.items())]
        upload = {"UploadId": self.upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._call("complete_multipart_upload", _ENDING, **upload)
        except TargetUnwritableError as error:
            # A store ends an upload once. If that answer was lost, it knows of none when it is asked again.
            cause = error.__context__
            if cause is None or not is_missing(cause) or not self._is_there():
                raise

    def _is_there(self) -> bool:
        """Whether the object is the one of these parts: S3 makes its tag of theirs, where those are MD5 sums."""
        with suppress(TargetUnwritableError, ValueError):
            found = str(self._call("head_object", "looking it up")["ETag"]).strip('"')
            sums = b"".join(bytes.fromhex(tag.strip('"')) for _, tag in sorted(self.tags.items()))
            return found == f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(self.tags)}"
        return False

    def abort(self) -> None:
        with suppress(TargetUnwritableError):  # the next run aborts it, and the cause is what matters
            self._call("abort_multipart_upload", "removing the parts of a failed upload", UploadId=self.upload)

    def _call(self, method: str, action: str, **options: Any) -> Any:
        return _s3(self._filesystem, self._url, method, action, Bucket=self._bucket, Key=self._key, **options)

    @classmethod
    def leftovers(cls, filesystem: Any, bucket: str, prefix: str, url: str) -> Leftovers:
        call = partial(_s3, filesystem, url, action=_REMOVING, Bucket=bucket)
        found, more = [], {"Prefix": prefix}
        while True:
            answer = call("list_multipart_uploads", **more)
            found += [(each["Key"], each["UploadId"]) for each in answer.get("Uploads", ())]
            if not answer.get("IsTruncated"):
                break
            more |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
        for key, upload in found:
            yield key, partial(call, "abort_multipart_upload", Key=key, UploadId=upload)


def _s3(filesystem: Any, url: str, method: str, action: str, **options: Any) -> Any:
    return request_target(lambda: filesystem.call_s3(method, **options), url=url, action=action)


class GoogleUpload(PartsUpload):
    def _begin(self) -> str:
        _, answer = self._call("POST", "?uploads", "beginning the upload")
        return _only(answer, "UploadId", self._url)

    def _send(self, number: int, data: bytes | bytearray, action: str) -> str:
        headers, _ = self._call("PUT", f"?partNumber={number + 1}&{self._query}", action, data=bytes(data))
        return str(headers["ETag"])

    def complete(self) -> None:
        from html import escape

        parts = "".join(
            f"<Part><PartNumber>{number + 1}</PartNumber><ETag>{escape(tag, quote=False)}</ETag></Part>"
            for number, tag in sorted(self.tags.items())
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
        self._call("POST", f"?{self._query}", _ENDING, data=body.encode())

    def abort(self) -> None:
        with suppress(TargetUnwritableError):  # the next run aborts it, and the cause is what matters
            self._call("DELETE", f"?{self._query}", "removing the parts of a failed upload")

    @property
    def _query(self) -> str:
        return f"uploadId={quote(self.upload, safe='')}"

    def _call(self, method: str, query: str, action: str, data: bytes | None = None) -> tuple[Mapping[str, str], bytes]:
        resource = f"{self._bucket}/{quote(self._key)}{query}"
        return _google(self._filesystem, self._url, method, resource, action, data)

    @classmethod
    def leftovers(cls, filesystem: Any, bucket: str, prefix: str, url: str) -> Leftovers:
        found, more = [], ""
        while True:
            query = f"?uploads&prefix={quote(prefix, safe='')}{more}"
            _, answer = _google(filesystem, url, "GET", f"{bucket}{query}", _REMOVING)
            uploads = re.findall(rb"<Upload>.*?</Upload>", answer, re.DOTALL)
            found += [(_only(each, "Key", url), _only(each, "UploadId", url)) for each in uploads]
            if not re.search(rb"<IsTruncated>\s*true\s*<", answer):
                break
            markers = [_only(answer, name, url) for name in ("NextKeyMarker", "NextUploadIdMarker")]
            more = "&key-marker={}&upload-id-marker={}".format(*(quote(marker, safe="") for marker in markers))
        for key, upload in found:
            resource = f"{bucket}/{quote(key)}?uploadId={quote(upload, safe='')}"
            yield key, partial(_google, filesystem, url, "DELETE", resource, _REMOVING)


def _google(
    filesystem: Any, url: str, method: str, resource: str, action: str, data: bytes | None = None
) -> tuple[Mapping[str, str], bytes]:
    """Ask the XML API, which is at the address of the JSON API that gcsfs uses: (headers, content)."""
    host = filesystem.base.removesuffix("/storage/v1/")
    headers = {}
    if filesystem.requester_pays:  # gcsfs says so in the query, as the JSON API takes it
        project = filesystem.requester_pays
        headers["x-goog-user-project"] = project if isinstance(project, str) else filesystem.project
    ask = partial(filesystem.call, method, f"{host}/{resource}", headers=headers, data=data)
    answer: tuple[Mapping[str, str], bytes] = request_target(ask, url=url, action=action)
    return answer


def _only(answer: bytes, name: str, url: str) -> str:
    """The content of the element ``name``. Raises TargetUnwritableError if there is none."""
    from html import unescape

    found = re.search(rb"<%b>([^<]*)</%b>" % (name.encode(), name.encode()), answer)
    if found is None:
        raise TargetUnwritableError(
            f"{url}: the store's answer has no {name}", file=url, found=answer[:200].decode(errors="replace")
        )
    return unescape(found[1].decode())


class AzureUpload(PartsUpload):
    """adlfs's own file object is not used: it turns every failure of a block into a RuntimeError."""

    def _begin(self) -> str:
        return uuid.uuid4().hex  # keeps blocks of other uploads of this blob apart

    def _send(self, number: int, data: bytes | bytearray, action: str) -> str:
        content = bytes(data)
        self._call("stage_block", action, self._block(number), content, length=len(content))
        return ""  # Azure knows blocks by the names that they were given

    def complete(self) -> None:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._block(number)) for number in sorted(self.tags)]
        marked = {"is_directory": "false"}  # as adlfs does
        self._call("commit_block_list", _ENDING, blocks, metadata=marked)

    def abort(self) -> None:
        """Blocks cannot be deleted. Azure does it after a week, or when other blocks are committed."""

    def _block(self, number: int) -> str:
        return f"{self.upload}-{number:06}"  # all names have one length, as Azure requires

    def _call(self, method: str, action: str, *arguments: object, **keywords: object) -> None:
        from fsspec.asyn import sync

        async def request() -> None:
            async with self._filesystem.service_client.get_blob_client(self._bucket, self._key) as client:
                await getattr(client, method)(*arguments, **keywords)

        request_target(lambda: sync(self._filesystem.loop, request), url=self._url, action=action)

    @classmethod
    def leftovers(cls, filesystem: Any, bucket: str, prefix: str, url: str) -> Leftovers:
        return iter(())


_REMOVING = "removing the parts of an interrupted upload"
_KINDS: Mapping[str, type[PartsUpload]] = {
    "s3fs": S3Upload,
    "gcsfs": GoogleUpload,
    "adlfs": AzureUpload,
}


def takes_parts(filesystem: Any) -> bool:
    """Whether objects can be sent in parts, in any order, without being seen before they are complete."""
    return package_of(filesystem) in _KINDS


def renames_at_once(filesystem: Any) -> bool:
    """Whether the store gives an object another name in one step.

    Azure copies it instead, and until it has done so the new name is there without the content.
    """
    return package_of(filesystem) != "adlfs"


def begin_parts(filesystem: Any, path: str, url: str, upload: str = "") -> PartsUpload:
    """Begin to send the object at ``path`` in parts, or join the ``upload`` that another process has begun. Raises
    TargetUnwritableError.
    """
    return _KINDS[package_of(filesystem)](filesystem, path, url, upload)


def abort_leftovers(filesystem: Any, path: str, url: str, names: Collection[str] | None = None) -> None:
    """Remove the invisible parts that killed uploads to ``path`` left, and with ``names`` to objects below it.

    Nobody else writes below a DST, so all of these are left. In a whole bucket others may be sending at this moment:
    there only those of ``names``, the objects that are about to be sent, are removed.
    """
    bucket, key = filesystem.split_path(path)[:2]
    for name, abort in _KINDS[package_of(filesystem)].leftovers(filesystem, bucket, key, url):
        below = names is not None and (name.startswith(f"{key}/") if key else name in names)
        if below or name == key:
            abort()
