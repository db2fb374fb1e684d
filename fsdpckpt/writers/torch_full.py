"""Lays out one torch file with every tensor whole: the sections and extras in one dict, or one section's dict itself.

Each tensor gets a compact storage, unless the source shares memory: tied tensors (the same range of the same file) get
one storage, partially overlapping views one that covers them all. ``torch.save`` writes the whole storage behind a
view; a compact one loads equally and holds no byte twice.
"""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fsdpckpt.formats.pickle.opcodes import StorageView, integer, integers
from fsdpckpt.formats.pickle.write import PickleWriter, TensorHook
from fsdpckpt.formats.torch.loadable import ARRAY, Array, array_of, encode_stand_in, is_class, is_loadable
from fsdpckpt.formats.zip_write import Records
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.sections import model_dict, optimizer_dict
from fsdpckpt.ir.targets import Target, TargetFile, WrittenTensor
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor, contiguous_stride, ranges_of, spans_of
from fsdpckpt.ir.values import Global, Object, Value, leaf_tensors, walk
from fsdpckpt.producers import PathKey
from fsdpckpt.text import some_of
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_one, nested


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """One file at ``spec.path``: a dict of the sections, each at its path in ``spec.section_paths``, and the extras.

    Tensors that share memory in the source's model section or extras share it in the target. States never do.
    """
    if checkpoint.optim is not None:
        checkpoint = replace(checkpoint, optim=_with_own_states(checkpoint.optim))
    casts, notes = spec.dtypes.casts(checkpoint)
    extra, dropped = extras_of_one(checkpoint)
    sections: list[tuple[tuple[PathKey, ...], Value]] = []
    if checkpoint.model is not None:
        sections.append((spec.section_paths[Section.MODEL].keys, model_dict(checkpoint.model)))
    if checkpoint.optim is not None:
        sections.append((spec.section_paths[Section.OPTIM].keys, optimizer_dict(checkpoint.optim)))
    if len(sections) == 1 and not extra and (spec.unwrap or not sections[0][0]):
        value = sections[0][1]
    else:
        value = nested([*sections, ((), extra)])
    file = TargetFile(spec.path)
    notes += dropped
    may_share = [tensor for _, tensor in leaf_tensors(extra)]
    if checkpoint.model is not None:
        may_share += [tensor for tensor in checkpoint.model.params.values() if isinstance(tensor, Tensor)]
    notes += lay_out_file(file, value, casts=casts, may_share=may_share, loadable=spec.default_loadable)
    stand_ins = tuple(str(key) for key, item in extra.items() if not is_loadable(item))
    if stand_ins and spec.default_loadable:
        message = (
            "NumPy arrays and values of classes are written as tensors and text, so that torch.load takes the file by "
            f"default; fsdpckpt reads them back as they were: {', '.join(stand_ins)}"
        )
        notes.append(Note("encoded", message, keys=stand_ins))
    return Target([file], notes=notes)


def _with_own_states(optim: Optimizer) -> Optimizer:
    """``optim`` with a tensor for each state, as optimizers change them in place: a step that several parameters have
    in one storage is counted once for each of them.
    """
    seen: set[Tensor] = set()

    def own(tensor: Tensor) -> Tensor:
        first = tensor not in seen
        seen.add(tensor)
        return tensor if first else replace(tensor)

    return optim.map_tensors(own)


def lay_out_file(
    file: TargetFile,
    value: Value,
    *,
    casts: Mapping[Tensor, DType],
    may_share: Sequence[Tensor] = (),
    stem: str | None = None,
    loadable: bool = False,
) -> list[Note]:
    """Append one ``torch.save`` archive of ``value`` to ``file``; tensors among ``may_share`` that share memory in the
    source share a record.

    ``loadable``: see ``WriteSpec.default_loadable``.
    """
    shared, notes = shared_views(may_share, casts)
    records = Records()
    storages = Storages(casts, shared, records)
    if stem is None:
        stem = posixpath.splitext(posixpath.basename(file.path))[0] or "archive"
    pickle = LoadablePickle(storages, records.add) if loadable else PickleWriter(storages)
    pickle.value(value)
    records.write(file, pickle.finish(), stem=stem)
    return [*notes, _numbers_note(value)] if isinstance(pickle, LoadablePickle) and pickle.numbers else notes


def _numbers_note(value: Value) -> Note:
    keys: dict[str, None] = {}  # of what holds them: a key may be one, too
    for path, leaf in walk(value):
        first = next((at for at, step in enumerate((*path, leaf)) if _has_number(step)), None)
        if first is not None:
            keys[".".join(map(str, path[:first]))] = None
    message = (
        "NumPy numbers are written as Python numbers of the same value, which optimizers and torch.load take: "
        f"{some_of(list(keys), 8)}. A float16 or float32 computes with more digits from then on"
    )
    return Note("encoded", message, keys=tuple(keys))


def _has_number(value: Value) -> bool:
    if isinstance(value, (tuple, set)):
        return any(map(_has_number, value))
    return isinstance(value, Object) and value.number is not None


