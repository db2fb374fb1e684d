"""Odd stores and servers: they refuse in the middle, redirect, compress, page, and have odd names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import (
    SourceError,
    SourceUnsupportedError,
    TargetExistsError,
)
from fsdpckpt.storage import retry
from fsdpckpt.storage.remote_store import RemoteStore
from tests.e2e.remote.servers import Proxy
from tests.e2e.remote.stores import S3

ODD = "a b+c%41 ü#1&x=y"  # what URLs escape, or give a meaning


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("s3", "403 AccessDenied"), ("s3", "400 ExpiredToken"), ("s3", "403 SignatureDoesNotMatch"), ("web", "403")],
)
def test_credentials_that_end_in_the_middle_of_reading_are_named_and_not_tried_again(
    kind: str, answer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    state: Proxy = request.getfixturevalue(kind)
    refused: list[int] = []

    def refuse(method: str, path: str, begin: int | None) -> str | None:
        if begin is None or begin < 500_000 or "full.pt" not in path:
            return None
        refused.append(begin)
        return answer

    state.fault = refuse
    url = f"{'s3://runs' if kind == 's3' else state.url}/full.pt"
    with pytest.raises(SourceError, match=f"{url} may not be read") as caught:
        fsdpckpt.convert(url, tmp_path / "out.pt")
    assert caught.value.exit_code == 3
    assert "credentials" in str(caught.value.why)
    assert refused and len(refused) == len(set(refused)), "asked again"
    assert not (tmp_path / "out.pt").exists()


def test_names_that_urls_escape_are_read_and_written(s3: S3, files: Path) -> None:
    url = f"s3://runs/{ODD}/step 1"
    fsdpckpt.convert(files / "full.pt", url, to="sharded", container="torch", world_size=2, buffers="none")
    assert f"{ODD}/step 1/model_world_size_2_rank_1.pt" in s3.names(f"{ODD}/")
    assert fsdpckpt.diff(url, files / "full.pt").same
    fsdpckpt.convert(url, f"s3://runs/{ODD}/{ODD}.pt", verify="full")
    assert fsdpckpt.diff(f"s3://runs/{ODD}/{ODD}.pt", files / "full.pt").same


def test_names_that_urls_escape_are_read_from_web_servers(real_nginx: Proxy, files: Path) -> None:
    odd = files / ODD
    odd.mkdir(exist_ok=True)
    shutil.copyfile(files / "full.pt", odd / f"{ODD}.pt")
    try:
        for name in (f"{quote(ODD)}/{quote(ODD)}.pt", f"indexed/{quote(ODD)}", f"indexed/{quote(ODD, safe='+&=')}"):
            assert fsdpckpt.diff(f"{real_nginx.url}/{name}", files / "full.pt").same
    finally:
        shutil.rmtree(odd)


def test_names_that_urls_escape_are_read_from_an_index_page(web: Proxy, files: Path, tmp_path: Path) -> None:
    """Sharded weights: their readers know files by name."""
    odd = files / "odd weights"
    odd.mkdir()
    try:
        shards = [f"a b+c=d-0000{number}-of-00002.safetensors" for number in (1, 2)]
        index_name = "a b+c=d.safetensors.index.json"
        for number, shard in enumerate(shards):
            save_file({f"w{number}": torch.arange(5.0) + number}, odd / shard)
        index = {"metadata": {"total_size": 40}, "weight_map": {"w0": shards[0], "w1": shards[1]}}
        (odd / index_name).write_text(json.dumps(index))
        url = f"{web.url}/{quote(odd.name)}"
        assert {entry.name for entry in RemoteStore().list_directory(url)} == {*shards, index_name}
        assert fsdpckpt.diff(url, odd).same
        (odd / index_name).unlink()  # then the names of the shards say how many there are
        fsdpckpt.convert(url, tmp_path / "out.pt")
        assert fsdpckpt.diff(tmp_path / "out.pt", odd).same
    finally:
        shutil.rmtree(odd)


def test_a_redirected_file_is_read_from_where_it_is(web: Proxy, files: Path) -> None:
    web.fault = lambda method, path, begin: "307"
    assert fsdpckpt.diff(f"{web.url}/full.pt", files / "full.pt").same


def test_a_bucket_of_another_region_is_an_error_that_says_so(s3: S3) -> None:
    s3.fault = lambda method, path, begin: "301 PermanentRedirect"
    s3.seen.clear()
    with pytest.raises(SourceError, match="another region") as caught:
        fsdpckpt.inspect("s3://runs/full.pt")
    assert caught.value.exit_code == 3
    assert s3.count("HEAD", part="full.pt") < retry.ATTEMPTS, "asked again and again"
    assert "AWS_DEFAULT_REGION" in str(caught.value.next_step)


def test_a_list_that_comes_in_pages_is_read_to_its_end(s3: S3, files: Path) -> None:
    s3.query = "&max-keys=2"
    assert fsdpckpt.diff("s3://runs/ranks", files / "full.pt").same
    assert sum("continuation-token" in each.query for each in s3.seen) > 0
    fsdpckpt.convert(files / "twin.pt", "s3://runs/dcp", to="sharded", world_size=5, overwrite=True)
    fsdpckpt.convert(files / "twin.pt", "s3://runs/dcp", to="sharded", world_size=1, overwrite=True)
    s3.query = ""
    assert s3.names("dcp/") == {"dcp/.metadata", "dcp/__0_0.distcp", "dcp/fsdpckpt.json"}


def test_objects_that_stand_for_directories_are_none_of_a_checkpoint(s3: S3, files: Path) -> None:
    for key in ("marked/", "marked/below/", "ranks/", "ranks/sub/"):
        s3.put(key, b"")
    assert fsdpckpt.diff("s3://runs/ranks", files / "full.pt").same
    fsdpckpt.convert("s3://runs/ranks", "s3://runs/marked", to="sharded", world_size=2)
    assert fsdpckpt.diff("s3://runs/marked", files / "full.pt").same
    with pytest.raises(TargetExistsError):
        fsdpckpt.convert("s3://runs/ranks", "s3://runs/marked", to="sharded", world_size=2)


def test_an_object_without_bytes_is_no_checkpoint_and_no_crash(s3: S3, files: Path) -> None:
    s3.put("empty.pt", b"")
    with pytest.raises(SourceError):
        fsdpckpt.inspect("s3://runs/empty.pt")
    s3.put("dcp/__1_0.distcp", b"")
    with pytest.raises(SourceError, match=r"__1_0\.distcp"):
        fsdpckpt.convert("s3://runs/dcp", "s3://runs/never.pt")
    s3.put("ranks/empty", b"")
    assert fsdpckpt.diff("s3://runs/ranks", files / "full.pt").same


@pytest.mark.parametrize("begins", [-1, 500_000])
def test_a_server_that_compresses_although_it_was_asked_not_to_is_refused(
    begins: int, web: Proxy, tmp_path: Path
) -> None:
    """From the first answer on, and in the middle."""

    def compress(method: str, path: str, begin: int | None) -> None:
        if (begin or 0) > begins:
            web.answer_headers["content-encoding"] = "gzip"

    web.fault = compress
    with pytest.raises(SourceUnsupportedError, match="compress"):
        fsdpckpt.convert(f"{web.url}/full.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("kind", ["web", "s3"])
def test_other_bytes_than_those_asked_for_are_not_taken_for_them(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    state: Proxy = request.getfixturevalue(kind)

    def shift(method: str, path: str, begin: int | None) -> None:
        state.headers.clear()
        if begin and begin > 500_000:  # as a cache that mixes up its parts
            state.headers["Range"] = f"bytes={begin - 4096}-{begin + (1 << 20)}"

    state.fault = shift
    with pytest.raises(SourceError, match="cannot be read"):
        fsdpckpt.convert(f"{'s3://runs' if kind == 's3' else state.url}/full.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
