"""A file in S3 is written as every other target is: all of it is visible once it is committed, and nothing before."""

from __future__ import annotations

import pytest

from fsdpckpt.storage import ByteTarget
from tests.e2e.remote.stores import S3
from tests.storage.byte_target_contract import PublishedTargetContract, UploadedFile


class TestUploadToS3(PublishedTargetContract):
    @pytest.fixture(autouse=True)
    def _empty(self, s3: S3) -> None:
        self.s3 = s3

    def make(self, name: str, nbytes: int) -> ByteTarget:
        return UploadedFile(f"s3://runs/targets/{name}", self.root, nbytes)

    def stored(self, name: str) -> bytes | None:
        return self.s3.objects("targets").get(name)
