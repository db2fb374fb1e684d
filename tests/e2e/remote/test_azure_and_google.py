"""Azure and Google Cloud Storage, by their own clients against servers on loopback, hold what S3 and a disk hold."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import (
    SourceCorruptError,
    SourceError,
    SourceIncompleteError,
    SourceMissingError,
    TargetExistsError,
    TargetUnwritableError,
)
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage.parts import begin_parts
from tests.e2e.remote.servers import Proxy, Seen, proxy
from tests.e2e.remote.stopping import StoppedUpload
from tests.e2e.remote.stores import azurite, azurite_program, connection, google
from tests.e2e.remote.test_reading import assert_the_same


@dataclass(frozen=True)
class Store:
    """``scheme``: of its URLs; ``direct``: a client that the proxy does not see. ``unfinished``: the objects of which
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

    def version(self, name: str) -> str:
        """A version that changes with every write, also of the same bytes."""
        self.direct.invalidate_cache()
        info = self.direct.info(f"runs/{name}")
        return str(info.get("generation") or info["etag"])

    def bring(self, path: Path, name: str) -> None:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            at = f"runs/{name}" if path.is_file() else f"runs/{name}/{file.name}"
            self.direct.pipe_file(at, file.read_bytes())


def started(kind: str, directory: Path) -> Any:
    """The server of ``kind``; skips the test where it cannot be."""
    packages = {"azure": ["adlfs"], "google": ["gcsfs", "gcp_storage_emulator"]}[kind]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {kind} was not tested")
    program = azurite_program()
    if kind == "google":
        from tests.e2e.remote.google_parts import XmlApi

        api = XmlApi()
        return google(api), lambda: [upload.key for upload in api.uploads.values()]
    if program is None:
        pytest.skip("neither azurite-blob on the PATH nor FSDPCKPT_AZURITE: azure was not tested")
    return azurite(program, directory), lambda: []


@pytest.fixture(scope="session", params=["azure", "google"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    import fsspec

    kind = request.param
    running, unfinished = started(kind, tmp_path_factory.mktemp(kind))
    with running as backend, proxy(backend) as state, pytest.MonkeyPatch.context() as patches:
        if kind == "azure":
            direct = fsspec.filesystem("abfs", connection_string=connection(backend))
            direct.mkdir("runs")
        else:
            # What kind of bucket it is, gcsfs asks Google itself, by another way than the emulator stands in.
            from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem

            async def ordinary(*_: object) -> BucketType:
                return BucketType.NON_HIERARCHICAL

            patches.setattr(ExtendedGcsFileSystem, "_get_bucket_type", ordinary)
            direct = fsspec.filesystem("gs", endpoint_url=backend, token="anon")
        yield Store({"azure": "abfs", "google": "gs"}[kind], state, direct, unfinished)


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """Empty; the clients' own environment variables lead to it, and their pauses are none."""
    if server.scheme == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.proxy.url)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.01, raising=False)
    else:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(server.proxy.url))
        name = "azure.storage.blob._shared.policies_async.ExponentialRetry.get_backoff_time"
        monkeypatch.setattr(name, lambda *_: 0.01)
    for name in server.names(""):
        server.direct.rm_file(f"runs/{name}")
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(staging))
    server.proxy.seen.clear()
    yield server
    server.proxy.fault = None


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than two parts of an upload."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.manual_seed(5)
    torch.save({"model": {"weight": torch.randn(1537, 3001)}}, path)
    return path


@pytest.mark.parametrize("form", ["full.pt", "ranks"])
def test_every_command_reads_what_a_disk_holds(form: str, store: Store, files: Path) -> None:
    store.bring(files / form, form)
    assert_the_same(store.url(form), files / form, files / "twin.pt")


def test_a_directory_holds_the_bytes_of_one_on_a_disk_and_is_announced_and_completed_in_order(
    store: Store, files: Path, tmp_path: Path
) -> None:
    for target in (store.url("new/step-3"), tmp_path / "here"):
        fsdpckpt.convert(files / "full.pt", target, to="sharded", world_size=2, verify="full")
    assert store.names("new") == {f"new/step-3/{path.name}" for path in (tmp_path / "here").iterdir()}
    for path in (tmp_path / "here").iterdir():
        assert store.content(f"new/step-3/{path.name}") == path.read_bytes()
    fsdpckpt.convert(store.url("new/step-3"), store.url("again.pt"))
    assert fsdpckpt.diff(store.url("again.pt"), files / "full.pt").same


