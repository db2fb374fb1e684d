"""S3, Google Cloud Storage and Azure, by their own clients against servers on loopback, hold what a disk holds.

A store has no rename: a DST in one appears complete or not at all nevertheless.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
from tests.e2e.remote.conftest import FORMS
from tests.e2e.remote.servers import Seen
from tests.e2e.remote.stores import Store, files_below, lead_to, s3_store, started
from tests.e2e.remote.test_reading import assert_the_same

SHARDED: dict[str, Any] = {"to": "sharded", "world_size": 2}


@pytest.fixture(scope="session", params=["s3", "azure", "google"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if request.param == "s3":
        yield s3_store(request.getfixturevalue("s3_server"))
    else:
        with started(request.param, tmp_path_factory.mktemp(request.param)) as store:
            yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Empty; every client is led to it."""
    lead_to(server.proxy, server.scheme, monkeypatch)
    for name in server.names(""):
        server.direct.rm_file(f"runs/{name}")
    server.proxy.seen.clear()
    yield server
    server.proxy.fault = None


@pytest.mark.parametrize("form", FORMS)
def test_every_command_reads_what_a_disk_holds(form: str, store: Store, files: Path) -> None:
    store.bring(files / form, form)
    assert_the_same(store.url(form), files / form, files / "twin.pt")


def test_a_directory_has_the_bytes_of_one_on_a_disk_and_its_metadata_goes_up_last(
    store: Store, files: Path, tmp_path: Path, staging: Path
) -> None:
    before: list[set[str]] = []

    def note(method: str, path: str, begin: int | None) -> None:
        if method in ("PUT", "POST"):
            before.append({name.removeprefix("new/step-3/") for name in store.names("new")})

    with store.proxy.faulty(note):
        fsdpckpt.convert(files / "full.pt", store.url("new/step-3"), **SHARDED, verify="full")
    fsdpckpt.convert(files / "full.pt", tmp_path / "here", **SHARDED, verify="full")
    assert before[:2] == [set(), {"fsdpckpt.uploading"}]
    assert all("fsdpckpt.uploading" in names and ".metadata" not in names for names in before[1:]), "readers refuse it"
    assert before[-1] == {"__0_0.distcp", "__1_0.distcp", "fsdpckpt.json", "fsdpckpt.uploading"}
    assert store.objects("new/step-3") == files_below(tmp_path / "here")
    assert list(staging.iterdir()) == []
    fsdpckpt.convert(store.url("new/step-3"), store.url("again.pt"))
    assert fsdpckpt.diff(store.url("again.pt"), files / "full.pt").same


def test_a_large_file_goes_up_in_parts_and_an_attempt_that_broke_shows_nothing(
    store: Store, files: Path, large: Path, tmp_path: Path
) -> None:
    store.bring(files / "full.pt", "large.pt")
    parts = 0

    def second(method: str, path: str, begin: int | None) -> str | None:
        nonlocal parts
        parts += method == "PUT" or (method == "POST" and begin is None)
        return "503" if parts > 2 and method in ("PUT", "POST") else None

    with store.proxy.faulty(second), pytest.raises(TargetUnwritableError, match="upload") as caught:
        fsdpckpt.convert(large, store.url("large.pt"), overwrite=True, verify="full")
    assert caught.value.exit_code == 5 and "run the command again" in caught.value.text
    assert store.content("large.pt") == (files / "full.pt").read_bytes()
    assert store.unfinished() == []
    fsdpckpt.convert(large, store.url("large.pt"), overwrite=True, resume=True, verify="full")
    fsdpckpt.convert(large, tmp_path / "large.pt")
    assert store.content("large.pt") == (tmp_path / "large.pt").read_bytes()


def test_an_upload_that_is_stopped_shows_nothing(store: Store, large: Path) -> None:
    stages: list[str] = []

    class Stopping(NoProgress):
        def begin(self, stage: str, total: int) -> None:
            stages.append(stage)

        def advance(self, nbytes: int) -> None:
            if stages[-1] == ("upload" if store.scheme == "abfs" else "copy"):  # one object is staged for Azure
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fsdpckpt.convert(large, store.url("large.pt"), progress=Stopping())
    assert (store.names("large"), store.unfinished()) == (set(), [])


