"""Every command reads from web servers and object stores what it reads from a disk, at a small cost in requests."""

from __future__ import annotations

import json
import re
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from fsdpckpt.converters import check
from fsdpckpt.errors import (
    SourceCorruptError,
    SourceError,
    SourceMissingError,
    SourceUnrecognisedError,
    SourceUnsupportedError,
)
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage import remote_file, retry
from fsdpckpt.storage.sources import Sources
from tests.cli.conftest import Run, run
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.stores import S3
from tests.oracle.compare import identical

__all__ = ["run"]


@pytest.fixture(params=["nginx", "s3"])
def place(request: pytest.FixtureRequest) -> tuple[Proxy, str]:
    """The server, and the URL that the files lie below."""
    kind = request.param
    state: Proxy = request.getfixturevalue({"nginx": "real_nginx", "s3": "s3"}[kind])
    return state, {"nginx": f"{state.url}/indexed", "s3": "s3://runs"}[kind]


def assert_the_same(url: str, path: Path, twin: Path) -> None:
    """What the commands that read say of ``url`` is what they say of ``path``."""
    remote, local = (fsdpckpt.inspect(each, ranks=True).to_json(ranks=True) for each in (url, path))
    as_local = json.loads(json.dumps(remote).replace(url, str(path)))
    for key in ("tensors", "layout", "container", "sections", "param_groups"):
        assert as_local[key] == json.loads(json.dumps(local[key])), key
    assert fsdpckpt.diff(url, path).same
    assert not fsdpckpt.diff(url, twin, only="model").same
    digests = [fsdpckpt.verify(each, digests=True).digests for each in (url, path)]
    assert digests[0] == digests[1]
    with fsdpckpt.open(url) as remote_open, fsdpckpt.open(path) as local_open:
        assert identical(remote_open["0.weight"].torch(), local_open["0.weight"].torch())


def test_web_servers_hold_what_a_disk_holds(web: Proxy, real_nginx: Proxy, files: Path) -> None:
    assert_the_same(f"{web.url}/ranks", files / "ranks", files / "twin.pt")
    assert_the_same(f"{real_nginx.url}/indexed/dcp", files / "dcp", files / "twin.pt")


def test_a_conversion_writes_the_bytes_of_one_from_a_disk_and_fetches_the_data_once_and_little_else(
    place: tuple[Proxy, str], files: Path, tmp_path: Path
) -> None:
    state, base = place
    report = fsdpckpt.convert(f"{base}/full.pt", tmp_path / "out.pt")
    assert state.sent() < 1.15 * (files / "full.pt").stat().st_size + 100_000
    assert report.bytes_read > 1_000_000
    assert len(state.seen) < 40
    for source, target in ((f"{base}/ranks", "a"), (files / "ranks", "b")):
        fsdpckpt.convert(source, tmp_path / target, to="sharded", container="dcp", world_size=3, verify="full")
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_looking_at_a_checkpoint_fetches_no_tensor_data(place: tuple[Proxy, str]) -> None:
    state, base = place
    fsdpckpt.inspect(f"{base}/full.pt")
    assert state.sent() < 400_000
    assert max(each.sent for each in state.seen) < 200_000


def test_requests_run_side_by_side(web: Proxy, tmp_path: Path) -> None:
    running, together, lock = 0, threading.Event(), threading.Lock()

    def watch(method: str, path: str, begin: int | None) -> str | None:
        nonlocal running
        if "_rank_" in path and begin:
            with lock:
                running += 1
                if running > 1:
                    together.set()
            together.wait(20)  # another request has to come while this one is being answered
            with lock:
                running -= 1
        return None

    web.fault = watch
    fsdpckpt.inspect(f"{web.url}/ranks")
    assert together.is_set()


@pytest.mark.parametrize("kind", ["503", "reset", "short"])
def test_a_server_that_fails_now_and_then_is_asked_again(
    kind: str, place: tuple[Proxy, str], files: Path, tmp_path: Path
) -> None:
    state, base = place
    asked: dict[tuple[str, str, int | None], int] = {}
    lock = threading.Lock()

    def every_first(method: str, path: str, begin: int | None) -> str | None:
        with lock:
            count = asked[method, path, begin] = asked.get((method, path, begin), 0) + 1
        return kind if count == 1 else None

    state.fault = every_first
    fsdpckpt.convert(f"{base}/dcp", tmp_path / "out.pt")
    assert max(asked.values()) > 1
    state.fault = None
    assert fsdpckpt.diff(tmp_path / "out.pt", files / "dcp").same


def test_a_server_that_stops_in_the_middle_is_asked_again(
    web: Proxy, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "STALLED", 0.5)
    stalled: list[int] = []

    def once(method: str, path: str, begin: int | None) -> str | None:
        if begin and path.endswith("full.pt") and not stalled:
            stalled.append(begin)
            return "stall"
        return None

    web.fault = once
    fsdpckpt.convert(f"{web.url}/full.pt", tmp_path / "out.pt")
    assert stalled
    assert fsdpckpt.diff(tmp_path / "out.pt", files / "full.pt").same


