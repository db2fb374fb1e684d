"""Files behind real servers read as every other source does, and a file in S3 is written as every other target is: all
of it is visible once it is committed, and nothing before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpckpt.storage import ByteSource, ByteTarget
from fsdpckpt.storage.remote_store import RemoteStore
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.stores import S3
from tests.storage.byte_source_contract import NamedByteSourceContract
from tests.storage.byte_target_contract import PublishedTargetContract, UploadedFile


class _Remote(NamedByteSourceContract):
    """A subclass has the fixture ``root``: the URL under which the server has the ``files``."""

    @pytest.fixture
    def source(self, files: Path, root: str) -> ByteSource:
        self.content = (files / "full.pt").read_bytes()
        self.root = root
        return RemoteStore().open(f"{root}/full.pt")

    def open_absent(self) -> ByteSource:
        return RemoteStore().open(f"{self.root}/absent.pt")


class TestWebServer(_Remote):
    @pytest.fixture
    def root(self, web: Proxy) -> str:
        return web.url


class TestS3(_Remote):
    @pytest.fixture
    def root(self, s3: S3) -> str:
        return "s3://runs"


class TestUploadToS3(PublishedTargetContract):
    @pytest.fixture(autouse=True)
    def _empty(self, s3: S3) -> None:
        self.s3 = s3

    def make(self, name: str, nbytes: int) -> ByteTarget:
        return UploadedFile(f"s3://runs/targets/{name}", self.root, nbytes)

    def stored(self, name: str) -> bytes | None:
        return self.s3.objects("targets").get(name)