@pytest.mark.parametrize("staged", [False, True])
def test_a_directory_goes_up_in_parts_without_a_disk_unless_one_is_named(
    staged: bool, store: Store, large: Path, tmp_path: Path, staging: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone", **SHARDED, verify="full")
    on_disk: list[int] = []
    blocks: list[str] = []

    def look(method: str, path: str, begin: int | None) -> None:
        on_disk.append(sum(file.stat().st_size for file in staging.rglob("*") if file.is_file()))

    store.proxy.fault = look
    where = {"staging": staging} if staged else {}
    report = fsdpckpt.convert(large, store.url("large"), **SHARDED, **where, verify="full")
    assert (report.streamed, report.staged_in) == (not staged, str(staging) if staged else None)
    assert (max(on_disk) > 1 << 24) if staged else (max(on_disk) < 1 << 17)
    assert store.objects("large") == files_below(tmp_path / "alone")
    if not staged:
        blocks = [each.path for each in store.proxy.seen if "__0_0.distcp" in each.path and _is_part(each)]
        assert len(blocks) == 3, "10.5 MB"
    assert list(staging.iterdir()) == []


def _is_part(seen: Seen) -> bool:
    return seen.method == "PUT" and ("comp=block&" in f"{seen.query}&" or "partNumber=" in seen.query)


def test_what_a_broken_upload_has_completed_is_not_sent_again(store: Store, large: Path, staging: Path) -> None:
    refused: list[str] = []

    def second_file(method: str, path: str, begin: int | None) -> str | None:
        if method != "PUT" or "__1_0.distcp" not in path:
            return None
        refused.append(path)
        return "400 ExpiredToken" if store.scheme == "s3" else "403"

    store.proxy.fault = second_file
    with pytest.raises(TargetUnwritableError, match="credentials") as caught:
        fsdpckpt.convert(large, store.url("large"), **SHARDED, threads=1)
    store.proxy.fault = None
    assert "uploads what is missing" in str(caught.value.next_steps)
    assert len(refused) == 1, "tried again"
    assert store.names("large") == {"large/fsdpckpt.uploading", "large/__0_0.distcp"}
    assert store.unfinished() == []
    came = store.version("large/__0_0.distcp")
    report = fsdpckpt.convert(large, store.url("large"), **SHARDED, threads=1)
    assert store.version("large/__0_0.distcp") == came
    assert [note.message for note in report.notes if note.kind == "resumed"] == [
        "continued an interrupted upload: 1 file was already there"
    ]
    assert fsdpckpt.diff(store.url("large"), large).same
    assert list(staging.iterdir()) == []


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


@pytest.mark.parametrize("marked", [False, True])
def test_parts_that_killed_uploads_left_are_removed_and_those_of_neighbours_are_not(
    marked: bool, store: Store, files: Path
) -> None:
    if store.scheme == "abfs":
        pytest.skip("Azure removes blocks itself")
    names = ("new", "new/__0_0.distcp", "new/1", "new/2", "new/3", "new-er/0", "newer/0", "others")
    begun = {name: begin_parts(store.direct, f"runs/{name}", store.url(name)) for name in names}
    for upload in begun.values():
        upload.send(0, b"x")
    if marked:
        store.direct.pipe_file("runs/new/fsdpckpt.uploading", b"{}")
    fsdpckpt.convert(files / "full.pt", store.url("new"), **SHARDED, resume=marked)
    left = sorted(store.unfinished())
    for name in left:
        begun[name].abort()
    assert left == ["new-er/0", "newer/0", "others"]


def test_a_directory_whose_upload_broke_is_refused_by_readers_until_it_is_resumed(
    store: Store, files: Path, tmp_path: Path, staging: Path
) -> None:
    def lists(method: str, path: str, begin: int | None) -> str | None:
        return "503" if method in ("PUT", "POST") and len(store.names("broken")) == 4 else None

    store.proxy.fault = lists  # all but .metadata
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", store.url("broken"), **SHARDED)
    store.proxy.fault = None
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect(store.url("broken"))
    with pytest.raises(TargetExistsError, match="was not completed"):
        fsdpckpt.convert(files / "full.pt", store.url("broken"), **SHARDED, staging=tmp_path / "of another machine")
    came = store.version("broken/__0_0.distcp")
    fsdpckpt.convert(files / "full.pt", store.url("broken"), **SHARDED)
    assert store.version("broken/__0_0.distcp") == came, "what was there is not sent again"
    assert fsdpckpt.diff(store.url("broken"), files / "full.pt").same
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("kind", ["503", "reset", "short"])
def test_a_store_that_fails_now_and_then_is_asked_again(kind: str, store: Store, files: Path) -> None:
    asked: set[tuple[str, str]] = set()

    def every_first(method: str, path: str, begin: int | None) -> str | None:
        first = (method, path) not in asked
        asked.add((method, path))
        return kind if first and (kind != "short" or method == "GET") else None

    store.bring(files / "dcp", "dcp")
    with store.proxy.faulty(every_first):
        fsdpckpt.convert(store.url("dcp"), store.url("flaky"), **SHARDED)
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
    for url in (store.url("nothing"), f"{store.scheme}://no-such-place/step-1"):
        with pytest.raises(SourceMissingError) as missing:
            fsdpckpt.inspect(url)
        assert url in missing.value.text
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
    before: list[set[str]] = []

    def note(method: str, path: str, begin: int | None) -> None:
        if method in ("PUT", "POST"):
            before.append({name.removeprefix("dcp/") for name in store.names("dcp")})

    with store.proxy.faulty(note):
        with pytest.raises(TargetExistsError):
            fsdpckpt.convert(files / "full.pt", store.url("dcp"), **SHARDED)
        assert before == []
        fsdpckpt.convert(files / "twin.pt", store.url("dcp"), **SHARDED, overwrite=True)
    assert not any(".metadata" in names for names in before[1:]), "gone before the first new file comes"
    assert "__2_0.distcp" not in before[-1], "gone before the new metadata comes"
    assert fsdpckpt.diff(store.url("dcp"), files / "twin.pt").same
