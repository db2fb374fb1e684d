"""Presents a checkpoint as a mapping of names to tensors that are read on demand, whole, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fsdpckpt.errors import require_torch
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.storage.sources import Sources

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["LazyCheckpoint", "LazyTensor"]


class LazyTensor:
    """A tensor that is not read yet. ``shape``: the global shape; ``dtype``: torch's name, such as ``"bfloat16"``."""

    def __init__(self, named: NamedTensor, checkpoint: Checkpoint, sources: Sources) -> None:
        self._named = named
        self._checkpoint = checkpoint
        self._sources = sources

    @property
    def shape(self) -> tuple[int, ...]:
        return self._named.tensor.shape

    @property
    def dtype(self) -> str:
        return self._named.tensor.dtype.name

    @property
    def nbytes(self) -> int:
        return self._named.tensor.nbytes

    @property
    def section(self) -> str:
        return str(self._named.section)

    @property
    def placement(self) -> str:
        """How the source stores it, in PyTorch's terms: ``[Shard(0)]``."""
        return self._named.tensor.placement

    def __repr__(self) -> str:
        return f"LazyTensor({self._named.key!r}, {self.dtype}, {list(self.shape)})"

    def numpy(self) -> npt.NDArray[np.generic]:
        """The whole tensor, assembled from its chunks; bfloat16 and 8-bit floats as ``ml_dtypes``.

        Other types numpy lacks come as raw bytes. Raises SourceIncompleteError when elements are missing.
        """
        from fsdpckpt.ir.dtypes import numpy_dtype

        return self._read().view(numpy_dtype(self._named.tensor.dtype)).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """The whole tensor as a torch tensor of its dtype. Imports torch. Raises as ``numpy``."""
        require_torch("LazyTensor.torch() needs")
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self._named.tensor.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self._read()).view(dtype).reshape(self.shape)

    def _read(self) -> npt.NDArray[np.uint8]:
        import numpy as np

        from fsdpckpt.verify.blocks import BlockReader

        whole = np.empty(self._named.tensor.nbytes, np.uint8)
        done = 0
        for block in BlockReader(self._checkpoint.files, self._sources).blocks(self._named.tensor):
            whole[done : done + len(block)] = block
            done += len(block)
        return whole


class LazyCheckpoint(Mapping[str, LazyTensor]):
    """Dotted key -> tensor. Of a key in two sections the model's is meant; ``section(...)`` selects one section.

    Use it in a ``with`` block, or call ``close()``. ``checkpoint``: the description it is made of.
    """

    def __init__(self, checkpoint: Checkpoint, sources: Sources, section: Section | None = None) -> None:
        self.checkpoint = checkpoint
        self._sources = sources
        self._tensors: dict[str, NamedTensor] = {}
        for named in checkpoint.tensors():
            if section is None or named.section is section:
                self._tensors.setdefault(named.key, named)

    def __getitem__(self, key: str) -> LazyTensor:
        return LazyTensor(self._tensors[key], self.checkpoint, self._sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def section(self, name: str) -> LazyCheckpoint:
        """Only ``"model"``, ``"optim"`` or ``"extra"``."""
        return LazyCheckpoint(self.checkpoint, self._sources, Section(name))

    @property
    def param_groups(self) -> list[dict[Key, Value]]:
        """The optimizer's param groups as saved; empty when there are none."""
        optim = self.checkpoint.optim
        return [dict(group) for group in optim.param_groups or []] if optim is not None else []

    def close(self) -> None:
        self._sources.__exit__()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