@pytest.mark.parametrize("kind", ["500", "short"])
def test_a_server_that_keeps_failing_is_an_error_that_says_what_was_tried(
    kind: str, place: tuple[Proxy, str], tmp_path: Path
) -> None:
    state, base = place
    state.fault = lambda method, path, begin: kind if begin and begin > 500_000 and "full.pt" in path else None
    with pytest.raises(SourceError) as caught:
        fsdpckpt.convert(f"{base}/full.pt", tmp_path / "out.pt")
    assert caught.value.exit_code == 3
    assert f"{retry.ATTEMPTS} attempts" in caught.value.what
    assert caught.value.file == f"{base}/full.pt"
    assert not (tmp_path / "out.pt").exists()


def test_an_index_page_that_fails_is_no_empty_directory(real_nginx: Proxy, files: Path) -> None:
    seen: list[str] = []

    def first(method: str, path: str, begin: int | None) -> str | None:
        if path.endswith("/both/") and begin is None:
            seen.append(path)
            return "503" if len(seen) == 1 else None
        return None

    both = files / "both"
    both.mkdir(exist_ok=True)
    for name, source in (("model.pt", "full.pt"), ("more.pt", "twin.pt")):
        (both / name).write_bytes((files / source).read_bytes())
    real_nginx.fault = first
    names = {entry.name for entry in Sources().list_directory(f"{real_nginx.url}/indexed/both")}
    assert names == {"model.pt", "more.pt"}
    assert len(seen) == 2


def test_what_is_not_there_is_asked_for_once(web: Proxy, run: Run) -> None:
    done = run("inspect", f"{web.url}/nothing.pt")
    assert done.code == 3
    assert "does not exist" in done.err
    assert web.count(part="/nothing.pt") <= 8  # the name, and what a directory of that name would hold


def test_a_server_without_ranges_is_refused_before_anything_is_downloaded(
    real_nginx: Proxy, files: Path, tmp_path: Path
) -> None:
    for work in (fsdpckpt.inspect, lambda url: fsdpckpt.convert(url, tmp_path / "out.pt")):
        with pytest.raises(SourceUnsupportedError, match="Range"):
            work(f"{real_nginx.url}/whole/full.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_directory_needs_no_index_page_where_metadata_or_this_program_names_the_files(
    real_nginx: Proxy, files: Path, tmp_path: Path
) -> None:
    for form in ("dcp", "ranks", "weights"):
        assert fsdpckpt.diff(f"{real_nginx.url}/{form}", files / form).same
    fsdpckpt.convert(f"{real_nginx.url}/dcp", tmp_path / "out.pt")
    assert fsdpckpt.diff(tmp_path / "out.pt", files / "dcp").same


def test_a_directory_that_nobody_lists_says_what_to_give_instead(real_nginx: Proxy, files: Path) -> None:
    (files / "unlisted").mkdir(exist_ok=True)
    (files / "unlisted" / "rank0.pt").write_bytes((files / "full.pt").read_bytes())
    with pytest.raises(SourceUnrecognisedError, match="does not list directories") as caught:
        fsdpckpt.inspect(f"{real_nginx.url}/unlisted/")
    assert caught.value.next_step is not None
    assert "URL of one file" in caught.value.next_step


def test_an_object_that_is_replaced_while_it_is_read_is_refused(s3: S3, files: Path, tmp_path: Path) -> None:
    twin = (files / "twin.pt").read_bytes()
    assert len(twin) == (files / "full.pt").stat().st_size
    replaced: list[int] = []

    def replace(method: str, path: str, begin: int | None) -> None:
        if begin and begin > 500_000 and not replaced:
            replaced.append(s3.count("HEAD"))
            s3.put("full.pt", twin)

    s3.fault = replace
    with pytest.raises(SourceCorruptError, match="changed while it was read"):
        fsdpckpt.convert("s3://runs/full.pt", tmp_path / "out.pt")
    assert replaced == [s3.count("HEAD")]  # the answer itself showed it, without a check at the end
    assert not (tmp_path / "out.pt").exists()


