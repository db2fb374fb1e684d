"""URLs of a store with names that a disk does not have: refused, with the URL that is probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import UsageError


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
    monkeypatch.setattr("fsdpckpt.converters.output.streamed.filesystem_of", None)
    torch.save({"w": torch.ones(2)}, tmp_path / "source.pt")
    with pytest.raises(UsageError, match="name in it") as error:
        fsdpckpt.convert(tmp_path / "source.pt", url, to="full", container="torch")
    assert error.value.next_step == f"give {meant}"
