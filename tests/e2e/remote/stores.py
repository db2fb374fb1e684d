"""Servers on loopback that speak the languages of S3, Google and Azure, and what leads their clients there."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.remote.servers import Proxy, await_port, proxy
from tests.oracle.ranks import free_port

__all__ = ["S3", "Store", "files_below", "lead_to", "running_s3", "s3_store", "started"]

# The account and key that every Azurite has, as Microsoft documents them: they open nothing but an emulator.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_AWS_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


def files_below(path: Path) -> dict[str, bytes]:
    """The content of each file below a directory, or of the file itself, whose name is empty."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class S3(Proxy):
    """An S3 server. What is asked here, the proxy does not see."""

    @cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.backend, region_name="us-east-1", **_AWS_KEYS)

    def names(self, prefix: str = "", bucket: str = "runs") -> set[str]:
        found = self.client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        return {each["Key"] for each in found}

    def content(self, key: str, bucket: str = "runs") -> bytes:
        body: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return body

    def objects(self, directory: str) -> dict[str, bytes]:
        """The content of each object in ``directory`` of the bucket, by its name there."""
        return {key.removeprefix(f"{directory}/"): self.content(key) for key in self.names(f"{directory}/")}

    def put(self, key: str, data: bytes, bucket: str = "runs") -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def delete(self, key: str, bucket: str = "runs") -> None:
        self.client.delete_object(Bucket=bucket, Key=key)

    def begin_upload(self, key: str, bucket: str = "runs") -> None:
        self.client.create_multipart_upload(Bucket=bucket, Key=key)

    def unfinished(self, bucket: str = "runs") -> list[str]:
        """The objects of which there are parts and no object."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def abort_uploads(self, bucket: str = "runs") -> None:
        for each in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", []):
            self.client.abort_multipart_upload(Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])


@dataclass(frozen=True)
class Store:
    """The bucket ``runs`` of a store.

    ``scheme``: of its URLs; ``direct``: a client that the proxy does not see. ``unfinished``: the objects of which
    there are parts and no object.
    """

    scheme: str
    proxy: Proxy
    direct: Any
    unfinished: Callable[[], list[str]]

    def url(self, name: str) -> str:
        return f"{self.scheme}://runs/{name}"

    def names(self, prefix: str) -> set[str]:
        self.direct.invalidate_cache()
        return {str(name).removeprefix("runs/") for name in self.direct.find(f"runs/{prefix}")}

    def content(self, name: str) -> bytes:
        found: bytes = self.direct.cat_file(f"runs/{name}")
        return found

    def objects(self, directory: str) -> dict[str, bytes]:
        return {name.removeprefix(f"{directory}/"): self.content(name) for name in self.names(f"{directory}/")}

    def version(self, name: str) -> str:
        """A version that changes with every write, also of the same bytes."""
        if self.scheme == "s3":
            return str(self.proxy.count("PUT", part=name))
        self.direct.invalidate_cache()
        info = self.direct.info(f"runs/{name}")
        return str(info.get("generation") or info["etag"])

    def bring(self, path: Path, name: str) -> None:
        for below, data in files_below(path).items():
            self.direct.pipe_file(f"runs/{name}/{below}".rstrip("/"), data)


@contextmanager
def _azure(directory: Path) -> Iterator[Store]:
    """Azurite: FSDPCKPT_AZURITE, or ``azurite-blob`` on the PATH (``npm install -g azurite``)."""
    import fsspec

    program = os.environ.get("FSDPCKPT_AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("neither azurite-blob on the PATH nor FSDPCKPT_AZURITE: azure was not tested")
    port = free_port()
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen([*command, "--disableTelemetry"], cwd=directory, stdout=subprocess.DEVNULL)
    try:
        await_port(port)
        with proxy(f"http://127.0.0.1:{port}") as state:
            direct = fsspec.filesystem("abfs", connection_string=_connection(state.backend))
            direct.mkdir("runs")
            yield Store("abfs", state, direct, list)
    finally:
        process.terminate()
        process.wait(30)


def _connection(url: str) -> str:
    """The connection string of an Azurite at ``url``."""
    parts = ("DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={KEY}")
    return ";".join((*parts, f"BlobEndpoint={url}/{ACCOUNT};"))


@contextmanager
def _google(directory: Path) -> Iterator[Store]:
    """gcp-storage-emulator, with the parts of ``google_parts``."""
    import fsspec
    from gcp_storage_emulator import server as emulator
    from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem

    from tests.e2e.remote.google_parts import XmlApi

    async def ordinary(*_: object) -> BucketType:
        return BucketType.NON_HIERARCHICAL

    api, port = XmlApi(), free_port()
    with pytest.MonkeyPatch.context() as patches:
        # What kind of bucket it is, gcsfs asks Google itself, by another way than the emulator stands in.
        patches.setattr(ExtendedGcsFileSystem, "_get_bucket_type", ordinary)
        patches.setattr(emulator, "HANDLERS", (*emulator.HANDLERS[:-1], *api.handlers))
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="runs")
        server.start()
        try:
            with proxy(f"http://127.0.0.1:{port}") as state:
                direct = fsspec.filesystem("gs", endpoint_url=state.backend, token="anon")
                yield Store("gs", state, direct, lambda: [upload.key for upload in api.uploads.values()])
        finally:
            server.stop()


@contextmanager
def running_s3() -> Iterator[S3]:
    """moto, with an empty bucket ``runs``."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with proxy(f"http://{host}:{port}", S3) as state:
            state.client.create_bucket(Bucket="runs")
            yield state
    finally:
        server.stop()


def s3_store(state: S3) -> Store:
    import fsspec

    direct = fsspec.filesystem("s3", key="test", secret="test", endpoint_url=state.backend)
    return Store("s3", state, direct, state.unfinished)


@contextmanager
def started(kind: str, directory: Path) -> Iterator[Store]:
    """The store of ``kind``, "azure" or "google"; skips the test where it cannot be."""
    packages, start = {
        "azure": (("adlfs",), _azure),
        "google": (("gcsfs", "gcp_storage_emulator"), _google),
    }[kind]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {kind} was not tested")
    with start(directory) as store:
        yield store


def lead_to(proxy: Proxy, scheme: str, patches: pytest.MonkeyPatch) -> None:
    """The clients' own environment variables lead to it, and their pauses are none."""
    if scheme == "s3":
        from s3fs import S3FileSystem

        for name, value in (("ENDPOINT_URL", proxy.url), ("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test")):
            patches.setenv(f"AWS_{name}", value)
        patches.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patches.setenv("AWS_MAX_ATTEMPTS", "1")  # so that it is this program's attempts that are counted
        patches.setattr(S3FileSystem, "retries", 1)
    elif scheme == "gs":
        patches.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        patches.setenv("NO_GCE_CHECK", "true")
        patches.setattr("gcsfs.retry.min", lambda *_: 0.01, raising=False)
    else:
        patches.setenv("AZURE_STORAGE_CONNECTION_STRING", _connection(proxy.url))
        name = "azure.storage.blob._shared.policies_async.ExponentialRetry.get_backoff_time"
        patches.setattr(name, lambda *_: 0.01)