@lru_cache(maxsize=1 << 10)
def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The order (slowest dimension first, None for row-major) and strides that a compact copy keeps.

    A dense tensor whose dimensions are permuted in memory (transposed, channels_last) keeps its order; any other
    becomes row-major.
    """
    row_major = contiguous_stride(shape)
    if stride == row_major or 0 in shape:
        return None, row_major
    longer = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])
    order = (*(d for d in range(len(shape)) if shape[d] == 1), *longer)
    compact = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        compact[dim] = step
        step *= shape[dim]
    dense = all(compact[d] == stride[d] for d in longer)
    if not dense or longer == sorted(longer):
        return None, row_major
    return order, tuple(compact)


@dataclass(slots=True, eq=False)
class _Shared:
    """One record that several tensors view. ``key``: assigned on first use."""

    content: WrittenTensor
    key: str | None = None


@dataclass(frozen=True, slots=True)
class _SharedView:
    record: _Shared
    offset: int
    stride: tuple[int, ...]


class Storages:
    """The tensor hook of one torch file's pickle: adds a record for each tensor, or for several that share memory."""

    def __init__(self, casts: Mapping[Tensor, DType], shared: Mapping[Tensor, _SharedView], records: Records) -> None:
        self._casts = casts
        self._shared = shared
        self._records = records
        self._keys: dict[Tensor, str] = {}  # of the records that are not shared
        self._orders: dict[tuple[Boxes, tuple[int, ...]], tuple[tuple[int, ...] | None, tuple[int, ...]]] = {}

    def __call__(self, tensor: Tensor) -> StorageView:
        shared = self._shared.get(tensor)
        if shared is not None:
            return self._view(tensor, shared)
        alike = (tensor.chunks.boxes, tensor.shape)
        order_and_stride = self._orders.get(alike)
        if order_and_stride is None:
            order_and_stride = self._orders[alike] = memory_order_of(tensor)
        order, stride = order_and_stride
        dtype = self._casts.get(tensor, tensor.dtype)
        key = self._keys.get(tensor)
        if key is None:
            key = self._keys[tensor] = self._records.add(WrittenTensor(tensor, dtype, order))
        return StorageView(key, dtype, 0, tensor.shape, stride, tensor.numel * dtype.itemsize)

    def _view(self, tensor: Tensor, shared: _SharedView) -> StorageView:
        record = shared.record
        if record.key is None:
            record.key = self._records.add(record.content)
        dtype = record.content.dtype
        return StorageView(record.key, dtype, shared.offset, tensor.shape, shared.stride, record.content.nbytes)


def memory_order_of(tensor: Tensor) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """``memory_order`` of a tensor: only a tensor of a single chunk has an order to keep."""
    chunks = tensor.chunks
    if len(tensor.shape) < 2 or len(chunks.file) != 1:
        return None, contiguous_stride(tensor.shape)
    return memory_order(tensor.shape, tuple(chunks.stride[0].tolist()))


def shared_views(
    tensors: Iterable[Tensor], casts: Mapping[Tensor, DType]
) -> tuple[Mapping[Tensor, _SharedView], list[Note]]:
    """The view of a shared record, for every tensor that shares memory with another one.

    Tensors that overlap but cannot share one typed storage (other dtypes, other casts) are copied separately, with a
    note.
    """
    views: dict[Tensor, _SharedView] = {}
    notes: list[Note] = []
    for group in _groups(tensors):
        if not _share(group, casts, views):
            notes.append(Note("unshared", f"{len(group)} tensors of several dtypes share memory in the source"))
    return views, notes


def ties(tensors: Iterable[Tensor]) -> Mapping[Tensor, Tensor]:
    """For every tied tensor but the first: the first one with exactly the same memory."""
    tied: dict[Tensor, Tensor] = {}
    for group in _groups(tensors):
        firsts: list[Tensor] = []
        for tensor in group:
            first = next((each for each in firsts if _same_memory(tensor, each)), None)
            if first is None:
                firsts.append(tensor)
            elif first is not tensor:
                tied[tensor] = first
    return tied


