"""A file in S3 is written as every other target is: all of it is visible once it is committed, and nothing before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdpckpt.storage import ByteTarget
from tests.e2e.remote.servers import Proxy
from tests.storage.byte_target_contract import PublishedTargetContract, UploadedFile


class TestUploadToS3(PublishedTargetContract):
    @pytest.fixture(autouse=True)
    def _clean_bucket(self, s3: Proxy) -> Iterator[None]:
        import boto3

        self.client = boto3.client("s3", endpoint_url=s3.backend)
        yield
        for each in self.client.list_objects_v2(Bucket="runs", Prefix="targets/").get("Contents", []):
            self.client.delete_object(Bucket="runs", Key=each["Key"])

    def make(self, name: str, nbytes: int) -> ByteTarget:
        return UploadedFile(f"s3://runs/targets/{name}", self.root, nbytes)

    def stored(self, name: str) -> bytes | None:
        if not self.client.list_objects_v2(Bucket="runs", Prefix=f"targets/{name}").get("KeyCount"):
            return None
        data: bytes = self.client.get_object(Bucket="runs", Key=f"targets/{name}")["Body"].read()
        return data
