"""Files behind real servers read as every other source does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.remote_store import RemoteStore
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.stores import S3
from tests.storage.byte_source_contract import NamedByteSourceContract


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