def test_an_object_that_is_replaced_behind_the_last_read_is_refused_too(
    s3: S3, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = check.OutputCheck.run

    def replaced(output: check.OutputCheck) -> dict[str, str]:
        s3.put("full.pt", (files / "twin.pt").read_bytes())
        return run(output)

    monkeypatch.setattr(check.OutputCheck, "run", replaced)
    with pytest.raises(SourceCorruptError, match="changed while it was read"):
        fsdpckpt.convert("s3://runs/full.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_missing_object_of_a_set_is_named(s3: S3, tmp_path: Path) -> None:
    s3.delete("dcp/__1_0.distcp")
    with pytest.raises(SourceError) as caught:
        fsdpckpt.inspect("s3://runs/dcp")
    assert "__1_0.distcp" in str(caught.value)
    s3.delete("full.pt")
    with pytest.raises(SourceMissingError):
        fsdpckpt.inspect("s3://runs/full.pt")


def test_the_command_line_takes_urls(place: tuple[Proxy, str], tmp_path: Path, run: Run) -> None:
    base, units = place[1], tmp_path / "units.json"
    made = ("--unit", "none", "--use-orig-params", "--buffers", "none", "-o", units)
    done = run("units", "--from", f"{base}/full.pt", *made)
    assert done.code == 0, done.err
    assert "0.weight" in units.read_text()
    for command in ("inspect", "verify"):
        done = run(command, f"{base}/dcp", "--json", "--quiet")
        assert done.code == 0, done.err
        assert json.loads(done.out)


@pytest.mark.parametrize(
    ("options", "source"),
    [({"to": "sharded"}, "{}/full.pt?***"), ({"container": "safetensors", "max_shard_size": 999999999}, "full.pt")],
)
def test_credentials_in_a_url_are_not_written_into_the_target(
    options: dict[str, Any], source: str, web: Proxy, tmp_path: Path
) -> None:
    url = f"{web.url.replace('://', '://someone:SeCrEt@')}/full.pt?X-Signature=SeCrEt&more=1"
    fsdpckpt.convert(url, tmp_path / "out", only="model", **options)
    text = (tmp_path / "out" / "fsdpckpt.json").read_text()
    assert "SeCrEt" not in text and json.loads(text)["source"] == source.format(web.url.replace("://", "://***@"))


def _with_secrets(url: str) -> str:
    return f"{url.replace('://', '://someone:SeCrEt@')}?X-Amz-Signature=SeCrEt&more=1#SeCrEt"


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_command_shows_the_credentials_of_a_url(
    form: tuple[str, ...], debug: str, web: Proxy, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPCKPT_DEBUG", debug)
    url, missing = (_with_secrets(f"{web.url}/{name}") for name in ("full.pt", "nothing.pt"))
    page, tests, out = (str(tmp_path / name) for name in ("page.html", "tests.xml", "out.pt"))
    commands: dict[tuple[str, ...], int] = {
        ("inspect", url, "--ranks", "--report", page, *form): 0,
        ("verify", url, "--junit", tests, *form): 0,
        ("convert", url, out, "--reference", url, *form): 0,
        ("convert", url, out, *form): 5,
        ("convert", url, out, "--overwrite", "--add-prefix", "x.", "--dry-run", *form): 0,
        ("convert", url, str(tmp_path / "flat"), "--to", "flattened", "--world-size", "2", *form): 4,
        ("diff", url, out, *form): 0,
        ("inspect", missing, *form): 3,
        ("units", "--from", url, *form): 4,
        ("convert", out, url, *form): 5,
    }
    for command, code in commands.items():
        done = run(*command)
        assert done.code == code, (command, done.err)
        assert "SeCrEt" not in done.out + done.err, command
        if form and done.code == 0:
            json.loads(done.out)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"SeCrEt" not in path.read_bytes(), path


def test_no_python_object_or_traceback_shows_the_credentials_of_a_url(web: Proxy, tmp_path: Path) -> None:
    url, missing = (_with_secrets(f"{web.url}/{name}") for name in ("full.pt", "nothing.pt"))
    described, verified = fsdpckpt.inspect(url, ranks=True), fsdpckpt.verify(url)
    report, difference = fsdpckpt.convert(url, tmp_path / "out.pt"), fsdpckpt.diff(url, url)
    texts = [repr(described), described._repr_html_(), json.dumps(described.to_json(ranks=True)), repr(verified)]
    texts += [verified._repr_html_(), repr(report), report._repr_html_(), json.dumps(report.to_json())]
    texts += [repr(difference), difference._repr_html_()]
    with fsdpckpt.open(url) as opened:
        texts += [repr(opened), opened._repr_html_()]
        with pytest.raises(KeyError) as absent:
            opened["absent"]
        texts += traceback.format_exception(absent.value)
    for fault in (None, "403", "503", "reset"):
        web.fault = None if fault is None else lambda *_, fault=fault: fault  # type: ignore[misc]
        with pytest.raises(SourceError) as raised:
            fsdpckpt.inspect(missing)
        texts += traceback.format_exception(raised.value)
    assert not [found for text in texts for found in re.findall(".{30}SeCrEt", text)]


def test_a_run_is_continued_from_the_same_url_with_a_new_signature(web: Proxy, tmp_path: Path) -> None:
    """Signatures expire: the second run has another URL, and the source is the same."""

    class Stopped(NoProgress):
        done = 0

        def advance(self, nbytes: int) -> None:
            self.done += nbytes
            if self.done > 600_000:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"to": "sharded", "world_size": 3, "threads": 1, "max_memory": "1MiB"}
    url = f"{web.url}/full.pt?X-Amz-Signature="
    with pytest.raises(KeyboardInterrupt):
        fsdpckpt.convert(f"{url}first", tmp_path / "out", progress=Stopped(), **options)
    records = [path.read_bytes() for path in tmp_path.rglob("journal*")]
    assert records and not any(b"first" in record for record in records)
    report = fsdpckpt.convert(f"{url}second", tmp_path / "out", **options)
    assert any(note.kind == "resumed" for note in report.notes), report.notes
    assert fsdpckpt.diff(f"{url}third", tmp_path / "out").same
