"""Archives with the pickle of one that was parsed are read as if they had been parsed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.torch import TorchArchive, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.readers.deepspeed.universal import ArchiveCache
from fsdpckpt.storage.local import LocalFile


def saved(path: Path, value: Any) -> LocalFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return LocalFile(str(path))


def plain(value: Any) -> object:
    if isinstance(value, StoredTensor):
        return tuple(getattr(value, name) for name in value.__slots__)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def contents(archive: TorchArchive) -> object:
    sums = archive.checksums
    columns = [column.tolist() for column in (sums.file, sums.offset, sums.nbytes, sums.crc)]
    rest = tuple(getattr(archive, name) for name in archive.__slots__ if name not in ("root", "checksums"))
    return plain(archive.root), columns, rest


def same(cache: ArchiveCache, source: LocalFile, number: int) -> None:
    """The cache reads what is parsed, or refuses it in the same words."""
    try:
        expected: object = contents(read_archive(source, number))
    except FsdpckptError as error:
        expected = error.what
    try:
        found: object = contents(cache.read(source, number))
    except FsdpckptError as error:
        found = error.what
    assert found == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"param": torch.randn(3, 5), "cat_dim": 0},
        lambda: torch.randn(7).bfloat16(),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(9, 2)[3:],
        lambda: {"param": torch.randn(0, 3)},
        lambda: 3,
        lambda: {"one": torch.ones(2), "two": torch.ones(2)},
        lambda: {"a": [torch.ones(2)]},
        lambda: {"a": {}},
    ],
)
@pytest.mark.parametrize("sums", [True, False])
def test_what_is_read_is_what_would_be_parsed(make: Any, sums: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        sources = [saved(tmp_path / name / f"{'exp_avg' * length}.pt", make()) for length, name in enumerate("ab", 1)]
    finally:
        torch.serialization.set_crc32_options(True)
    cache = ArchiveCache()
    for number, source in enumerate([*sources, *sources], 5):
        same(cache, source, number)
        root = cache.read(source, number).root
        for value in root.values() if isinstance(root, dict) else [root]:  # of which the caller may change the shape
            if isinstance(value, StoredTensor):
                value.shape = (1,)


def test_other_contents_are_not_taken_for_it(tmp_path: Path) -> None:
    values = [
        {"param": torch.randn(3, 5), "cat_dim": 0},
        {"param": torch.randn(5, 3), "cat_dim": 0},
        {"param": torch.randn(3, 5), "cat_dim": 1},
        {"param": torch.randn(3, 5), "cat_dam": 0},
        {"param": torch.randn(15), "cat_dim": 0},
        {"param": torch.ones(3, 5, dtype=torch.int32), "cat_dim": 0},
    ]
    cache = ArchiveCache()
    for number, value in enumerate(values):
        same(cache, saved(tmp_path / str(number) / "exp_avg.pt", value), number)


def test_every_flipped_bit_is_seen_as_by_parsing(tmp_path: Path) -> None:
    source = saved(tmp_path / "a" / "exp_avg.pt", {"param": torch.randn(3, 5), "cat_dim": 0})
    cache, data = ArchiveCache(), Path(source.path).read_bytes()
    same(cache, source, 0)
    generator = random.Random(3)
    path = tmp_path / "b" / "exp_avg.pt"
    path.parent.mkdir()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
        same(cache, LocalFile(str(path)), 0)
