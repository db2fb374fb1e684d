"""A small checkpoint in several forms, behind nginx, aiohttp and an S3 server, each behind the counting proxy."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.storage import retry
from tests.e2e.remote.servers import Proxy, aiohttp_server, nginx, proxy

FORMS = ("full.pt", "dcp", "ranks", "weights")


def training_state() -> dict[str, object]:
    """Odd sizes, an optimizer with state, one tensor larger than what is fetched ahead; under 2 MB."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(1003, 97), torch.nn.Linear(97, 61), torch.nn.LayerNorm(61))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randint(0, 1003, (8,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in all ``FORMS``; ``twin.pt`` differs from ``full.pt`` in its values alone."""
    root = tmp_path_factory.mktemp("remote") / "files"
    root.mkdir()
    state = training_state()
    torch.save(state, root / "full.pt")
    fsdpckpt.convert(root / "full.pt", root / "dcp", to="sharded", world_size=3)
    fsdpckpt.convert(root / "full.pt", root / "ranks", to="sharded", container="torch", world_size=2, buffers="none")
    fsdpckpt.convert(root / "full.pt", root / "weights", container="safetensors")
    state["model"]["0.weight"].mul_(2)  # type: ignore[index]
    torch.save(state, root / "twin.pt")
    return root


@pytest.fixture(scope="session")
def web_backends(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: web servers were not tested")
    with aiohttp_server(files) as url:
        backends = {"aiohttp": url}
        if shutil.which("nginx") is None:
            yield backends
            return
        with nginx(files, tmp_path_factory.mktemp("nginx")) as second:
            yield {**backends, "nginx": second}


@pytest.fixture
def web(web_backends: dict[str, str]) -> Iterator[Proxy]:
    """aiohttp's own server, which is always there."""
    with proxy(web_backends["aiohttp"]) as state:
        yield state


@pytest.fixture
def real_nginx(web_backends: dict[str, str]) -> Iterator[Proxy]:
    if "nginx" not in web_backends:
        pytest.skip("nginx is not installed")
    with proxy(web_backends["nginx"]) as state:
        yield state


@pytest.fixture(scope="session")
def s3_backend() -> Iterator[str]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: S3 was not tested")
    server = pytest.importorskip("moto.server", reason="moto is not installed: S3 was not tested")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(scope="session")
def s3_server(s3_backend: str) -> Iterator[Proxy]:
    """One for all tests: a client of S3 takes a second to make."""
    with proxy(s3_backend) as state:
        yield state


@pytest.fixture
def s3(s3_server: Proxy, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """An S3 server whose bucket ``runs`` holds the files; AWS's own variables lead every client to it."""
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # so that it is this program's attempts that are counted
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    _fill(s3_server, files)
    s3_server.seen.clear()
    yield s3_server
    s3_server.fault, s3_server.query = None, ""
    s3_server.headers.clear()


def _fill(s3: Proxy, files: Path) -> None:
    """Bring the bucket back to what it was."""
    import boto3

    client = boto3.client("s3", endpoint_url=s3.backend)
    if not any(bucket["Name"] == "runs" for bucket in client.list_buckets()["Buckets"]):
        client.create_bucket(Bucket="runs")
    there = {each["Key"]: each["ETag"] for each in client.list_objects_v2(Bucket="runs").get("Contents", [])}
    wanted = {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    for key in there.keys() - wanted.keys():
        client.delete_object(Bucket="runs", Key=key)
    for upload in client.list_multipart_uploads(Bucket="runs").get("Uploads", []):
        client.abort_multipart_upload(Bucket="runs", Key=upload["Key"], UploadId=upload["UploadId"])
    for key, data in wanted.items():
        if there.get(key) != f'"{hashlib.md5(data).hexdigest()}"':
            client.put_object(Bucket="runs", Key=key, Body=data)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are for servers that recover, which these do at once."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
