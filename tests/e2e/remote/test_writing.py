"""What is written to S3, mostly sent while it is assembled: interrupted, continued, replaced, and taken over meanwhile.

What holds for every store is in ``test_stores``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import fsdpckpt
from fsdpckpt.cli.convert import done_lines
from fsdpckpt.errors import (
    SourceCorruptError,
    SourceIncompleteError,
    TargetError,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
)
from fsdpckpt.storage import UPLOADING
from tests.cli.conftest import Run, run
from tests.e2e.remote.servers import answers
from tests.e2e.remote.stores import S3, files_below

__all__ = ["run"]

DCP: dict[str, Any] = {"to": "sharded", "world_size": 3, "threads": 1}
LAST = answers("503", "PUT", "__2_0.distcp")  # the last object of data in DCP
STAGED = pytest.mark.parametrize("staged", [False, True])

pytestmark = pytest.mark.usefixtures("staging")


def damaged(path: Path) -> bytes:
    """A file in which one bit of a tensor is wrong."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    return bytes(data)


def sent(s3: S3) -> list[int]:
    """How often each file of ``DCP`` went up."""
    return [s3.count("PUT", part=f"__{rank}_0.distcp") for rank in range(3)]


def messages(report: Any, kind: str) -> list[str]:
    return [note.message for note in report.notes if note.kind == kind]


def test_a_large_file_goes_up_in_parts(s3: S3, large: Path) -> None:
    fsdpckpt.convert(large, "s3://runs/large.pt")
    assert s3.count("PUT", part="fsdpckpt-staging/large.pt") == 5
    assert s3.count("PUT", part="runs/large.pt") == 1  # the store moves it into place
    assert s3.unfinished() == []


def test_full_verification_reads_back_what_arrived(s3: S3, files: Path) -> None:
    s3.fault = answers("flip", "PUT", ".pt")
    with pytest.raises(TargetUnwritableError, match="is not what was written to it"):
        fsdpckpt.convert(files / "full.pt", "s3://runs/flipped.pt", verify="full")


def test_a_failed_upload_whose_parts_cannot_be_removed_says_why_it_failed(s3: S3, large: Path) -> None:
    refusals = {"PUT": "400 ExpiredToken", "DELETE": "403 AccessDenied"}
    s3.fault = lambda method, path, begin: refusals.get(method) if path.endswith("refused.pt") else None
    with pytest.raises(TargetUnwritableError, match=r"uploading part \d failed") as caught:
        fsdpckpt.convert(large, "s3://runs/refused.pt")
    s3.fault = None
    assert "s3://runs/.refused.pt.fsdpckpt-staging/refused.pt" in caught.value.text
    assert s3.count("DELETE", part="refused.pt") > 0
    fsdpckpt.convert(large, "s3://runs/refused.pt")
    assert s3.unfinished() == []


def test_stores_of_another_kind_are_streamed_to(large: Path) -> None:
    fsdpckpt.convert(large, "memory://streamed/large.pt", verify="full")
    assert fsdpckpt.diff("memory://streamed/large.pt", large).same
    fsspec.filesystem("memory").rm("/streamed", recursive=True)


@pytest.mark.parametrize(
    ("target", "options"), [("again", {"to": "sharded", "world_size": 2}), ("again.pt", {}), ("again.safetensors", {})]
)
def test_a_complete_target_is_compared_and_accepted_by_resume(
    target: str, options: dict[str, Any], s3: S3, files: Path, staging: Path
) -> None:
    url = f"s3://runs/{target}"
    fsdpckpt.convert(files / "full.pt", url, **options)
    before = {key: s3.content(key) for key in s3.names("again")}
    s3.seen.clear()
    report = fsdpckpt.convert(files / "full.pt", url, resume=True, **options)
    assert messages(report, "resumed") == [f"{url} was already complete: every byte was compared, nothing was uploaded"]
    assert [each.method for each in s3.seen if each.method not in ("GET", "HEAD")] == []
    assert {key: s3.content(key) for key in s3.names("again")} == before
    assert list(staging.iterdir()) == []
    with pytest.raises(TargetExistsError, match="exists"):
        fsdpckpt.convert(files / "full.pt", url, **options)