def _groups(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that share memory with others, in groups: several chunks that are all the same, or one that overlaps."""
    singles: list[Tensor] = []
    several: dict[tuple[bytes, ...], list[Tensor]] = {}
    for tensor in tensors:
        chunks = tensor.chunks
        if 0 in tensor.shape:
            continue
        if len(chunks.file) == 1:
            singles.append(tensor)
        else:
            columns = (chunks.file, chunks.offset, chunks.start, chunks.size, chunks.stride)
            several.setdefault(tuple(column.tobytes() for column in columns), []).append(tensor)
    return [tied for tied in several.values() if len(tied) > 1] + _overlapping_groups(singles)


def _overlapping_groups(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Groups of at least two tensors whose byte ranges overlap, each connected through the others."""
    if len(tensors) < 2:
        return []
    file, begin, end = ranges_of(tensors)
    order = np.lexsort((begin, file))
    groups: list[list[Tensor]] = []
    reach, reach_file = -1, -1
    for index, at, until, number in zip(
        order.tolist(), begin[order].tolist(), end[order].tolist(), file[order].tolist(), strict=True
    ):
        if number == reach_file and at < reach:
            groups[-1].append(tensors[index])
            reach = max(reach, until)
        else:
            groups.append([tensors[index]])
            reach, reach_file = until, number
    return [group for group in groups if len(group) > 1]


def _share(group: list[Tensor], casts: Mapping[Tensor, DType], views: dict[Tensor, _SharedView]) -> bool:
    first = group[0]
    dtype = casts.get(first, first.dtype)
    if any(tensor.dtype is not first.dtype or casts.get(tensor, tensor.dtype) is not dtype for tensor in group):
        return False
    if all(_same_memory(tensor, first) for tensor in group):
        order, stride = memory_order_of(first)
        record = _Shared(WrittenTensor(first, dtype, order))
        for tensor in group:
            views[tensor] = _SharedView(record, 0, stride)
        return True
    return len(first.chunks) == 1 and _share_union(group, dtype, views)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    p, q = a.chunks, b.chunks
    return a is b or (
        (a.dtype, a.shape, len(p)) == (b.dtype, b.shape, len(q))
        and p.offset[0] == q.offset[0].item()
        and p.stride[0].tolist() == q.stride[0].tolist()
    )


def _share_union(group: list[Tensor], dtype: DType, views: dict[Tensor, _SharedView]) -> bool:
    """One flat record over all of the group's bytes. False when the views are not whole elements apart."""
    source = group[0].dtype
    begins = [int(tensor.chunks.offset[0]) for tensor in group]
    begin = min(begins)
    if any((at - begin) % source.itemsize for at in begins):
        return False
    end = max(at + span for at, span in zip(begins, spans_of(group).tolist(), strict=True))
    shape = ((end - begin) // source.itemsize,)
    flat = Tensor(source, shape, Chunks.whole(file=int(group[0].chunks.file[0]), offset=begin, shape=shape))
    record = _Shared(WrittenTensor(flat, dtype))
    for at, tensor in zip(begins, group, strict=True):
        stride = tuple(tensor.chunks.stride[0].tolist())
        views[tensor] = _SharedView(record, (at - begin) // source.itemsize, stride)
    return True


class LoadablePickle(PickleWriter):
    """``record`` stores the elements of a NumPy array, and returns the key."""

    def __init__(self, tensors: TensorHook, record: Callable[[bytes], str]) -> None:
        super().__init__(tensors)
        self._record = record
        self.numbers = False  # whether NumPy numbers were written as Python numbers
        self._stand_ins: dict[int, tuple[Value, Value]] = {}  # by id; the value is kept, so that its id is not reused
        for kind in (dict, OrderedDict, set):
            self._writers[kind] = partial(self._container, self._writers[kind])

    def _container(self, write: Callable[[Any], None], value: dict[Value, Value] | set[Any]) -> None:
        if all(map(is_loadable, value)):
            write(value)
        else:
            self._encoded(value)  # type: ignore[arg-type]  # its keys are keys

    def _object(self, value: Object) -> None:
        array = None if is_class(value.function) else array_of(value)
        if value.number is not None:
            self.numbers = True
            self.value(value.number.item())
        elif array is not None:
            self._array(value, array)
        elif is_class(value.function):
            super()._object(value)
        else:
            self._encoded(value)

    def _global(self, value: Global) -> None:
        if is_class(value) or is_loadable(value):
            super()._global(value)
        else:
            self._encoded(value)

    def _encode(self, data: bytes) -> None:
        if data:
            super()._encode(data)
        else:  # pickle calls ``bytes``, which is refused
            self.out += self.name("_codecs", "encode") + self.text("") + self.text("latin1") + b"\x86R"

    def _encoded(self, value: Value) -> None:
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = value, encode_stand_in(value)
        self.value(self._stand_ins[id(value)][1])

    def _array(self, value: Object, array: Array) -> None:
        """A tensor with an attribute: ``_rebuild_from_type_v2(_rebuild_tensor_v2, Tensor, (storage, ...), {...})``."""
        if self._refer(value):
            return
        dtype = array.dtype
        function = "_rebuild_tensor_v2" if dtype.storage is not None else "_rebuild_tensor_v3"
        self.out += self.name("torch._tensor", "_rebuild_from_type_v2") + b"("
        self.out += self.name("torch._utils", function) + self.name("torch", "Tensor") + b"(("
        self.out += self.text("storage")
        if dtype.storage is not None:
            self.out += self.name("torch", dtype.storage)
        else:
            self.out += self.name("torch.storage", "UntypedStorage")
        elements = len(array.data) if dtype.storage is None else len(array.data) // dtype.itemsize
        self.out += self.text(self._record(array.data)) + self.text("cpu") + integer(elements) + b"tQ" + integer(0)
        self.out += integers(array.shape) + integers(contiguous_stride(array.shape))
        self.out += b"\x89" + self.name("collections", "OrderedDict") + b")R"
        if dtype.storage is None:
            self.out += self.name("torch", dtype.name)
        self.out += b"t}" + self.text(ARRAY) + self.text(array.call) + b"stR"
        self._remember(value)
