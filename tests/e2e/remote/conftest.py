"""A small checkpoint in several forms, behind nginx, aiohttp and an S3 server, each behind the counting proxy."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.storage import retry
from tests.e2e.remote.servers import Proxy, aiohttp_server, nginx, proxy
from tests.e2e.remote.stores import S3, files_below, lead_to, running_s3

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
def s3_server() -> Iterator[S3]:
    """One for all tests: a client of S3 takes a second to make."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package, reason=f"{package} is not installed: S3 was not tested")
    with running_s3() as state:
        yield state


@pytest.fixture
def s3(s3_server: S3, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An S3 server whose bucket ``runs`` holds the files; AWS's own variables lead every client to it."""
    lead_to(s3_server, "s3", monkeypatch)
    _fill(s3_server, files)
    s3_server.seen.clear()
    yield s3_server
    s3_server.fault, s3_server.query = None, ""
    s3_server.headers.clear()


def _fill(s3: S3, files: Path) -> None:
    """Bring the bucket back to what it was."""
    there = {each["Key"]: each["ETag"] for each in s3.client.list_objects_v2(Bucket="runs").get("Contents", [])}
    wanted = files_below(files)
    for key in there.keys() - wanted.keys():
        s3.delete(key)
    s3.abort_uploads()
    for key, data in wanted.items():
        if there.get(key) != f'"{hashlib.md5(data).hexdigest()}"':
            s3.put(key, data)


@pytest.fixture
def staging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where outputs are put together and what goes up is noted; empty again after every run that succeeded."""
    path = tmp_path_factory.mktemp("staging")
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture(autouse=True)
def _own_staging(request: pytest.FixtureRequest) -> None:
    """No test that writes to a store leaves anything in the machine's own place for temporary files."""
    if not {"s3", "store", "hub", "large"}.isdisjoint(request.fixturenames):
        request.getfixturevalue("staging")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five parts as one object. The middle tensor lies in what both of two workers send, and its checksum before it."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.manual_seed(2)
    state = {"model": {"first": torch.randn(1003), "weight": torch.randn(1157, 4099), "last": torch.randn(501, 1009)}}
    torch.save(state, path)
    return path


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between attempts are for servers that recover, which these do at once."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
