"""Back references that a pickle may hold, and that would keep every walk busy for ever."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.pickle.check import MAX_DEPTH, check_expansion
from fsdpckpt.formats.torch import read_archive
from fsdpckpt.storage.local import LocalFile


def _archive(path: Path, pickled: bytes) -> LocalFile:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
    return LocalFile(str(path))


def test_ten_of_ten_of_ten_is_refused_at_once(tmp_path: Path) -> None:
    value: dict[str, object] = {"a": 1}
    for _ in range(40):
        value = {f"x{n}": value for n in range(10)}
    with pytest.raises(SourceCorruptError, match="never end"):
        read_archive(_archive(tmp_path / "laughs.pt", pickle.dumps(value, 2)), 0)


def test_a_dict_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceCorruptError, match="contains itself"):
        read_archive(_archive(tmp_path / "itself.pt", b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."), 0)


def test_a_chain_whose_links_were_all_seen_before_is_too_deep() -> None:
    links: list[object] = [["end"]]
    for _ in range(5000):
        links.append([links[-1]])
    with pytest.raises(SourceCorruptError, match="200 deep"):
        check_expansion(links, "chain.pt")  # type: ignore[arg-type]


def with_attribute(value: object) -> object:
    """PyTorch's ``_metadata`` is one of a state dict."""
    found = OrderedDict(a=1)
    found._metadata = value  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "around",
    [lambda value: [value], lambda value: {"a": value}, lambda value: {value: 1}, with_attribute],
    ids=["list", "dict", "key", "attribute"],
)
def test_values_are_as_deep_as_what_is_deepest_in_them(around: Callable[[object], Any]) -> None:
    value: tuple[object, ...] = ("end",)
    for _ in range(MAX_DEPTH - 2):
        value = (value,)
    check_expansion(around(value), "deep.pt")
    with pytest.raises(SourceCorruptError, match="200 deep"):
        check_expansion(around((value,)), "deep.pt")


def test_honest_sharing_and_large_lists_pass() -> None:
    shared = {"betas": (0.9, 0.95), "params": list(range(100_000))}
    check_expansion({"a": shared, "b": [shared] * 3, "indices": list(range(3_000_000))}, "honest.pt")  # type: ignore[dict-item]