@pytest.mark.parametrize("change", ["a byte", "a length", "a missing object", "another checkpoint"])
def test_a_target_that_is_something_else_is_not_accepted_by_resume(change: str, s3: S3, files: Path) -> None:
    fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    key = "again/__1_0.distcp"
    data = bytearray(s3.content(key))
    if change == "a byte":
        data[len(data) // 2] ^= 1
    elif change == "a length":
        data += b"x"
    if change == "a missing object":
        s3.delete(key)
    else:
        s3.put(key, bytes(data))
    before = s3.names("again")
    source = files / ("twin.pt" if change == "another checkpoint" else "full.pt")
    with pytest.raises(TargetExistsError, match="is not what this command writes"):
        fsdpckpt.convert(source, "s3://runs/again", to="sharded", world_size=2, resume=True)
    assert s3.names("again") == before


def test_a_run_that_was_killed_behind_its_upload_is_known_to_be_complete(
    s3: S3, files: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fsdpckpt.converters.output.spool.Spool.remove", lambda _: None)  # as if it never ran
        fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    assert list(staging.iterdir()) != []
    report = fsdpckpt.convert(files / "full.pt", "s3://runs/again", to="sharded", world_size=2)
    assert any("already complete" in message for message in messages(report, "resumed"))
    assert list(staging.iterdir()) == []


def test_targets_that_cannot_be_are_refused_at_once(s3: S3, files: Path) -> None:
    s3.put("several/one/.metadata", b"1")
    before = s3.names()
    for target, relation in (("dcp/below", "lies inside"), ("dcp", "is"), ("", "contains")):
        for scheme in ("s3", "s3a"):
            with pytest.raises(UsageError, match=f"{relation} the source"):
                fsdpckpt.convert("s3://runs/dcp", f"{scheme}://runs/{target}", to="sharded", world_size=2)
    for out in ("s3://runs/new", "s3a://runs"):  # the next --each '*' would take it for a checkpoint
        with pytest.raises(UsageError, match="the source"):
            list(fsdpckpt.convert_each("s3://runs", out, "*", to="full"))
    for target in ("s3://runs", "s3://runs/several"):  # no checkpoint
        with pytest.raises(TargetExistsError):
            fsdpckpt.convert(files / "full.pt", target, to="sharded", world_size=2, overwrite=True)
    with pytest.raises(TargetUnwritableError, match="does not write to them"):
        fsdpckpt.convert(files / "full.pt", "http://127.0.0.1:1/full.pt")
    assert s3.names() == before


def test_a_dry_run_says_where_the_disk_is_needed_and_writes_nothing(
    s3: S3, files: Path, run: Run, tmp_path: Path
) -> None:
    place = tmp_path / "elsewhere"
    command = ("convert", files / "full.pt", "s3://runs/dry.pt", "--dry-run")
    done = run(*command, "--staging", place)
    assert done.code == 0, done.err
    assert f"needed in {place}" in done.out
    plan = json.loads(run(*command, "--json").out)
    assert (plan["staged_in"], plan["streamed"], plan["disk_needed"]) == (None, True, 0)
    assert "none needed: sent to s3://runs/dry.pt in parts" in run(*command).out
    assert s3.names("dry") == set() and not place.exists()


def test_with_little_memory_the_output_is_staged(s3: S3, files: Path) -> None:
    assert not fsdpckpt.convert(files / "full.pt", "s3://runs/staged.pt", max_memory="8MiB").streamed


@pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")
def test_the_words_that_load_it_name_the_store(s3: S3, files: Path) -> None:
    options: dict[str, Any] = {"to": "sharded", "world_size": 2, "flavor": "accelerate", "key_type": "name"}
    for overwrite in (False, True):  # streamed, then staged
        report = fsdpckpt.convert(files / "dcp", "s3://runs/loaded", **options, overwrite=overwrite)
        assert report.streamed != overwrite
        assert report.loads == 'accelerator.load_state("COPY"), where COPY is a copy of s3://runs/loaded on disk'


# --- replacing --------------------------------------------------------------------------------------------------------


def test_an_older_directory_stays_whole_until_the_new_one_is_checked(s3: S3, files: Path) -> None:
    before = s3.objects("dcp")
    with s3.faulty(lambda method, path, begin: "500" if begin else None), pytest.raises(fsdpckpt.FsdpckptError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/dcp", to="sharded", world_size=2, overwrite=True)
    assert s3.objects("dcp") == before
    report = fsdpckpt.convert("s3://runs/twin.pt", "s3://runs/dcp", to="sharded", world_size=2, overwrite=True)
    assert not report.streamed


def test_an_older_object_is_replaced_at_once(s3: S3, files: Path) -> None:
    seen: list[bytes] = []

    def look(method: str, path: str, begin: int | None) -> None:
        if method == "PUT" and "fsdpckpt-staging" in path:
            seen.append(s3.content("twin.pt"))

    with s3.faulty(look):
        report = fsdpckpt.convert(files / "full.pt", "s3://runs/twin.pt", to="full", overwrite=True)
    assert seen and set(seen) == {(files / "twin.pt").read_bytes()}
    assert report.streamed and [file.path for file in report.replaced] == [""]
    assert fsdpckpt.diff("s3://runs/twin.pt", files / "full.pt").same
    assert not any("fsdpckpt-staging" in key for key in s3.names())


def test_a_target_that_the_store_does_not_show_is_the_targets_error(s3: S3, files: Path) -> None:
    s3.fault = lambda method, path, begin: "403 AccessDenied"
    with pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", "s3://runs/hidden.pt", overwrite=True)


def test_a_source_that_is_damaged_leaves_nothing_in_the_store(s3: S3, files: Path, staging: Path) -> None:
    s3.put("damaged.pt", damaged(files / "full.pt"))
    before = s3.names()
    for target, layout in (("s3://runs/from-damaged", "sharded"), ("s3://runs/from-damaged.pt", "full")):
        with pytest.raises(SourceCorruptError):
            fsdpckpt.convert("s3://runs/damaged.pt", target, to=layout)
    assert s3.names() == before
    assert s3.unfinished() == []
    assert list(staging.iterdir()) == []


# --- ends of uploads --------------------------------------------------------------------------------------------------


def test_an_upload_is_complete_although_the_answer_that_says_so_was_lost(s3: S3, large: Path) -> None:
    """The store knows no such upload when it is asked again to end it."""
    asked: list[str] = []

    def lose(method: str, path: str, number: int | None) -> str | None:
        if method == "POST" and path.endswith("/large.pt"):
            asked.append(path)
            return (None, "short", "404 NoSuchUpload")[min(len(asked) - 1, 2)]  # to its begin, and twice to its end
        return None

    with s3.faulty(lose):
        assert fsdpckpt.convert(large, "s3://runs/large.pt", to="full").streamed
    assert len(asked) == 3
    assert fsdpckpt.diff("s3://runs/large.pt", large).same


def test_an_upload_whose_parts_were_removed_meanwhile_is_an_error_that_says_so(s3: S3, large: Path) -> None:
    def remove(method: str, path: str, number: int | None) -> str | None:
        parts = [each for each in s3.seen if "partNumber=2" in each.query]
        return "404 NoSuchUpload" if method == "POST" and path.endswith("/large.pt") and parts else None

    with s3.faulty(remove), pytest.raises(TargetUnwritableError, match="ending the upload failed") as caught:
        fsdpckpt.convert(large, "s3://runs/large.pt", to="full", threads=1)
    assert "has removed the parts" in str(caught.value.why), caught.value
    assert not s3.names("large.pt")
    fsdpckpt.convert(large, "s3://runs/large.pt", to="full")
    assert fsdpckpt.diff("s3://runs/large.pt", large).same


def test_a_run_that_ends_between_the_copy_and_the_deletion_leaves_nothing_in_the_end(
    s3: S3, files: Path, staging: Path
) -> None:
    before = s3.names()
    with s3.faulty(answers("503", "DELETE", "one.pt")), pytest.raises(TargetUnwritableError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/one.pt", to="full")
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/one.pt", to="full")
    assert [note.kind for note in report.notes] == ["resumed"]
    assert s3.names() - before == {"one.pt"}
    assert list(staging.iterdir()) == []


# --- interrupted runs -------------------------------------------------------------------------------------------------


def broken(s3: S3) -> None:
    """An upload that ends before its last object."""
    with s3.faulty(LAST), pytest.raises(TargetUnwritableError) as caught:
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP)
    assert "it uploads what is missing" in str(caught.value)
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.inspect("s3://runs/broken")
    s3.seen.clear()


def lost_and_changed(s3: S3, files: Path) -> None:
    s3.put("broken/__1_0.distcp", os.urandom(len(s3.content("broken/__1_0.distcp"))))
    s3.delete("broken/__0_0.distcp")


def nothing_is_there(s3: S3, files: Path) -> None:
    for key in s3.names("broken/__"):
        s3.delete(key)


def another_source(s3: S3, files: Path) -> None:
    s3.put("full.pt", (files / "twin.pt").read_bytes())


SINCE: dict[str, tuple[Callable[[S3, Path], None], dict[str, Any], list[int], str]] = {
    "nothing": (lambda *_: None, {}, [0, 0, 1], "continued an interrupted upload: 2 files were already there"),
    "it overwrites": (lambda *_: None, {"overwrite": True}, [0, 0, 1], "2 files were already there"),
    "objects were lost and changed": (lost_and_changed, {}, [1, 1, 1], ""),
    "all objects were lost": (
        nothing_is_there,
        {},
        [1, 1, 1],
        "an interrupted upload to s3://runs/broken was begun anew: none of its objects is there, complete",
    ),
    "its source is another": (another_source, {}, [1, 1, 1], "its source has changed"),
    "it starts over": (lambda *_: None, {"add_prefix": "new.", "resume": False}, [1, 1, 1], ""),
}
"""What has happened, more options of the next run, how often it sends each file, and what it says."""


@pytest.mark.parametrize("since", SINCE)
def test_an_interrupted_run_is_continued_with_what_is_there_and_its_own(
    since: str, s3: S3, files: Path, staging: Path, tmp_path: Path
) -> None:
    change, more, times, says = SINCE[since]
    broken(s3)
    with pytest.raises(TargetError, match="of an interrupted run of another command"):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP, add_prefix="old.")
    with pytest.raises(SourceIncompleteError):  # it was left as it was
        fsdpckpt.inspect("s3://runs/broken")
    change(s3, files)
    s3.seen.clear()
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **DCP, **more)
    assert (report.streamed, sent(s3)) == (True, times)
    assert any(says in note.message for note in report.notes) or not says
    fsdpckpt.convert("s3://runs/full.pt", tmp_path / "here", **DCP, **more)
    assert s3.objects("broken") == files_below(tmp_path / "here")
    assert fsdpckpt.verify("s3://runs/broken").whole  # the sums in fsdpckpt.json are those of all files
    again = {**DCP, **more, "overwrite": False, "resume": True}
    report = fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", **again)
    assert report.was_complete and any("5 files compared" in line for line in done_lines(report))
    assert list(staging.iterdir()) == []


def test_what_another_machine_has_completed_since_stays_whole_until_the_new_one_is_checked(
    s3: S3, files: Path, staging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines convert to one DST night after night, with --overwrite."""
    broken(s3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fsdpckpt.convert("s3://runs/twin.pt", "s3://runs/broken", overwrite=True, **DCP)
    before = s3.objects("broken")
    monkeypatch.setattr("tempfile.tempdir", str(staging))
    s3.put("full.pt", damaged(files / "full.pt"))
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", overwrite=True, **DCP)
    assert s3.objects("broken") == before
    s3.put("full.pt", (files / "full.pt").read_bytes())
    assert not fsdpckpt.convert("s3://runs/full.pt", "s3://runs/broken", overwrite=True, **DCP).streamed
    assert fsdpckpt.diff("s3://runs/broken", files / "full.pt").same
    assert list(staging.iterdir()) == []


@STAGED
@pytest.mark.parametrize(("moment", "ends"), [(2, True), (2, False), (0, True)])
def test_a_run_that_lost_its_target_to_another_machine_publishes_nothing_and_sends_no_further_object(
    s3: S3, staging: Path, tmp_path: Path, staged: bool, moment: int, ends: bool
) -> None:
    """While one run sends object ``moment``, another machine completes a checkpoint there, or begins to."""
    others = {f"__{rank}_0.distcp": b"the other run's" for rank in range(moment + 1, 3)}
    others |= {".metadata": b"the other run's"}
    if not ends:
        others |= {UPLOADING: b'{"upload": "other", "files": {}, "replaced": []}'}

    def take_over(method: str, path: str, begin: int | None) -> None:
        if method == "PUT" and path.endswith(f"__{moment}_0.distcp"):
            s3.delete(f"taken/{UPLOADING}")
            for name, data in others.items():
                s3.put(f"taken/{name}", data)

    more: dict[str, Any] = {"staging": tmp_path / "here", "max_memory": "32MiB"} if staged else {}
    with (
        s3.faulty(take_over),
        pytest.raises(TargetExistsError, match="another run has written to s3://runs/taken"),
    ):
        fsdpckpt.convert("s3://runs/full.pt", "s3://runs/taken", **DCP, **more)
    there = s3.objects("taken")
    own = {f"__{rank}_0.distcp" for rank in range(moment + 1)}  # which may be the other run's
    assert there.keys() == {*others, *own}
    assert {name: there[name] for name in others} == others
    assert list(staging.iterdir()) == []


def test_a_source_that_is_damaged_does_not_undo_what_another_machine_completed(
    s3: S3, files: Path, staging: Path
) -> None:
    s3.put("damaged.pt", damaged(files / "full.pt"))
    there: dict[str, bytes] = {}

    def take_over(method: str, path: str, begin: int | None) -> None:
        if not there and method == "PUT" and path.endswith("__2_0.distcp"):
            there["__0_0.distcp"] = b"the other run's"
            s3.delete(f"taken/{UPLOADING}")
            s3.put("taken/__0_0.distcp", there["__0_0.distcp"])

    with s3.faulty(take_over), pytest.raises(SourceCorruptError):
        fsdpckpt.convert("s3://runs/damaged.pt", "s3://runs/taken", **DCP)
    assert s3.content("taken/__0_0.distcp") == there["__0_0.distcp"]
    assert list(staging.iterdir()) == []


# --- a whole bucket ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: S3) -> Iterator[str]:
    """A bucket with nothing in it but an upload of another program, which has begun and sends its parts."""
    s3.client.create_bucket(Bucket="whole")
    s3.begin_upload("of/another/program.bin", "whole")
    yield "s3://whole"
    for key in s3.names(bucket="whole"):
        s3.delete(key, "whole")
    s3.abort_uploads("whole")
    s3.client.delete_bucket(Bucket="whole")


@STAGED
def test_parts_of_a_killed_upload_to_a_whole_bucket_are_removed_and_no_others(
    staged: bool, s3: S3, bucket: str, files: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**DCP, **({"staging": tmp_path / "here"} if staged else {})}
    for name in ("__0_0.distcp", "__2_0.distcp"):  # as a kill leaves them
        s3.begin_upload(name, "whole")
    fsdpckpt.convert(files / "full.pt", bucket, **options)
    assert s3.unfinished("whole") == ["of/another/program.bin"]
    fsdpckpt.convert(files / "full.pt", tmp_path / "alone", **DCP)
    assert {key: s3.content(key, "whole") for key in s3.names(bucket="whole")} == files_below(tmp_path / "alone")
    assert fsdpckpt.diff(bucket, files / "full.pt").same
    with pytest.raises(TargetExistsError, match="a whole bucket"):
        fsdpckpt.convert(files / "full.pt", bucket, overwrite=True, **options)


def test_an_upload_to_a_whole_bucket_is_continued(s3: S3, bucket: str, files: Path) -> None:
    with s3.faulty(LAST), pytest.raises(TargetUnwritableError):
        fsdpckpt.convert(files / "full.pt", bucket, **DCP)
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.inspect(bucket)
    s3.seen.clear()
    fsdpckpt.convert(files / "full.pt", bucket, **DCP)
    assert sent(s3) == [0, 0, 1]
    assert fsdpckpt.verify(bucket).whole
