"""The multipart uploads of Google's XML API, which gcp-storage-emulator does not have, added to it.

After https://cloud.google.com/storage/docs/xml-api: post-object-multipart, put-object-multipart, post-object-complete,
delete-multipart and get-bucket-uploads, with their error codes. A list has two uploads a page; Google's has 1,000.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass, field
from html import escape, unescape
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

SMALLEST, MOST, PAGE = 5 << 20, 10_000, 2


@dataclass
class Upload:
    bucket: str
    key: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class XmlApi:
    """``uploads``: those that are neither complete nor aborted. ``handlers``: for the emulator's router."""

    uploads: dict[str, Upload] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)

    @property
    def handlers(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        bucket = r"^/(?P<bucket_name>[-.\w]+)"
        by_object = {"GET": objects.download, "PUT": self.put, "POST": self.post, "DELETE": self.abort}
        return (rf"{bucket}/?$", {"GET": self.listed}), (rf"{bucket}/(?P<object_id>.*[^/]+)$", by_object)

    def post(self, request: Any, response: Any, storage: Any) -> None:
        bucket, key = request.params["bucket_name"], request.params["object_id"]
        if request._parsed_url.query == "uploads":  # without "=", as the documentation has it
            assert request.get_header("Content-Length") == "0"
            try:
                storage.get_bucket(bucket)
            except NotFound:
                self._refuse(response, HTTPStatus.NOT_FOUND, "NoSuchBucket")
                return
            number = f"upload+{next(self.numbers)}/="
            self.uploads[number] = Upload(bucket, key)
            content = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{escape(number)}</UploadId>"
            self._answer(response, "InitiateMultipartUploadResult", content)
            return
        upload = self._upload(request, response)
        if upload is not None:
            self._complete(upload, request, response, storage)

    def put(self, request: Any, response: Any, storage: Any) -> None:
        if "uploadId" not in request.query:
            objects.xml_upload(request, response, storage)
            return
        upload = self._upload(request, response)
        if upload is None:
            return
        number = int(request.query["partNumber"][0])
        if not 1 <= number <= MOST:
            self._refuse(response, HTTPStatus.BAD_REQUEST, "InvalidArgument")
            return
        tag = f'"{hashlib.md5(request.data).hexdigest()}"'
        upload.parts[number] = tag, bytes(request.data)
        response["ETag"] = tag

    def abort(self, request: Any, response: Any, storage: Any) -> None:
        upload = self._upload(request, response)
        if upload is not None:
            del self.uploads[request.query["uploadId"][0]]
            response.status = HTTPStatus.NO_CONTENT

    def listed(self, request: Any, response: Any, storage: Any) -> None:
        query = parse_qs(request._parsed_url.query, keep_blank_values=True)
        assert "uploads" in query
        bucket, prefix = request.params["bucket_name"], query.get("prefix", [""])[0]
        after = (query.get("key-marker", [""])[0], query.get("upload-id-marker", [""])[0])
        found = sorted(
            (upload.key, number)
            for number, upload in self.uploads.items()
            if upload.bucket == bucket and upload.key.startswith(prefix) and (upload.key, number) > after
        )
        page = found[:PAGE]
        content = f"<IsTruncated>{'true' if len(found) > PAGE else 'false'}</IsTruncated>"
        if len(found) > PAGE:
            key, number = (escape(text) for text in page[-1])
            content += f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{number}</NextUploadIdMarker>"
        for key, number in page:
            content += f"<Upload><Key>{escape(key)}</Key><UploadId>{escape(number)}</UploadId></Upload>"
        self._answer(response, "ListMultipartUploadsResult", content)

    def _complete(self, upload: Upload, request: Any, response: Any, storage: Any) -> None:
        pattern = r"<Part>\s*<PartNumber>(\d+)</PartNumber>\s*<ETag>(.*?)</ETag>\s*</Part>"
        given = [(int(number), unescape(tag)) for number, tag in re.findall(pattern, request.data.decode())]
        numbers = [number for number, _ in given]
        if numbers != sorted(set(numbers)):
            self._refuse(response, HTTPStatus.BAD_REQUEST, "InvalidPartOrder")
        elif not given or any(upload.parts.get(number, ("",))[0] != tag for number, tag in given):
            self._refuse(response, HTTPStatus.BAD_REQUEST, "InvalidPart")
        elif any(len(upload.parts[number][1]) < SMALLEST for number in numbers[:-1]):
            self._refuse(response, HTTPStatus.BAD_REQUEST, "EntityTooSmall")
        else:
            data = b"".join(upload.parts[number][1] for number in numbers)
            kind = "application/octet-stream"
            resource = objects._make_object_resource(request.base_url, upload.bucket, upload.key, kind, str(len(data)))
            resource = objects._checksums(data, resource)  # with an MD5, without which the emulator sends no object
            storage.create_file(upload.bucket, upload.key, data, resource)
            del self.uploads[request.query["uploadId"][0]]
            self._answer(response, "CompleteMultipartUploadResult", f"<Key>{escape(upload.key)}</Key>")

    def _upload(self, request: Any, response: Any) -> Upload | None:
        upload = self.uploads.get(request.query.get("uploadId", [""])[0])
        if upload is None or (upload.bucket, upload.key) != tuple(request.params.values()):
            self._refuse(response, HTTPStatus.NOT_FOUND, "NoSuchUpload")
            return None
        return upload

    def _refuse(self, response: Any, status: HTTPStatus, code: str) -> None:
        response.status = status
        self._answer(response, "Error", f"<Code>{code}</Code><Message>{code}</Message>")

    def _answer(self, response: Any, root: str, content: str) -> None:
        head = "<?xml version='1.0' encoding='UTF-8'?>"
        response.write_file(
            f"{head}<{root} xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>{content}</{root}>".encode()
        )
