"""What ``torch.save`` writes, read back by this package: helpers of the container tests."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from fsdpckpt.formats.torch import load_torch
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.local import MemoryFile
from tests.materialise import gather
from tests.readers.contents import Held, held

__all__ = ["any_values", "loaded", "rewritten", "same", "saved"]

INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)


def any_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor (of bool: random truths), so that every bit of every element counts."""
    generator = torch.Generator().manual_seed(seed + 1)
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def loaded(data: bytes) -> Any:
    return load_torch(MemoryFile(data, "it.pt"), 0)[0]


def same(value: Any) -> Any:
    """Save ``value``, read it, and compare; returns what was read."""
    data = saved(value)
    found = loaded(data)
    assert _comparable(found, data) == held(value, ())
    return found


def _comparable(value: Any, data: bytes) -> Any:

    if isinstance(value, Tensor):
        return Held(gather(value, [data]).tobytes(), value.dtype.name, value.shape)
    if isinstance(value, dict):
        return {key: _comparable(child, data) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_comparable(child, data) for child in value)
    return value


def rewritten(data: bytes | Path, changes: dict[str, bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with some records (by name without folder) replaced, None: left out, by Python's own zip writer."""
    stream = io.BytesIO()
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(stream, "w", method) as new:
        names = old.namelist()
        stem = names[0].partition("/")[0]
        for name in names:
            content = changes.get(name.partition("/")[2], old.read(name))
            if content is not None:
                new.writestr(name, content)
        for name, content in changes.items():
            if f"{stem}/{name}" not in names and content is not None:
                new.writestr(f"{stem}/{name}", content)
    return stream.getvalue()
