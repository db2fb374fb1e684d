"""An output for a store that takes parts is sent while it is assembled: no disk, and the same bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import fsdpckpt
from fsdpckpt.cli.convert import done_lines
from fsdpckpt.converters import check
from fsdpckpt.converters.output import streamed
from fsdpckpt.errors import (
    InternalError,
    SourceCorruptError,
    SourceIncompleteError,
    TargetError,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
)
from fsdpckpt.storage import UPLOADING, upload
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.test_writing import client, content, keys, parts_left

SMALL = 4096  # bytes of a part in the store below


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


class MemoryParts:
    """Parts of an object of fsspec's memory store. ``most``: bytes on the staging disk when any part was sent."""

    most = 0
    places: tuple[Path, ...] = ()

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem, self.path = filesystem, path
        self.parts: dict[int, bytes] = {}

    def send(self, number: int, data: bytearray) -> None:
        assert not self.filesystem.exists(self.path)
        self.parts[number] = bytes(data)
        on_disk = sum(file.stat().st_size for place in self.places for file in place.rglob("*") if file.is_file())
        MemoryParts.most = max(MemoryParts.most, on_disk)

    def complete(self) -> None:
        ordered = [self.parts[number] for number in sorted(self.parts)]
        assert {len(part) for part in ordered[:-1]} == {SMALL}
        self.filesystem.pipe_file(self.path, b"".join(ordered))

    def abort(self) -> None:
        self.parts.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, staging: Path) -> Iterator[str]:
    """A store that takes tiny parts."""
    monkeypatch.setattr(streamed, "PART", SMALL)
    monkeypatch.setattr(streamed, "takes_parts", lambda _: True)
    monkeypatch.setattr(upload, "takes_parts", lambda _: True)
    monkeypatch.setattr(upload.RemoteTarget, "abort_parts", lambda *_, **__: None)
    monkeypatch.setattr(
        upload.RemoteTarget, "in_parts", lambda target, name: MemoryParts(target.filesystem, target._path(name))
    )
    MemoryParts.most, MemoryParts.places = 0, (staging,)
    yield "memory://streamed"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/streamed"):
        filesystem.rm("/streamed", recursive=True)


def objects(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    return {name[len(root) :].lstrip("/"): filesystem.cat_file(name) for name in filesystem.find(root)}


def on_disk(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full.pt", {"to": "full"}),
    ("model.safetensors", {"only": "model"}),
    ("dcp", {"to": "sharded", "world_size": 3}),
    ("ranks", {"to": "sharded", "container": "torch", "world_size": 2, "buffers": "none"}),
    ("cast", {"to": "sharded", "world_size": 2, "dtype": "bfloat16"}),
    ("named", {"to": "sharded", "flavor": "accelerate", "world_size": 2}),
)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("name", "options"), FORMS, ids=[name for name, _ in FORMS])
def test_every_form_has_the_bytes_that_it_has_on_a_disk(
    name: str, options: dict[str, Any], threads: int, store: str, files: Path, tmp_path: Path
) -> None:
    fsdpckpt.convert(files / "full.pt", tmp_path / name, verify="full", **options)
    memory = random.Random(name).choice(["192KiB", "1MiB", "128MiB"])
    report = fsdpckpt.convert(
        files / "full.pt", f"{store}/{name}", verify="full", threads=threads, max_memory=memory, **options
    )
    assert objects(f"{store}/{name}") == on_disk(tmp_path / name)
    assert (report.streamed, report.disk_needed) == (True, 0)
    lists = sum(len(data) for path, data in on_disk(tmp_path / name).items() if path.endswith(upload.UPLOADED_LAST))
    assert MemoryParts.most <= lists + 65536  # and the journal
    assert list(MemoryParts.places[0].iterdir()) == []