def test_metadata_goes_up_last(store: Store, files: Path) -> None:
    before: list[set[str]] = []

    def note(method: str, path: str, begin: int | None) -> None:
        if method in ("PUT", "POST"):
            before.append(store.names("step"))

    store.proxy.fault = note  # type: ignore[assignment]
    fsdpckpt.convert(files / "full.pt", store.url("step"), to="sharded", world_size=2)
    assert before[0] == set() and before[1] == {"step/fsdpckpt.uploading"}
    assert before[-1] == {f"step/{name}" for name in ("__0_0.distcp", "__1_0.distcp", "fsdpckpt.json")} | before[1]
    assert "step/fsdpckpt.uploading" not in store.names("step")


def test_a_large_file_goes_up_in_parts_and_an_attempt_that_broke_shows_nothing(
    store: Store, files: Path, large: Path, tmp_path: Path
) -> None:
    store.bring(files / "full.pt", "large.pt")
    parts = 0

    def second(method: str, path: str, begin: int | None) -> str | None:
        nonlocal parts
        parts += method == "PUT" or (method == "POST" and begin is None)
        return "503" if parts > 2 and method in ("PUT", "POST") else None

    store.proxy.fault = second
    options: dict[str, Any] = {"verify": "full"}
    with pytest.raises(TargetUnwritableError, match="upload"):
        fsdpckpt.convert(large, store.url("large.pt"), overwrite=True, **options)
    assert store.content("large.pt") == (files / "full.pt").read_bytes()
    store.proxy.fault = None
    fsdpckpt.convert(large, store.url("large.pt"), overwrite=True, resume=True, **options)
    fsdpckpt.convert(large, tmp_path / "large.pt")
    assert store.content("large.pt") == (tmp_path / "large.pt").read_bytes()


def test_an_upload_that_is_stopped_shows_nothing(store: Store, large: Path) -> None:
    stage = "upload" if store.scheme == "abfs" else "copy"  # one object is staged for Azure
    with pytest.raises(KeyboardInterrupt):
        fsdpckpt.convert(large, store.url("large.pt"), progress=StoppedUpload(stage))
    assert (store.names("large"), store.unfinished()) == (set(), [])


@pytest.mark.parametrize("staged", [False, True])
def test_a_directory_goes_up_in_parts_without_a_disk_unless_one_is_named(
    staged: bool, store: Store, large: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"to": "sharded", "world_size": 2, "verify": "full"}
    fsdpckpt.convert(large, tmp_path / "alone", **options)
    on_disk: list[int] = []

    def look(method: str, path: str, begin: int | None) -> None:
        files = [file for file in (tmp_path / "staging").rglob("*") if file.is_file()]
        on_disk.append(sum(file.stat().st_size for file in files))

    store.proxy.fault = look  # type: ignore[assignment]
    where = {"staging": tmp_path / "staging"} if staged else {}
    report = fsdpckpt.convert(large, store.url("large"), **options, **where)
    assert report.streamed is not staged
    assert (max(on_disk) > 1 << 24) if staged else (max(on_disk) < 1 << 17)
    for path in (tmp_path / "alone").iterdir():
        assert store.content(f"large/{path.name}") == path.read_bytes()
    if not staged:
        blocks = [each for each in store.proxy.seen if "__0_0.distcp" in each.path and _is_part(each)]
        assert len(blocks) == 2, "9 MB"
    assert list((tmp_path / "staging").iterdir()) == []


def _is_part(seen: Seen) -> bool:
    return seen.method == "PUT" and ("comp=block&" in f"{seen.query}&" or "partNumber=" in seen.query)


def test_what_a_broken_upload_has_completed_is_not_sent_again(store: Store, large: Path, tmp_path: Path) -> None:
    def second_file(method: str, path: str, begin: int | None) -> str | None:
        return "403" if method == "PUT" and "__1_0.distcp" in path else None

    options: dict[str, Any] = {"to": "sharded", "world_size": 2, "threads": 1}
    store.proxy.fault = second_file
    with pytest.raises(TargetUnwritableError, match="credentials"):
        fsdpckpt.convert(large, store.url("large"), **options)
    store.proxy.fault = None
    assert store.names("large") == {"large/fsdpckpt.uploading", "large/__0_0.distcp"}
    assert store.unfinished() == []
    came = store.version("large/__0_0.distcp")
    report = fsdpckpt.convert(large, store.url("large"), **options)
    assert store.version("large/__0_0.distcp") == came
    assert [note.message for note in report.notes if note.kind == "resumed"] == [
        "continued an interrupted upload: 1 file was already there"
    ]
    assert fsdpckpt.diff(store.url("large"), large).same
    assert list((tmp_path / "staging").iterdir()) == []


