"""A DST in an object store appears complete or not at all, though a store has no rename."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import (
    SourceIncompleteError,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
)
from tests.cli.conftest import Run, run
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.stopping import StoppedUpload

__all__ = ["run"]


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where outputs are put together; empty again after every run that succeeded."""
    path = tmp_path / "staging"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    yield path


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than two parts of an upload."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.manual_seed(5)
    torch.save({"model": {"weight": torch.randn(1537, 3001)}}, path)
    return path


def client(s3: Proxy):  # type: ignore[no-untyped-def]
    import boto3

    return boto3.client("s3", endpoint_url=s3.backend)


def keys(s3: Proxy, prefix: str) -> set[str]:
    found = client(s3).list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", [])
    return {each["Key"] for each in found}


def content(s3: Proxy, key: str) -> bytes:
    body: bytes = client(s3).get_object(Bucket="runs", Key=key)["Body"].read()
    return body


def parts_left(s3: Proxy) -> list[object]:
    uploads: list[object] = client(s3).list_multipart_uploads(Bucket="runs").get("Uploads", [])
    return uploads


def test_a_directory_in_a_store_holds_the_bytes_of_one_on_a_disk(
    s3: Proxy, files: Path, tmp_path: Path, staging: Path
) -> None:
    for target in ("s3://runs/new/step-3", tmp_path / "here"):
        fsdpckpt.convert(files / "full.pt", target, to="sharded", world_size=2, verify="full")
    names = {f"new/step-3/{path.name}" for path in (tmp_path / "here").iterdir()}
    assert keys(s3, "new/") == names
    for path in (tmp_path / "here").iterdir():
        assert content(s3, f"new/step-3/{path.name}") == path.read_bytes()
    assert list(staging.iterdir()) == []
    order = [(each.method, each.path.rpartition("/")[2]) for each in s3.seen if each.method in ("PUT", "DELETE")]
    assert order[0] == ("PUT", "fsdpckpt.uploading")
    assert order[-3:] == [("PUT", "fsdpckpt.json"), ("PUT", ".metadata"), ("DELETE", "fsdpckpt.uploading")]


def test_from_store_to_store(s3: Proxy, files: Path) -> None:
    fsdpckpt.convert("s3://runs/dcp", "s3://runs/again.pt", to="full")
    assert fsdpckpt.diff("s3://runs/again.pt", files / "dcp").same


