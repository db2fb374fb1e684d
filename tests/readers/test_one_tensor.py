"""Archives that are only compared with one that was parsed are read as if they had been parsed."""

from __future__ import annotations

import random
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.torch import TorchArchive, open_archive, parse_archive, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.readers.deepspeed.universal import Forms
from fsdpckpt.storage.local import LocalFile

KIND = "exp_avg"


def saved(path: Path, value: Any) -> LocalFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return LocalFile(str(path))


def contents(archive: TorchArchive) -> object:
    values = archive.root if isinstance(archive.root, dict) else {"": archive.root}
    sums = archive.checksums
    return (
        {
            key: tuple(getattr(value, name) for name in value.__slots__) if isinstance(value, StoredTensor) else value
            for key, value in values.items()
        },
        [column.tolist() for column in (sums.file, sums.offset, sums.nbytes, sums.crc)],
        astuple(archive)[3:],
    )


def remembered(source: LocalFile) -> Forms:
    forms = Forms()
    opened = open_archive(source)
    forms.remember(opened, parse_archive(opened, 0), KIND)
    return forms


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"param": torch.randn(3, 5), "cat_dim": 0},
        lambda: torch.randn(7).bfloat16(),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(9, 2)[3:],
        lambda: {"param": torch.randn(0, 3)},
    ],
)
@pytest.mark.parametrize("sums", [True, False])
def test_what_is_read_is_what_would_be_parsed(make: Any, sums: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        first, second = (saved(tmp_path / name / "exp_avg.pt", make()) for name in "ab")
    finally:
        torch.serialization.set_crc32_options(True)
    forms = remembered(first)
    for number, source in enumerate((second, first), 5):
        found = forms.match(source, number, KIND)
        assert found is not None
        assert contents(found) == contents(read_archive(source, number))
        values = found.root.values() if isinstance(found.root, dict) else [found.root]
        for value in values:  # of which the caller may change the shape
            if isinstance(value, StoredTensor):
                value.shape = (1,)


@pytest.mark.parametrize(
    "value",
    [
        {"param": torch.randn(5, 3), "cat_dim": 0},
        {"param": torch.randn(3, 5), "cat_dim": 1},
        {"param": torch.randn(3, 5), "cat_dam": 0},
        {"param": torch.randn(15), "cat_dim": 0},
        {"param": torch.ones(3, 5, dtype=torch.int32), "cat_dim": 0},
    ],
)
def test_another_form_is_not_taken_for_it(value: Any, tmp_path: Path) -> None:
    forms = remembered(saved(tmp_path / "a" / "exp_avg.pt", {"param": torch.randn(3, 5), "cat_dim": 0}))
    source = saved(tmp_path / "b" / "exp_avg.pt", value)
    assert forms.match(source, 1, KIND) is None
    assert (
        forms.match(saved(tmp_path / "c" / "exp_avg.pt", {"param": torch.randn(3, 5), "cat_dim": 0}), 1, "fp32") is None
    )


@pytest.mark.parametrize("value", [{"one": torch.ones(2), "two": torch.ones(2)}, {"a": [torch.ones(2)]}, {"a": {}}])
def test_what_has_more_than_a_tensor_is_always_parsed(value: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "exp_avg.pt", value)
    assert remembered(source).match(source, 0, KIND) is None


def test_every_flipped_bit_is_seen_or_changes_nothing(tmp_path: Path) -> None:
    """But for those of the data, which its checksum tells, and of records that nothing reads."""
    source = saved(tmp_path / "a" / "exp_avg.pt", {"param": torch.randn(3, 5), "cat_dim": 0})
    forms, data = remembered(source), Path(source.path).read_bytes()
    whole = read_archive(source, 0)
    generator = random.Random(3)
    path = tmp_path / "b" / "exp_avg.pt"
    path.parent.mkdir()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
        damaged = LocalFile(str(path))
        found = forms.match(damaged, 0, KIND)
        if found is None:
            continue
        assert contents(found)[::2] == contents(whole)[::2], at  # type: ignore[index]
        try:  # the header of a record behind the data, which no tensor is in, may be damaged
            parsed = read_archive(damaged, 0)
        except FsdpckptError:
            parsed = whole
        assert found.checksums.crc.tolist() == parsed.checksums.crc.tolist(), at
