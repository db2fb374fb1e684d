"""Presents a checkpoint as a mapping of names to tensors that are read on demand, whole or in slices, in any layout."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from heapq import nlargest
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar, overload

from fsdpckpt import flags
from fsdpckpt.credentials import without_credentials
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, require_torch
from fsdpckpt.ir import SectionName
from fsdpckpt.ir.buffers import undecided_copies
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import equal_at_start
from fsdpckpt.ir.placements import PerRank
from fsdpckpt.ir.tensors import Box, Boxes, Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.notebook import table
from fsdpckpt.text import plural, shape_text, size_text, truncate
from fsdpckpt.transform.selection import tensors_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from fsdpckpt.execute.read_check import ReadCheck
    from fsdpckpt.verify.blocks import ChunkReader

    TorchTensor: TypeAlias = torch.Tensor  # in a class with a method of this name

Index: TypeAlias = SupportsIndex | slice | EllipsisType
_Default = TypeVar("_Default")


class LazyTensor:
    """A tensor, or a slice of one, that is not read yet. ``dtype``: torch's name, such as ``"bfloat16"``.

    ``tensor[3:7, ..., 0]`` is a slice; reading it reads little more than its bytes. An index is an int, a slice with a
    step of 1 or more, or ``...``, as in numpy; negative indices count from the end. ``shape``: that of the slice.
    """

    def __init__(
        self,
        named: NamedTensor,
        checkpoint: Checkpoint,
        check: ReadCheck,
        index: tuple[range | int, ...] | None = None,
    ) -> None:
        self._named = named
        self._checkpoint = checkpoint
        self._check = check
        self._index = tuple(map(range, named.tensor.shape)) if index is None else index

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(indices) for indices in self._index if isinstance(indices, range))

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
        indices = _indexed(self._index, index if isinstance(index, tuple) else (index,))
        return LazyTensor(self._named, self._checkpoint, self._check, indices)

    def __iter__(self) -> Iterator[LazyTensor]:
        """The slices along the first dimension. Raises TypeError without any, as torch does."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return map(self.__getitem__, range(self.shape[0]))

    def numpy(self) -> npt.NDArray[np.generic]:
        """The elements, assembled from the chunks; bfloat16 and 8-bit floats as ``ml_dtypes``.

        Other types that numpy lacks are returned as raw bytes. Raises SourceIncompleteError if elements are missing,
        SourceCorruptError if bytes do not have their checksum (``fsdpckpt.open`` says which are compared).
        """
        from fsdpckpt.ir.dtypes import numpy_dtype

        return self._read().view(numpy_dtype(self._named.tensor.dtype)).reshape(self.shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.generic]:  # noqa: FBT001  # numpy's protocol
        import numpy as np

        return np.asarray(self.numpy(), dtype=dtype)

    def torch(self) -> torch.Tensor:
        """The elements as a torch tensor of their dtype, on the CPU. Imports torch.

        Raises as ``numpy``, and SourceUnsupportedError for a dtype that the installed torch lacks.
        """
        require_torch("LazyTensor.torch() needs")
        import torch

        dtype = torch_dtype(self._named.tensor.dtype, key=self._named.key, source=self._checkpoint.source)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self._read()).view(dtype).reshape(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> TorchTensor:
        """``torch()``, then ``torch.Tensor.to`` with these arguments: ``to("cuda")``, ``to(torch.bfloat16)``.

        On a GPU, the bytes go there through blocks of pinned memory: host memory never holds all of them.
        """
        require_torch("LazyTensor.to() needs")
        import torch

        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or device.type != "cuda" or not self.nbytes:
            return self.torch().to(*args, **kwargs)
        dtype = torch_dtype(self._named.tensor.dtype, key=self._named.key, source=self._checkpoint.source)
        moved = torch.empty(self._part().shape, dtype=dtype, device=device)
        self._fill(lambda reader: copy_blocks(reader, Box.whole(tuple(moved.shape)), moved))
        return moved.reshape(self.shape).to(*args, **kwargs)

    def _read(self) -> npt.NDArray[np.uint8]:
        """The row-major bytes of the elements."""
        import numpy as np

        part = self._part()
        elements = np.empty(part.nbytes, np.uint8)
        self._fill(lambda reader: reader.read_into(Box.whole(part.shape), elements))
        return elements

    def _part(self) -> Tensor:
        """The selected elements; a dimension of which one index is selected has length 1."""
        return _part_of(self._named.tensor, [range(at, at + 1) if isinstance(at, int) else at for at in self._index])

    def _fill(self, read: Callable[[ChunkReader], None]) -> None:
        """Call ``read`` with a reader of the selected elements, unless there are none, and compare checksums."""
        from fsdpckpt.verify.blocks import BlockReader, ChunkReader, require_whole

        require_whole(self._named.tensor)
        self._require_one_copy()
        part = self._part()
        if part.nbytes:
            reads = self._check.reading()
            read(ChunkReader(BlockReader(self._checkpoint.files, reads), part))
            reads.finish()

    def _require_one_copy(self) -> None:
        """Raises NeedsInformationError if ranks hold different copies, and nothing says that it is a buffer."""
        if not isinstance(self._named.tensor.cut, PerRank):
            return
        for problem in undecided_copies(self._checkpoint):
            if problem.section is self._named.section and problem.key == self._named.key:
                raise NeedsInformationError(
                    problem.message,
                    key=problem.key,
                    why="one rank's copy may be a part, or one of several",
                    next_step=f"open the file of one rank, or convert with {flags.buffers} if it is a buffer",
                )


def copy_blocks(chunks: ChunkReader, box: Box, target: torch.Tensor) -> None:
    """Read ``box`` into ``target``, wherever that is, one block after the other; each is copied once.

    Blocks for a GPU are pinned: the next one is read while the GPU takes them. What was copied is there on return.
    """
    import torch

    from fsdpckpt.verify.blocks import BLOCK_BYTES, slabs

    on_gpu = target.device.type == "cuda"
    for part in slabs(box.sizes, target.dtype.itemsize, BLOCK_BYTES):
        # torch gives pinned memory out again only when the copies from it are done.
        block = torch.empty(part.numel * target.dtype.itemsize, dtype=torch.uint8, pin_memory=on_gpu)
        offsets = tuple(begin + offset for begin, offset in zip(box.offsets, part.offsets, strict=True))
        chunks.read_into(Box(offsets, part.sizes), block.numpy())
        ranges = zip(part.offsets, part.sizes, strict=True)
        place = target[tuple(slice(begin, begin + count) for begin, count in ranges)]
        place.copy_(block.view(target.dtype).reshape(part.sizes), non_blocking=on_gpu)
    if on_gpu:
        torch.cuda.current_stream(target.device).synchronize()


def torch_dtype(dtype: DType, *, key: str, source: str) -> torch.dtype:
    """The dtype of the installed torch. Raises SourceUnsupportedError, which names ``key``, if torch lacks it."""
    import torch

    torch_type = getattr(torch, dtype.name, None)
    if not isinstance(torch_type, torch.dtype):
        raise SourceUnsupportedError(
            f"{source}: {key} is {dtype.name}, a dtype that torch {torch.__version__} does not have",
            key=key,
            next_step="load it with a newer torch",
        )
    return torch_type


def _part_of(tensor: Tensor, ranges: Sequence[range]) -> Tensor:
    """The elements of ``tensor`` at ``ranges``, one for each dimension, as a tensor: the same bytes in other chunks."""
    import numpy as np

    first = np.asarray([indices.start for indices in ranges], np.int64)
    step = np.asarray([indices.step for indices in ranges], np.int64)
    count = np.asarray(list(map(len, ranges)), np.int64)
    chunks = tensor.chunks
    begin = np.clip(-((first - chunks.start) // step), 0, count)
    end = np.clip(-((first - chunks.start - chunks.size) // step), 0, count)
    moved = ((first + begin * step - chunks.start) * chunks.stride).sum(axis=1)
    part = replace(
        chunks,
        boxes=Boxes(begin, np.maximum(end - begin, 0), chunks.stride * step),
        offset=chunks.offset + moved * tensor.dtype.itemsize,
    )
    return Tensor(tensor.dtype, tuple(map(len, ranges)), part)


def _indexed(current: Sequence[range | int], indices: tuple[Index, ...]) -> tuple[range | int, ...]:
    """``current`` after ``indices``, which apply by numpy's rules to the dimensions that no int has dropped."""
    ndim = sum(isinstance(selected, range) for selected in current)
    dots = [number for number, index in enumerate(indices) if index is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(indices) - len(dots) > ndim:
        raise IndexError(f"too many indices for a tensor of {plural(ndim, 'dimension')}: {len(indices) - len(dots)}")
    rest = [slice(None)] * (ndim - len(indices) + len(dots))
    first, last = (indices[: dots[0]], indices[dots[0] + 1 :]) if dots else (indices, ())
    remaining = enumerate([*first, *rest, *last])
    return tuple(_at(selected, *next(remaining)) if isinstance(selected, range) else selected for selected in current)


def _at(current: range, dim: int, index: Index) -> range | int:
    """What ``index`` selects of ``current``, the indices of dimension ``dim``."""
    if isinstance(index, slice):
        _, _, step = index.indices(len(current))
        if step < 1:
            raise ValueError(f"the step of a slice must be 1 or more, not {step}")
        return current[index]
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(
            f"an index of a lazy tensor is an int, a slice or ..., not {truncate(index)}; "
            "read the tensor with numpy() or torch() to index it otherwise"
        )
    number = operator.index(index)  # type: ignore[arg-type]  # it has __index__
    if not -len(current) <= number < len(current):
        raise IndexError(f"index {number} is out of bounds for dimension {dim} with size {len(current)}")
    return current[number]


class LazyCheckpoint(Mapping[str, LazyTensor]):
    """Dotted key -> tensor. A key in two sections is the model's; ``section(...)`` selects one section.

    Use it in a ``with`` block, or call ``close()``. ``checkpoint``: the description it is made of. ``check``: opens its
    files and compares what is read.
    """

    def __init__(self, checkpoint: Checkpoint, check: ReadCheck, section: Section | SectionName | None = None) -> None:
        self.checkpoint = checkpoint
        self._check = check
        self._tensors: dict[str, NamedTensor] = {}
        for named in tensors_of(checkpoint, section):
            self._tensors.setdefault(named.key, named)

    def __getitem__(self, key: str) -> LazyTensor:
        """Raises KeyError with the nearest keys."""
        named = self._tensors.get(key)
        if named is None:
            source = without_credentials(self.checkpoint.source)
            raise KeyError(f"{source} has no tensor {truncate(key)}{_nearest(key, self._tensors)}")
        return LazyTensor(named, self.checkpoint, self._check)

    @overload
    def get(self, key: str, default: None = None, /) -> LazyTensor | None: ...
    @overload
    def get(self, key: str, default: LazyTensor | _Default, /) -> LazyTensor | _Default: ...
    def get(self, key: str, default: object = None, /) -> object:
        """The tensor, or ``default``; unlike ``[]`` it does not search for the nearest keys."""
        return self[key] if key in self._tensors else default

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<{self._heading()}>"

    def _ipython_key_completions_(self) -> list[str]:
        """What ``checkpoint["<TAB>`` offers in IPython and notebooks."""
        return list(self._tensors)

    def _repr_html_(self) -> str:
        """For notebooks: a table of the tensors."""
        rows = (
            (key, each.section, each.tensor.dtype.name, shape_text(each.tensor.shape), size_text(each.tensor.nbytes))
            for key, each in self._tensors.items()
        )
        return table(self._heading(), ("key", "section", "dtype", "shape", "size"), rows, len(self))

    def _heading(self) -> str:
        size = size_text(sum(named.tensor.nbytes for named in self._tensors.values()))
        form = f"{self.checkpoint.layout}, {self.checkpoint.container}"
        return f"{without_credentials(self.checkpoint.source)}: {form}, {plural(len(self), 'tensor')}, {size}"

    def section(self, name: str) -> LazyCheckpoint:
        """Only ``"model"``, ``"optim"``, ``"extra"``, or one of several: ``"model:critic"``."""
        if ":" not in name:
            return LazyCheckpoint(self.checkpoint, self._check, Section(name))
        return LazyCheckpoint(self.checkpoint, self._check, SectionName(name))

    @property
    def param_groups(self) -> list[dict[Key, Value]]:
        """The optimizer's param groups as saved; empty if there are none."""
        optim = self.checkpoint.optim
        return [dict(group) for group in optim.param_groups or []] if optim is not None else []

    def close(self) -> None:
        self._check.sources.__exit__()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_COMPARED = 100  # keys that are compared with a missing one character by character


def _nearest(key: object, keys: Mapping[str, object]) -> str:
    """Up to three keys that may be meant: with another prefix, or spelt similarly."""
    if not isinstance(key, str):
        return ""
    nearest = [
        existing
        for existing in keys
        if existing.endswith(f".{key}") or key.endswith(f".{existing}") or existing.startswith(f"{key}.")
    ][:3]
    if not nearest:

        def likeness(existing: str) -> int:
            return equal_at_start(existing, key) + equal_at_start(reversed(existing), reversed(key))

        nearest = get_close_matches(key, nlargest(_COMPARED, keys, key=likeness), n=3)
    return f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else ""