def test_a_large_file_goes_up_in_parts(s3: Proxy, large: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(large, "s3://runs/large.pt", verify="full")
    assert s3.count("PUT", part="fsdpckpt-staging/large.pt") == 4
    assert s3.count("PUT", part="runs/large.pt") == 1  # the store moves it into place
    fsdpckpt.convert(large, tmp_path / "large.pt")
    assert content(s3, "large.pt") == (tmp_path / "large.pt").read_bytes()
    assert parts_left(s3) == []


def test_full_verification_reads_back_what_arrived(s3: Proxy, files: Path) -> None:
    s3.fault = lambda method, path, begin: "flip" if method == "PUT" and path.endswith(".pt") else None
    with pytest.raises(TargetUnwritableError, match="is not what was written to it"):
        fsdpckpt.convert(files / "full.pt", "s3://runs/flipped.pt", verify="full")


def test_a_failed_upload_whose_parts_cannot_be_removed_says_why_it_failed(s3: Proxy, large: Path) -> None:
    answers = {"PUT": "400 ExpiredToken", "DELETE": "403 AccessDenied"}
    s3.fault = lambda method, path, begin: answers.get(method) if path.endswith("refused.pt") else None
    with pytest.raises(TargetUnwritableError, match=r"uploading part \d failed"):
        fsdpckpt.convert(large, "s3://runs/refused.pt")
    s3.fault = None
    assert s3.count("DELETE", part="refused.pt") > 0
    fsdpckpt.convert(large, "s3://runs/refused.pt")
    assert client(s3).list_multipart_uploads(Bucket="runs").get("Uploads", []) == []


def test_stores_of_another_kind_are_streamed_to(large: Path) -> None:
    import fsspec

    fsdpckpt.convert(large, "memory://streamed/large.pt", verify="full")
    assert fsdpckpt.diff("memory://streamed/large.pt", large).same
    fsspec.filesystem("memory").rm("/streamed", recursive=True)


def test_an_upload_that_breaks_leaves_the_older_object_and_no_parts(
    s3: Proxy, large: Path, files: Path, run: Run
) -> None:
    older = (files / "twin.pt").read_bytes()
    client(s3).put_object(Bucket="runs", Key="large.pt", Body=older)
    s3.fault = lambda method, path, begin: "500" if method == "PUT" and "large.pt" in path else None
    done = run("convert", large, "s3://runs/large.pt", "--overwrite")
    assert done.code == 5, done.err
    assert "s3://runs/.large.pt.fsdpckpt-staging/large.pt" in done.err
    assert "run the command again" in done.err
    assert content(s3, "large.pt") == older
    assert parts_left(s3) == []


def test_an_upload_that_is_stopped_leaves_no_parts(s3: Proxy, large: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fsdpckpt.convert(large, "s3://runs/large.pt", progress=StoppedUpload("copy"))
    assert keys(s3, "large.pt") == set()
    assert parts_left(s3) == []


@pytest.mark.parametrize("last", [".metadata", "__1_0.distcp"])
def test_a_directory_whose_upload_broke_is_refused_by_readers_until_it_is_resumed(
    last: str, s3: Proxy, files: Path, staging: Path, tmp_path: Path
) -> None:
    s3.fault = lambda method, path, begin: "503" if method == "PUT" and path.endswith(last) else None
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", "s3://runs/broken", to="sharded", world_size=2)
    s3.fault = None
    assert "broken/.metadata" not in keys(s3, "broken")
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect("s3://runs/broken")
    with pytest.raises(TargetExistsError, match="was not completed"):
        fsdpckpt.convert(
            files / "full.pt", "s3://runs/broken", to="sharded", world_size=2, staging=tmp_path / "of another machine"
        )
    s3.seen.clear()
    fsdpckpt.convert(files / "full.pt", "s3://runs/broken", to="sharded", world_size=2)
    assert fsdpckpt.diff("s3://runs/broken", files / "full.pt").same
    assert s3.count("PUT", part="__0_0.distcp") == 0  # it was there already
    assert s3.count("PUT", part=last) == 1
    assert list(staging.iterdir()) == []


def test_what_was_uploaded_before_is_sent_again_when_the_store_has_something_else(s3: Proxy, files: Path) -> None:
    s3.fault = lambda method, path, begin: "503" if method == "PUT" and path.endswith(".metadata") else None
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", "s3://runs/broken", to="sharded", world_size=2)
    s3.fault = None
    size = len(content(s3, "broken/__0_0.distcp"))
    client(s3).put_object(Bucket="runs", Key="broken/__0_0.distcp", Body=os.urandom(size))
    fsdpckpt.convert(files / "full.pt", "s3://runs/broken", to="sharded", world_size=2, resume=True)
    assert fsdpckpt.diff("s3://runs/broken", files / "full.pt").same


SHARDED = {"to": "sharded", "world_size": 2}


@pytest.mark.parametrize(("target", "options"), [("again", SHARDED), ("again.pt", {}), ("again.safetensors", {})])
def test_a_complete_target_is_compared_and_accepted_by_resume(
    target: str, options: dict[str, object], s3: Proxy, files: Path, staging: Path
) -> None:
    url = f"s3://runs/{target}"
    fsdpckpt.convert(files / "full.pt", url, **options)  # type: ignore[arg-type]
    before = {key: content(s3, key) for key in keys(s3, "again")}
    s3.seen.clear()
    report = fsdpckpt.convert(files / "full.pt", url, resume=True, **options)  # type: ignore[arg-type]
    assert [note.message for note in report.notes if note.kind == "resumed"] == [
        f"{url} was already complete: every byte was compared, nothing was uploaded"
    ]
    assert [each.method for each in s3.seen if each.method not in ("GET", "HEAD")] == []
    assert {key: content(s3, key) for key in keys(s3, "again")} == before
    assert list(staging.iterdir()) == []
    with pytest.raises(TargetExistsError, match="exists"):
        fsdpckpt.convert(files / "full.pt", url, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["a byte", "a length", "a missing object", "another checkpoint"])
def test_a_target_that_is_something_else_is_not_accepted_by_resume(change: str, s3: Proxy, files: Path) -> None:
    fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    key = "again/__1_0.distcp"
    data = bytearray(content(s3, key))
    if change == "a byte":
        data[len(data) // 2] ^= 1
    elif change == "a length":
        data += b"x"
    if change == "a missing object":
        client(s3).delete_object(Bucket="runs", Key=key)
    else:
        client(s3).put_object(Bucket="runs", Key=key, Body=bytes(data))
    before = keys(s3, "again")
    source = files / ("twin.pt" if change == "another checkpoint" else "full.pt")
    with pytest.raises(TargetExistsError, match="is not what this command writes"):
        fsdpckpt.convert(source, "s3://runs/again", to="sharded", world_size=2, resume=True)
    assert keys(s3, "again") == before


def test_a_run_that_was_killed_behind_its_upload_is_known_to_be_complete(
    s3: Proxy, files: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fsdpckpt.converters.output.spool.Spool.remove", lambda _: None)  # as if it never ran
        fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    assert list(staging.iterdir()) != []
    report = fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    assert any(note.kind == "resumed" and "already complete" in note.message for note in report.notes)
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://runs//odd", "s3://runs/a//odd/", "s3://runs/./odd", "s3://runs/a/../odd"])
def test_names_that_only_a_store_has_are_refused_with_the_plain_one(url: str, s3: Proxy, files: Path) -> None:
    before = keys(s3, "")
    with pytest.raises(UsageError, match="name in it") as caught:
        fsdpckpt.convert(files / "full.pt", url, to="sharded", world_size=2)
    above = "a/" if "/a//" in url else ""
    assert caught.value.next_step == f"give s3://runs/{above}odd"
    assert keys(s3, "") == before


def test_parts_that_a_killed_upload_left_are_removed_by_the_next(s3: Proxy, files: Path) -> None:
    for key in ("mine/__0_0.distcp", "mine-too/__0_0.distcp"):
        client(s3).create_multipart_upload(Bucket="runs", Key=key)
    client(s3).put_object(Bucket="runs", Key="mine/fsdpckpt.uploading", Body=b"{}")
    fsdpckpt.convert(files / "full.pt", "s3://runs/mine", to="sharded", world_size=2, resume=True)
    assert [each["Key"] for each in parts_left(s3)] == ["mine-too/__0_0.distcp"]  # type: ignore[index]
    client(s3).abort_multipart_upload(
        Bucket="runs",
        Key="mine-too/__0_0.distcp",
        UploadId=parts_left(s3)[0]["UploadId"],  # type: ignore[index]
    )


def test_a_store_that_fails_now_and_then_gets_everything(s3: Proxy, files: Path) -> None:
    asked: set[tuple[str, str]] = set()

    def every_first(method: str, path: str, begin: int | None) -> str | None:
        first = (method, path) not in asked
        asked.add((method, path))
        return "503" if first and method != "GET" else None

    s3.fault = every_first
    fsdpckpt.convert(files / "full.pt", "s3://runs/flaky", to="sharded", world_size=2)
    s3.fault = None
    assert fsdpckpt.diff("s3://runs/flaky", files / "full.pt").same


def test_an_existing_checkpoint_is_replaced_only_when_asked_and_then_wholly(s3: Proxy, files: Path) -> None:
    with pytest.raises(TargetExistsError):
        fsdpckpt.convert(files / "full.pt", "s3://runs/dcp", to="sharded", world_size=2)
    assert s3.count("PUT") == 0
    fsdpckpt.convert(files / "twin.pt", "s3://runs/dcp", to="sharded", world_size=2, overwrite=True)
    assert "dcp/__2_0.distcp" not in keys(s3, "dcp")
    assert fsdpckpt.diff("s3://runs/dcp", files / "twin.pt").same
    changes = [(each.method, each.path.rpartition("/")[2]) for each in s3.seen if each.method in ("PUT", "DELETE")]
    assert changes.index(("DELETE", ".metadata")) < changes.index(("PUT", "__0_0.distcp"))
    assert changes.index(("DELETE", "__2_0.distcp")) < changes.index(("PUT", ".metadata"))


@pytest.mark.parametrize("target", ["s3://runs", "s3://runs/several"])
def test_what_is_no_checkpoint_is_never_replaced(target: str, s3: Proxy, files: Path) -> None:
    client(s3).put_object(Bucket="runs", Key="several/one/.metadata", Body=b"1")
    before = keys(s3, "")
    with pytest.raises(TargetExistsError):
        fsdpckpt.convert(files / "full.pt", target, to="sharded", world_size=2, overwrite=True)
    assert keys(s3, "") == before


def test_targets_that_cannot_be_are_refused_at_once(s3: Proxy, files: Path) -> None:
    for target, relation in (("dcp/below", "lies inside"), ("dcp", "is"), ("", "contains")):
        for scheme in ("s3", "s3a"):
            with pytest.raises(UsageError, match=f"{relation} the source"):
                fsdpckpt.convert("s3://runs/dcp", f"{scheme}://runs/{target}", to="sharded", world_size=2)
    with pytest.raises(TargetUnwritableError, match="does not write to them"):
        fsdpckpt.convert(files / "full.pt", "http://127.0.0.1:1/full.pt")
    with pytest.raises(TargetUnwritableError, match="no-such-bucket"):
        fsdpckpt.convert(files / "full.pt", "s3://no-such-bucket/full.pt")


def test_a_dry_run_says_where_the_disk_is_needed_and_writes_nothing(
    s3: Proxy, files: Path, run: Run, tmp_path: Path
) -> None:
    place = tmp_path / "elsewhere"
    done = run("convert", files / "full.pt", "s3://runs/dry.pt", "--dry-run", "--staging", place)
    assert done.code == 0, done.err
    assert f"needed in {place}" in done.out
    assert keys(s3, "dry") == set()
    assert not place.exists()
    done = run("convert", files / "full.pt", "s3://runs/dry.pt", "--dry-run", "--json")
    plan = json.loads(done.out)
    assert (plan["staged_in"], plan["streamed"], plan["disk_needed"]) == (None, True, 0)
    done = run("convert", files / "full.pt", "s3://runs/dry.pt", "--dry-run")
    assert "none needed: sent to s3://runs/dry.pt in parts" in done.out
