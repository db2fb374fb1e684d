"""URLs of a store with names that a disk does not have: refused, with the URL that is probably meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.cli.errors import error_json
from fsdpckpt.errors import FsdpckptError, SourceError, SourceUnrecognisedError, UsageError
from fsdpckpt.storage.remote_store import filesystem_of


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3://bucket//x", "s3://bucket/x"),
        ("s3://bucket/./x", "s3://bucket/x"),
        ("s3://bucket/a//b/", "s3://bucket/a/b"),
        ("s3://bucket/a/../b", "s3://bucket/b"),
        ("gs://bucket/..", "gs://bucket"),
    ],
)
def test_an_empty_name_or_dots_in_a_url_are_refused_before_the_store_is_opened(
    url: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcsfs looks for credentials of the machine first, and waits for them."""
    monkeypatch.setattr("fsdpckpt.converters.output.store_publisher.filesystem_of", None)
    torch.save({"w": torch.ones(2)}, tmp_path / "source.pt")
    with pytest.raises(UsageError, match="name in it") as error:
        fsdpckpt.convert(tmp_path / "source.pt", url, to="full", container="torch")
    assert error.value.next_step == f"give {meant}"


@pytest.mark.parametrize("url", ["s3:bucket/x", "s3:/bucket/x", "https:someone:hidden@host/x", "gs:", "hf:///x/y"])
def test_python_takes_no_unfinished_url_for_a_local_path(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpckpt.storage.retry.FIRST_PAUSE", 0.0)
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "source.pt")
    for work in (
        lambda: fsdpckpt.convert("source.pt", url, to="full", container="torch"),
        lambda: fsdpckpt.inspect(url),
        lambda: fsdpckpt.diff("source.pt", url),
        lambda: fsdpckpt.convert(url, "out"),
    ):
        with pytest.raises(FsdpckptError) as error:
            work()
        assert "hidden" not in error.value.text
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]
    Path("s3:bucket").mkdir()
    Path("source.pt").rename("s3:bucket/x")  # what is there is a path
    assert fsdpckpt.inspect("s3:bucket/x").to_json()["layout"] == "full"


@pytest.mark.parametrize(
    "url",
    [
        "http://host:port/x.pt",
        "https://host:70000/x.pt",
        "http://host:0/x.pt",
        "http://user:hidden/half@host/x.pt",
        "http://a::b/x.pt",
    ],
)
def test_what_is_no_port_is_refused_before_anything_is_requested(url: str, tmp_path: Path) -> None:
    with pytest.raises(SourceUnrecognisedError, match="has no usable port") as error:
        fsdpckpt.inspect(url)
    assert "hid" not in error.value.text
    torch.save({"w": torch.ones(2)}, tmp_path / "source.pt")
    with pytest.raises(FsdpckptError):
        fsdpckpt.convert(tmp_path / "source.pt", url, to="full", container="torch")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://[::1]:8080/run/x.pt", "http://[::1]:8080/run/x.pt"),
        ("s3://run/a::b.pt", "run/a::b.pt"),
        ("s3://run/a::s3://b.pt", "run/a::s3://b.pt"),
    ],
)
def test_two_colons_in_an_address_or_a_name_chain_no_stores(url: str, name: str) -> None:
    filesystem, found = filesystem_of(url)
    assert found == name
    assert "target_options" not in filesystem.storage_options


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hidden@bucket/x.pt",
        "hf://user:hidden@x/y",
        "hf://KEY:hidden@x",
        "hf://hidden:x@",
        "s3://KEY:hid/hidden@bucket/x",
    ],
)
def test_the_words_of_a_store_show_no_part_of_what_opens_it(url: str) -> None:
    """s3fs takes the user for a part of the bucket's name, huggingface_hub for one of the repository's."""
    with pytest.raises(FsdpckptError) as error:
        fsdpckpt.inspect(url)
    assert "hid" not in error.value.text
    assert "hid" not in json.dumps(error_json(error.value))


def test_a_repository_without_its_owner_is_no_internal_error() -> None:
    with pytest.raises(SourceError, match="namespace/name") as error:
        fsdpckpt.inspect("hf://gpt2")
    assert error.value.exit_code == 3