def test_two_processes_send_parts_of_one_object_and_the_first_completes_it(store: Store) -> None:
    first = begin_parts(store.direct, "runs/shared", store.url("shared"))
    second = begin_parts(store.direct, "runs/shared", store.url("shared"), first.upload)
    data = [bytes([number]) * (5 << 20) for number in range(2)]
    second.send(1, data[1])
    first.send(0, data[0])
    assert store.names("shared") == set()
    first.tags.update(second.tags)
    first.complete()
    assert store.content("shared") == b"".join(data)


def test_parts_that_killed_uploads_left_are_removed_and_those_of_neighbours_are_not(store: Store, files: Path) -> None:
    if store.scheme == "abfs":
        pytest.skip("Azure removes blocks itself")
    names = ["new", "new/0", "new/1", "new/2", "new/3", "newer/0", "others"]
    for name in names:
        begin_parts(store.direct, f"runs/{name}", store.url(name)).send(0, b"x")
    fsdpckpt.convert(files / "full.pt", store.url("new"), to="sharded", world_size=2)
    assert sorted(store.unfinished()) == ["newer/0", "others"]


def test_a_directory_whose_upload_broke_is_refused_by_readers_until_it_is_resumed(store: Store, files: Path) -> None:
    def lists(method: str, path: str, begin: int | None) -> str | None:
        return "503" if method in ("PUT", "POST") and len(store.names("broken")) == 4 else None

    store.proxy.fault = lists  # all but .metadata
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", store.url("broken"), to="sharded", world_size=2)
    store.proxy.fault = None
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect(store.url("broken"))
    came = store.version("broken/__0_0.distcp")
    fsdpckpt.convert(files / "full.pt", store.url("broken"), to="sharded", world_size=2)
    assert store.version("broken/__0_0.distcp") == came, "what was there is not sent again"
    assert fsdpckpt.diff(store.url("broken"), files / "full.pt").same


@pytest.mark.parametrize("kind", ["503", "reset", "short"])
def test_a_store_that_fails_now_and_then_is_asked_again(kind: str, store: Store, files: Path) -> None:
    asked: set[tuple[str, str]] = set()

    def every_first(method: str, path: str, begin: int | None) -> str | None:
        first = (method, path) not in asked
        asked.add((method, path))
        return kind if first and (kind != "short" or method == "GET") else None

    store.bring(files / "dcp", "dcp")
    store.proxy.fault = every_first
    fsdpckpt.convert(store.url("dcp"), store.url("flaky"), to="sharded", world_size=2)
    store.proxy.fault = None
    assert fsdpckpt.diff(store.url("flaky"), files / "full.pt").same


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(store: Store, files: Path, tmp_path: Path) -> None:
    store.bring(files / "dcp", "dcp")
    size = (files / "dcp" / "__2_0.distcp").stat().st_size
    replaced = False

    class Replacing(NoProgress):
        def advance(self, nbytes: int) -> None:
            nonlocal replaced
            if not replaced:
                replaced = True
                store.direct.pipe_file("runs/dcp/__2_0.distcp", os.urandom(size))

    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert(store.url("dcp"), tmp_path / "out.pt", progress=Replacing())
    assert replaced and not (tmp_path / "out.pt").exists()


def test_what_is_not_there_or_not_allowed_is_said_at_once(store: Store, files: Path) -> None:
    with pytest.raises(SourceMissingError):
        fsdpckpt.inspect(store.url("nothing"))
    with pytest.raises(TargetUnwritableError, match="no-such-place") as caught:
        fsdpckpt.convert(files / "full.pt", f"{store.scheme}://no-such-place/full.pt")
    assert "no such bucket" in str(caught.value.why)
    store.bring(files / "full.pt", "full.pt")
    store.proxy.seen.clear()
    store.proxy.fault = lambda method, path, begin: "403"
    with pytest.raises(SourceError) as refused:
        fsdpckpt.inspect(store.url("full.pt"))
    assert "credentials" in str(refused.value.why)
    assert len(store.proxy.seen) < 5


def test_a_store_whose_client_has_no_credentials_is_said_to_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed: azure was not tested")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    with pytest.raises(SourceError, match="credentials") as caught:
        fsdpckpt.inspect("abfs://runs/full.pt")
    assert "credentials" in str(caught.value.next_step)


def test_an_existing_checkpoint_is_replaced_only_when_asked_and_then_wholly(store: Store, files: Path) -> None:
    store.bring(files / "dcp", "dcp")
    with pytest.raises(TargetExistsError):
        fsdpckpt.convert(files / "full.pt", store.url("dcp"), to="sharded", world_size=2)
    fsdpckpt.convert(files / "twin.pt", store.url("dcp"), to="sharded", world_size=2, overwrite=True)
    assert "dcp/__2_0.distcp" not in store.names("dcp")
    assert fsdpckpt.diff(store.url("dcp"), files / "twin.pt").same
