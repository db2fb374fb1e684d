"""What a checkpoint that was opened holds, with the tensors' values: for comparing with what PyTorch says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from tests.materialise import gather

__all__ = ["Held", "held", "opened", "raw", "same_values"]


def opened(path: Path | str, *, locate: Locate = Locate.ALL) -> Checkpoint:
    with Sources() as sources:
        return open_checkpoint(str(path), sources=sources, locate=locate)


class Held(bytes):
    """The bytes of a tensor; equal to another only with the same dtype and shape."""

    form: tuple[str, tuple[int, ...]]

    def __new__(cls, data: bytes, dtype: str, shape: tuple[int, ...]) -> Held:
        self = super().__new__(cls, data)
        self.form = (dtype, shape)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.form == other.form and bytes.__eq__(self, other)

    __hash__ = bytes.__hash__

    def __repr__(self) -> str:
        return f"Held({self.form}, {self[:16].hex()})"


def raw(tensor: torch.Tensor) -> Held:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return Held(data, str(tensor.dtype)[6:], tuple(tensor.shape))


def held(value: Any, files: Any) -> Any:
    """``value`` with every tensor, PyTorch's or the IR's, as its bytes."""
    if isinstance(value, Tensor):
        return Held(np.ascontiguousarray(gather(value, _read(files))).tobytes(), value.dtype.name, value.shape)
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, dict):
        return {key: held(child, files) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(held(child, files) for child in value)
    return value


_CACHE: dict[tuple[str, ...], list[bytes]] = {}


def _read(files: Any) -> list[bytes]:
    key = tuple(file.path for file in files)
    if key not in _CACHE:
        _CACHE.clear()
        _CACHE[key] = [Path(file.path).read_bytes() for file in files]
    return _CACHE[key]


def same_values(checkpoint: Checkpoint, *, model: Any = None, optim: Any = None) -> None:
    """The sections are there exactly when expected, with equal keys and values."""
    _CACHE.clear()
    assert (checkpoint.model is not None, checkpoint.optim is not None) == (model is not None, optim is not None)
    if checkpoint.model is not None:
        assert held(dict(checkpoint.model.params), checkpoint.files) == held(dict(model), ())
    if checkpoint.optim is not None:
        found = {"state": checkpoint.optim.state, "param_groups": checkpoint.optim.param_groups}
        assert held(found, checkpoint.files) == held(
            {"state": optim["state"], "param_groups": optim["param_groups"]}, ()
        )