def test_records_in_any_form_get_their_checksums(store: str, tmp_path: Path) -> None:
    """Tensors much longer than a part, shorter than one, empty, and as long as one."""
    rng = random.Random(7)
    sizes = [rng.choice([0, 1, 3, 900, SMALL // 4, SMALL // 4 + 1, 9001]) for _ in range(60)]
    torch.save({"model": {f"p{n}": torch.randn(size) for n, size in enumerate(sizes)}}, tmp_path / "source.pt")
    for name, options in (("out.pt", {"to": "full"}), ("out", {"to": "sharded", "world_size": 4})):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / name, **options)  # type: ignore[arg-type]
        fsdpckpt.convert(tmp_path / "source.pt", f"{store}/{name}", threads=4, **options)  # type: ignore[arg-type]
        assert objects(f"{store}/{name}") == on_disk(tmp_path / name)


def test_a_staging_directory_that_is_named_is_used(s3: Proxy, files: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(files / "full.pt", "s3://runs/staged.pt", staging=tmp_path / "here")
    assert (report.streamed, report.staged_in) == (False, str(tmp_path / "here"))


@pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")
def test_the_words_that_load_it_name_the_store(s3: Proxy, files: Path) -> None:
    options = {"to": "sharded", "world_size": 2, "flavor": "accelerate", "key_type": "name"}
    for more in ({}, {"overwrite": True}):  # streamed, then staged
        report = fsdpckpt.convert(files / "dcp", "s3://runs/loaded", **options, **more)  # type: ignore[arg-type]
        assert report.streamed != bool(more)
        assert report.loads == 'accelerator.load_state("COPY"), where COPY is a copy of s3://runs/loaded on disk'


def test_an_older_directory_stays_whole_until_the_new_one_is_checked(s3: Proxy, files: Path) -> None:
    before = {key: content(s3, key) for key in keys(s3, "dcp")}
    s3.fault = lambda method, path, begin: "500" if method == "GET" and path.endswith("full.pt") and begin else None
    with pytest.raises(fsdpckpt.FsdpckptError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/dcp", to="sharded", world_size=2, overwrite=True)
    s3.fault = None
    assert {key: content(s3, key) for key in keys(s3, "dcp")} == before
    report = fsdpckpt.convert("s3://runs/twin.pt", "s3://runs/dcp", to="sharded", world_size=2, overwrite=True)
    assert not report.streamed


def test_an_older_object_is_replaced_at_once(s3: Proxy, files: Path) -> None:
    seen: list[bytes] = []

    def look(method: str, path: str, begin: int | None) -> None:
        if method == "PUT" and "fsdpckpt-staging" in path:
            seen.append(content(s3, "twin.pt"))

    older = (files / "twin.pt").read_bytes()
    s3.fault = look
    report = fsdpckpt.convert(files / "full.pt", "s3://runs/twin.pt", to="full", overwrite=True)
    s3.fault = None
    assert seen and set(seen) == {older}
    assert report.streamed and [file.path for file in report.replaced] == [""]
    assert fsdpckpt.diff("s3://runs/twin.pt", files / "full.pt").same
    assert not any("fsdpckpt-staging" in key for key in keys(s3, ""))


def test_a_target_that_the_store_does_not_show_is_the_targets_error(s3: Proxy, files: Path) -> None:
    s3.fault = lambda method, path, begin: "403 AccessDenied"
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", "s3://runs/hidden.pt", overwrite=True)


def test_readers_refuse_a_directory_as_long_as_parts_are_sent(s3: Proxy, files: Path) -> None:
    refused: list[bool] = []

    def look(method: str, path: str, begin: int | None) -> None:
        if method == "PUT" and path.endswith(".distcp"):
            there = keys(s3, "new/")
            refused.append(f"new/{UPLOADING}" in there and not any(key.endswith(".metadata") for key in there))

    s3.fault = look
    fsdpckpt.convert("s3://runs/full.pt", "s3://runs/new", to="sharded", world_size=3)
    assert refused == [True] * 3


def test_a_source_that_is_damaged_leaves_nothing_in_the_store(s3: Proxy, files: Path, staging: Path) -> None:
    data = bytearray((files / "full.pt").read_bytes())
    data[len(data) * 3 // 4] ^= 1
    client(s3).put_object(Bucket="runs", Key="damaged.pt", Body=bytes(data))
    before = keys(s3, "")
    for target in ("s3://runs/from-damaged", "s3://runs/from-damaged.pt"):
        with pytest.raises(SourceCorruptError):
            fsdpckpt.convert("s3://runs/damaged.pt", target, to="sharded" if "." not in target[5:] else "full")
    assert keys(s3, "") == before
    assert parts_left(s3) == []
    assert list(staging.iterdir()) == []


MUCH = "300MiB"  # for a part that every file fits into


def test_a_store_that_keeps_other_bytes_is_named_with_the_object(store: str, files: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    put = upload.RemoteTarget.put

    def damaging(target: upload.RemoteTarget, name: str, data: bytes) -> None:
        at = len(data) // 2
        changed = bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at + 1 :])
        put(target, name, changed if name == "__1_0.distcp" else data)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(upload.RemoteTarget, "put", damaging)
        patches.setattr(streamed, "PART", 64 << 20)
        with pytest.raises(TargetUnwritableError, match=r"__1_0\.distcp is not what was written to it"):
            fsdpckpt.convert(
                files / "full.pt", f"{store}/out", to="sharded", world_size=2, verify="full", max_memory=MUCH
            )
    assert not filesystem.exists("/streamed/out")


def test_a_fault_of_this_program_is_not_called_the_stores(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists of an output that does not pass the check are not in the store."""

    def match(*_: object) -> None:
        raise InternalError("the output does not read back as it was planned")

    monkeypatch.setattr(check, "_match", match)
    with pytest.raises(InternalError):
        fsdpckpt.convert(files / "full.pt", f"{store}/out", to="sharded", world_size=2)


DCP: dict[str, Any] = {"to": "sharded", "world_size": 3, "threads": 1}


def broken(s3: Proxy, source: str) -> None:
    """An upload that ends before its last object."""
    s3.fault = lambda method, path, begin: "503" if method == "PUT" and path.endswith("__2_0.distcp") else None
    with pytest.raises(TargetUnwritableError) as caught:
        fsdpckpt.convert(source, "s3://runs/broken", **DCP)
    s3.fault = None
    assert "it uploads what is missing" in str(caught.value)
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.inspect("s3://runs/broken")
    s3.seen.clear()


def test_what_was_sent_is_not_sent_again(s3: Proxy, files: Path, staging: Path, tmp_path: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP)
    assert [s3.count("PUT", part=f"__{rank}_0.distcp") for rank in range(3)] == [0, 0, 1]
    assert [note.message for note in report.notes if note.kind == "resumed"] == [
        "continued an interrupted upload: 2 files were already there"
    ]
    fsdpckpt.convert(files / "full.pt", tmp_path / "here", **DCP)
    assert content(s3, "broken/__0_0.distcp") == (tmp_path / "here" / "__0_0.distcp").read_bytes()
    assert fsdpckpt.verify("s3://runs/broken").whole  # the sums in fsdpckpt.json are those of all files
    assert list(staging.iterdir()) == []


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two parts."""
    torch.manual_seed(1)
    torch.save({"model": {"weight": torch.randn(1157, 1201)}}, tmp_path / "large.pt")
    return tmp_path / "large.pt"


def test_an_upload_is_complete_although_the_answer_that_says_so_was_lost(s3: Proxy, large: Path) -> None:
    """The store knows no such upload when it is asked again to end it."""
    asked: list[str] = []

    def lose(method: str, path: str, number: int | None) -> str | None:
        if method == "POST" and path.endswith("/large.pt"):
            asked.append(path)
            return (None, "short", "404 NoSuchUpload")[min(len(asked) - 1, 2)]  # to its begin, and twice to its end
        return None

    s3.fault = lose
    assert fsdpckpt.convert(large, "s3://runs/large.pt", to="full").streamed
    s3.fault = None
    assert len(asked) == 3
    assert fsdpckpt.diff("s3://runs/large.pt", large).same


def test_an_upload_whose_parts_were_removed_meanwhile_is_an_error_that_says_so(
    s3: Proxy, large: Path, staging: Path
) -> None:
    def remove(method: str, path: str, number: int | None) -> str | None:
        sent = [each for each in s3.seen if "partNumber=2" in each.query]
        return "404 NoSuchUpload" if method == "POST" and path.endswith("/large.pt") and sent else None

    s3.fault = remove
    with pytest.raises(TargetUnwritableError, match="ending the upload failed") as caught:
        fsdpckpt.convert(large, "s3://runs/large.pt", to="full", threads=1)
    s3.fault = None
    assert "has removed the parts" in str(caught.value.why), caught.value
    assert not keys(s3, "large.pt")
    fsdpckpt.convert(large, "s3://runs/large.pt", to="full")
    assert fsdpckpt.diff("s3://runs/large.pt", large).same


def test_an_upload_of_which_nothing_is_complete_is_begun_anew_and_says_so(s3: Proxy, files: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    for name in keys(s3, "broken/__"):
        client(s3).delete_object(Bucket="runs", Key=name)
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP)
    assert [note.message for note in report.notes if note.kind == "cleared"] == [
        "an interrupted upload to s3://runs/broken was begun anew: none of its objects is there, complete"
    ]
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", resume=True, **DCP)
    assert report.was_complete
    assert any("5 files compared" in line for line in done_lines(report))


def test_a_run_in_a_store_is_not_converted_into_itself(s3: Proxy, files: Path) -> None:
    """The next --each '*' would take it for a checkpoint."""
    for out in ("s3://runs/new", "s3a://runs"):
        with pytest.raises(UsageError, match="the source"):
            list(fsdpckpt.convert_each("s3://runs", out, "*", to="full"))


def test_an_object_that_changed_since_it_was_sent_is_sent_again(s3: Proxy, files: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    size = len(content(s3, "broken/__1_0.distcp"))
    client(s3).put_object(Bucket="runs", Key="broken/__1_0.distcp", Body=os.urandom(size))
    client(s3).delete_object(Bucket="runs", Key="broken/__0_0.distcp")
    fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP)
    assert [s3.count("PUT", part=f"__{rank}_0.distcp") for rank in range(3)] == [1, 1, 1]
    assert fsdpckpt.verify("s3://runs/broken").whole


def test_another_command_does_not_continue_it_and_no_resume_starts_over(s3: Proxy, files: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    with pytest.raises(TargetError, match="of an interrupted run of another command"):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP, add_prefix="new.")
    with pytest.raises(SourceIncompleteError):  # it was left as it was
        fsdpckpt.inspect("s3://runs/broken")
    fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP, add_prefix="new.", resume=False)
    assert fsdpckpt.verify("s3://runs/broken").whole
    assert s3.count("PUT", part="__0_0.distcp") == 1


def test_what_another_machine_has_completed_since_stays_whole_until_the_new_one_is_checked(
    s3: Proxy, files: Path, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines convert to one DST night after night, with --overwrite."""
    broken(s3, "s3://runs/full.pt")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fsdpckpt.convert("s3://runs/twin.pt", "s3://runs/broken", overwrite=True, **DCP)
    before = {key: content(s3, key) for key in keys(s3, "broken")}
    monkeypatch.setattr("tempfile.tempdir", str(staging))
    data = bytearray((files / "full.pt").read_bytes())
    data[len(data) * 3 // 4] ^= 1
    client(s3).put_object(Bucket="runs", Key="full.pt", Body=bytes(data))
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", overwrite=True, **DCP)
    assert {key: content(s3, key) for key in keys(s3, "broken")} == before
    client(s3).put_object(Bucket="runs", Key="full.pt", Body=(files / "full.pt").read_bytes())
    assert not fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", overwrite=True, **DCP).streamed
    assert fsdpckpt.diff("s3://runs/broken", files / "full.pt").same
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ends", [True, False], ids=["completed", "running"])
def test_a_run_that_lost_its_target_to_another_machine_publishes_nothing(
    s3: Proxy, files: Path, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool, ends: bool
) -> None:
    """While one run sends its last object, another machine replaces what is there, or begins to."""
    found: dict[str, bytes] = {}

    def take_over(method: str, path: str, begin: int | None) -> str | None:
        if not found and method == "PUT" and path.endswith("__2_0.distcp"):
            found["begun"] = b""
            if ends:
                client(s3).delete_object(Bucket="runs", Key=f"taken/{UPLOADING}")
            else:
                marker = b'{"upload": "other", "files": {}, "replaced": []}'
                client(s3).put_object(Bucket="runs", Key=f"taken/{UPLOADING}", Body=marker)
            client(s3).put_object(Bucket="runs", Key="taken/.metadata", Body=b"the other run's")
            found.update({key: content(s3, key) for key in keys(s3, "taken/") if not key.endswith(".distcp")})
        return None

    s3.fault = take_over
    options: dict[str, Any] = {**DCP, "staging": tmp_path / "here"} if staged else DCP
    with pytest.raises(TargetExistsError, match="another run has written to s3://runs/taken"):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/taken", **options)
    s3.fault = None
    del found["begun"]
    assert {key: content(s3, key) for key in keys(s3, "taken/") if not key.endswith(".distcp")} == found
    assert {f"taken/__{rank}_0.distcp" for rank in range(3)} <= keys(s3, "taken/")  # they may be the other run's
    assert list(staging.iterdir()) == []


@pytest.mark.parametrize("staged", [False, True])
def test_a_run_that_lost_its_target_sends_no_further_object(
    s3: Proxy, files: Path, tmp_path: Path, staged: bool
) -> None:
    """Another machine completes a checkpoint of the same names: it stays what that machine has sent."""
    others = {f"taken/{name}": b"the other run's" for name in ("__1_0.distcp", "__2_0.distcp", ".metadata")}

    def take_over(method: str, path: str, begin: int | None) -> str | None:
        if method == "PUT" and path.endswith("__0_0.distcp"):
            client(s3).delete_object(Bucket="runs", Key=f"taken/{UPLOADING}")
            for key, data in others.items():
                client(s3).put_object(Bucket="runs", Key=key, Body=data)
        return None

    s3.fault = take_over
    more: dict[str, Any] = {"staging": tmp_path / "here", "max_memory": "32MiB"} if staged else {}
    with pytest.raises(TargetExistsError, match="another run has written to s3://runs/taken"):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/taken", **DCP, **more)
    s3.fault = None
    assert {key: content(s3, key) for key in others} == others


def test_a_source_that_is_damaged_does_not_undo_what_another_machine_completed(
    s3: Proxy, files: Path, staging: Path
) -> None:
    data = bytearray((files / "full.pt").read_bytes())
    data[len(data) * 3 // 4] ^= 1
    client(s3).put_object(Bucket="runs", Key="damaged.pt", Body=bytes(data))
    there: dict[str, bytes] = {}

    def take_over(method: str, path: str, begin: int | None) -> str | None:
        if not there and method == "PUT" and path.endswith("__2_0.distcp"):
            there["taken/__0_0.distcp"] = b"the other run's"
            client(s3).delete_object(Bucket="runs", Key=f"taken/{UPLOADING}")
            client(s3).put_object(Bucket="runs", Key="taken/__0_0.distcp", Body=there["taken/__0_0.distcp"])
        return None

    s3.fault = take_over
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert("s3://runs/damaged.pt", "s3://runs/taken", **DCP)
    s3.fault = None
    assert {key: content(s3, key) for key in there} == there
    assert list(staging.iterdir()) == []


def test_an_interrupted_run_that_overwrites_is_continued(s3: Proxy, files: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    assert fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", overwrite=True, **DCP).streamed
    assert [s3.count("PUT", part=f"__{rank}_0.distcp") for rank in range(3)] == [0, 0, 1]
    assert fsdpckpt.verify("s3://runs/broken").whole


def test_a_run_that_ends_between_the_copy_and_the_deletion_leaves_nothing_in_the_end(
    s3: Proxy, files: Path, staging: Path
) -> None:
    before = keys(s3, "")
    s3.fault = lambda method, path, begin: "503" if method == "DELETE" and "fsdpckpt-staging" in path else None
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/one.pt", to="full")
    s3.fault = None
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/one.pt", to="full")
    assert [note.kind for note in report.notes] == ["resumed"]
    assert keys(s3, "") - before == {"one.pt"}
    assert list(staging.iterdir()) == []


def test_a_source_that_changed_since_is_sent_from_the_beginning(s3: Proxy, files: Path) -> None:
    broken(s3, "s3://runs/full.pt")
    client(s3).put_object(Bucket="runs", Key="full.pt", Body=(files / "twin.pt").read_bytes())
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP)
    assert any("its source has changed" in note.message for note in report.notes)
    assert fsdpckpt.diff("s3://runs/broken", files / "twin.pt").same


def test_parts_that_do_not_fit_into_memory_are_an_error_with_the_number_that_does(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "MAX_PARTS", 1)
    with pytest.raises(UsageError, match="too small to send parts of") as caught:
        fsdpckpt.convert(files / "full.pt", f"{store}/out.pt", max_memory="2MiB")
    assert "5MiB" in str(caught.value.next_step) and "staging" in str(caught.value.next_step)
    assert objects(store) == {}
    fsdpckpt.convert(files / "full.pt", f"{store}/out.pt", max_memory="5MiB")
    assert fsdpckpt.diff(f"{store}/out.pt", files / "full.pt").same


def test_with_little_memory_the_output_is_staged(s3: Proxy, files: Path) -> None:
    report = fsdpckpt.convert(files / "full.pt", "s3://runs/staged.pt", max_memory="8MiB")
    assert not report.streamed


@pytest.fixture
def bucket(s3: Proxy) -> Iterator[str]:
    """A bucket with nothing in it but an upload of another program, which has begun and sends its parts."""
    client(s3).create_bucket(Bucket="whole")
    client(s3).create_multipart_upload(Bucket="whole", Key="of/another/program.bin")
    yield "s3://whole"
    for each in client(s3).list_objects_v2(Bucket="whole").get("Contents", []):
        client(s3).delete_object(Bucket="whole", Key=each["Key"])
    for each in client(s3).list_multipart_uploads(Bucket="whole").get("Uploads", []):
        client(s3).abort_multipart_upload(Bucket="whole", Key=each["Key"], UploadId=each["UploadId"])
    client(s3).delete_bucket(Bucket="whole")


@pytest.mark.parametrize("staged", [False, True])
def test_parts_of_a_killed_upload_to_a_whole_bucket_are_removed_and_no_others(
    staged: bool, s3: Proxy, bucket: str, files: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**DCP, **({"staging": tmp_path / "here"} if staged else {})}
    for name in ("__0_0.distcp", "__2_0.distcp"):  # as a kill leaves them
        client(s3).create_multipart_upload(Bucket="whole", Key=name)
    fsdpckpt.convert(files / "full.pt", bucket, **options)
    left = client(s3).list_multipart_uploads(Bucket="whole").get("Uploads", [])
    assert [each["Key"] for each in left] == ["of/another/program.bin"]
    fsdpckpt.convert(files / "full.pt", tmp_path / "alone", **DCP)
    assert objects(bucket) == on_disk(tmp_path / "alone")
    assert fsdpckpt.diff(bucket, files / "full.pt").same
    with pytest.raises(TargetExistsError, match="a whole bucket"):
        fsdpckpt.convert(files / "full.pt", bucket, overwrite=True, **options)


def test_an_upload_to_a_whole_bucket_is_continued(s3: Proxy, bucket: str, files: Path) -> None:
    s3.fault = lambda method, path, begin: "503" if method == "PUT" and path.endswith("__2_0.distcp") else None
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", bucket, **DCP)
    s3.fault = None
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.inspect(bucket)
    s3.seen.clear()
    fsdpckpt.convert(files / "full.pt", bucket, **DCP)
    assert [s3.count("PUT", part=f"__{rank}_0.distcp") for rank in range(3)] == [0, 0, 1]
    assert fsdpckpt.verify(bucket).whole
