"""Presents a checkpoint as a mapping of names to tensors that are read on demand, whole or in slices, in any layout."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from itertools import product
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from fsdpckpt.errors import require_torch
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.tensors import Box
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, shape_text, size_text, truncate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    TorchTensor: TypeAlias = torch.Tensor  # in a class with a method of this name

Index: TypeAlias = SupportsIndex | slice | EllipsisType

READ_THROUGH = (
    64 * 1024
)  # bytes between two indices of a stepped slice: reading a smaller gap costs less than another request
SHOWN = 100  # tensors in a notebook's table


@dataclass(frozen=True, slots=True)
class _Span:
    """The indices ``first``, ``first + step``, ... of one dimension. ``dropped``: an int chose a single one."""

    first: int
    count: int
    step: int = 1
    dropped: bool = False

    @property
    def stop(self) -> int:
        return self.first + (self.count - 1) * self.step + 1 if self.count else self.first


class LazyTensor:
    """A tensor, or a slice of one, that is not read yet. ``dtype``: torch's name, such as ``"bfloat16"``.

    ``tensor[3:7, ..., 0]`` is a slice; reading it reads only its bytes. An index is an int, a slice with a step of 1 or
    more, or ``...``, as in numpy; negative indices count from the end. ``shape``: that of the slice.
    """

    def __init__(
        self, named: NamedTensor, checkpoint: Checkpoint, sources: Sources, spans: tuple[_Span, ...] | None = None
    ) -> None:
        self._named = named
        self._checkpoint = checkpoint
        self._sources = sources
        self._spans = tuple(_Span(0, size) for size in named.tensor.shape) if spans is None else spans

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.count for span in self._spans if not span.dropped)

    @property
    def dtype(self) -> str:
        return self._named.tensor.dtype.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self._named.tensor.dtype.itemsize

    @property
    def section(self) -> str:
        return str(self._named.section)

    @property
    def placement(self) -> str:
        """How the source stores the whole tensor, in PyTorch's terms: ``[Shard(0)]``."""
        return self._named.tensor.placement

    def __repr__(self) -> str:
        return f"LazyTensor({self._named.key!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> LazyTensor:
        """The slice, still unread. Raises IndexError as numpy does, TypeError for an index of another kind."""
        spans = _indexed(self._spans, index if isinstance(index, tuple) else (index,))
        return LazyTensor(self._named, self._checkpoint, self._sources, spans)

    def numpy(self) -> npt.NDArray[np.generic]:
        """The elements, assembled from the chunks; bfloat16 and 8-bit floats as ``ml_dtypes``.

        Other types that numpy lacks are returned as raw bytes. Raises SourceIncompleteError if elements are missing.
        """
        from fsdpckpt.ir.dtypes import numpy_dtype

        return self._read().view(numpy_dtype(self._named.tensor.dtype)).reshape(self.shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:  # noqa: FBT001  # numpy's protocol
        import numpy as np

        return np.asarray(self.numpy(), dtype=dtype)

    def torch(self) -> torch.Tensor:
        """The elements as a torch tensor of their dtype, on the CPU. Imports torch. Raises as ``numpy``."""
        require_torch("LazyTensor.torch() needs")
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self._read()).view(dtype).reshape(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> TorchTensor:
        """``torch()``, then ``torch.Tensor.to`` with these arguments: ``to("cuda")``, ``to(torch.bfloat16)``."""
        return self.torch().to(*args, **kwargs)

    def _read(self) -> npt.NDArray[np.uint8]:
        """The row-major bytes of the elements."""
        import numpy as np

        from fsdpckpt.verify.blocks import BlockReader

        tensor = self._named.tensor
        chunks = BlockReader(self._checkpoint.files, self._sources).boxes(tensor)
        counts = tuple(span.count for span in self._spans)
        elements = np.empty((*counts, tensor.dtype.itemsize), np.uint8)
        apart = [
            _reads_apart(span, tensor.shape[at + 1 :], tensor.dtype.itemsize) for at, span in enumerate(self._spans)
        ]
        choices = (range(span.count) if alone else [None] for span, alone in zip(self._spans, apart, strict=True))
        for chosen in product(*choices):
            spans = [
                span if number is None else _Span(span.first + number * span.step, 1)
                for span, number in zip(self._spans, chosen, strict=True)
            ]
            target = elements[tuple(slice(None) if at is None else slice(at, at + 1) for at in chosen)]
            box = Box(tuple(span.first for span in spans), tuple(span.stop - span.first for span in spans))
            if box.sizes == target.shape[:-1] and target.flags.c_contiguous:
                chunks.read_into(box, target.reshape(-1))
            else:
                around = np.empty((*box.sizes, tensor.dtype.itemsize), np.uint8)
                chunks.read_into(box, around.reshape(-1))
                target[...] = around[tuple(slice(None, None, span.step) for span in spans)]
        return elements.reshape(-1)


def _reads_apart(span: _Span, inner: tuple[int, ...], itemsize: int) -> bool:
    """Whether the gaps between the indices of a dimension are worth a separate request for each index."""
    return span.count > 1 and (span.step - 1) * prod(inner) * itemsize > READ_THROUGH


def _indexed(spans: tuple[_Span, ...], indices: tuple[Index, ...]) -> tuple[_Span, ...]:
    """``spans`` after ``indices``, which apply by numpy's rules to the dimensions that no int has dropped."""
    ndim = sum(not span.dropped for span in spans)
    dots = [number for number, index in enumerate(indices) if index is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(indices) - len(dots) > ndim:
        raise IndexError(f"too many indices for a tensor of {plural(ndim, 'dimension')}: {len(indices) - len(dots)}")
    rest = [slice(None)] * (ndim - len(indices) + len(dots))
    first, last = (indices[: dots[0]], indices[dots[0] + 1 :]) if dots else (indices, ())
    left = iter([*first, *rest, *last])
    shown = iter(range(ndim))
    return tuple(span if span.dropped else _sliced(span, next(left), next(shown)) for span in spans)


def _sliced(span: _Span, index: Index, dim: int) -> _Span:
    if isinstance(index, slice):
        begin, stop, step = index.indices(span.count)
        if step < 1:
            raise ValueError(f"the step of a slice must be 1 or more, not {step}")
        return _Span(span.first + begin * span.step, len(range(begin, stop, step)), span.step * step)
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(
            f"an index of a lazy tensor is an int, a slice or ..., not {truncate(index)}; "
            "read the tensor with numpy() or torch() to index it otherwise"
        )
    at = operator.index(index)  # type: ignore[arg-type]  # it has __index__
    if not -span.count <= at < span.count:
        raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {span.count}")
    return _Span(span.first + (at % span.count) * span.step, 1, dropped=True)


class LazyCheckpoint(Mapping[str, LazyTensor]):
    """Dotted key -> tensor. A key in two sections is the model's; ``section(...)`` selects one section.

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
        """Raises KeyError with the nearest keys."""
        named = self._tensors.get(key)
        if named is None:
            raise KeyError(f"{self.checkpoint.source} has no tensor {truncate(key)}{_nearest(key, self._tensors)}")
        return LazyTensor(named, self.checkpoint, self._sources)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<{self._heading()}>"

    def _repr_html_(self) -> str:
        """For notebooks: a table of the tensors."""
        rows = [
            (
                key,
                named.section,
                named.tensor.dtype.name,
                shape_text(named.tensor.shape),
                size_text(named.tensor.nbytes),
            )
            for key, named in list(self._tensors.items())[:SHOWN]
        ]
        cells = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
        more = f"<p>and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        heads = "".join(f"<th>{head}</th>" for head in ("key", "section", "dtype", "shape", "size"))
        return f"<p>{escape(self._heading())}</p><table><tr>{heads}</tr>{cells}</table>{more}"

    def _heading(self) -> str:
        size = size_text(sum(named.tensor.nbytes for named in self._tensors.values()))
        form = f"{self.checkpoint.layout}, {self.checkpoint.container}"
        return f"{self.checkpoint.source}: {form}, {plural(len(self), 'tensor')}, {size}"

    def section(self, name: str) -> LazyCheckpoint:
        """Only ``"model"``, ``"optim"`` or ``"extra"``."""
        return LazyCheckpoint(self.checkpoint, self._sources, Section(name))

    @property
    def param_groups(self) -> list[dict[Key, Value]]:
        """The optimizer's param groups as saved; empty if there are none."""
        optim = self.checkpoint.optim
        return [dict(group) for group in optim.param_groups or []] if optim is not None else []

    def close(self) -> None:
        self._sources.__exit__()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nearest(key: object, keys: Mapping[str, object]) -> str:
    """Up to three keys that may be meant: with another prefix, or spelt similarly."""
    if not isinstance(key, str):
        return ""
    nearest = [
        name for name in keys if name.endswith(f".{key}") or key.endswith(f".{name}") or name.startswith(f"{key}.")
    ]
    nearest = nearest[:3] or get_close_matches(key, keys, n=3)
    return f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else ""
