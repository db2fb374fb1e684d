"""Loading without converting: a ``torch.distributed.checkpoint`` storage reader over any source. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from fsdpckpt import flags
from fsdpckpt.comm.boxes import coordinate_in_groups, held_boxes
from fsdpckpt.comm.dtensor import DTensor, StridedShard, compute_local_shape_and_global_offset
from fsdpckpt.errors import InternalError, SourceError, StateDictMismatchError, UsageError
from fsdpckpt.execute.read_check import ReadCheck
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.ir.values import UNREAD, Value
from fsdpckpt.lazy import torch_dtype
from fsdpckpt.loading.source import (
    BoxToRead,
    Entries,
    Names,
    as_saved,
    entries_of,
    matching_names,
    open_to_load,
    read_boxes,
)
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural
from fsdpckpt.verify.blocks import DEFAULT_THREADS


class StorageReader(TorchStorageReader):
    """Fills a state dict from any source: ``dcp.load(state_dict, storage_reader=StorageReader(path))``.

    ``model`` and ``optimizer``: the dotted keys of the two in ``state_dict``, "" if its top level is the section
    itself; by default those of a DCP source, else ``"model"`` and ``"optimizer"``. ``flatten_optimizer_state_dict``:
    list the optimizer's keys as ``get_optimizer_state_dict`` does with the option of the same name; keys of both forms
    are found either way. ``key_type``: how the optimizer's part is keyed; ``"name"`` is what
    ``get_optimizer_state_dict`` and ``FSDP.optim_state_dict`` return, ``"id"`` the optimizer's own ``state_dict()``.
    All other options are those of ``fsdpckpt convert``. Each rank opens the source itself and reads only its shards; no
    dtype is cast. What is read whole is compared with the checksums that the source has; ``verify=True`` also reads the
    rest of each record, and of each file in ``fsdpckpt.json``, of which this rank needs a part. Raises SourceError,
    NeedsInformationError, UsageError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        optimizer: str | None = None,
        flatten_optimizer_state_dict: bool = False,
        key_type: KeyType = "name",
        units: str | os.PathLike[str] | None = None,
        unit: Iterable[str] = (),
        use_orig_params: bool | None = None,
        strategy: str | None = None,
        param_dtype: str | torch.dtype | None = None,
        shard_size: int | None = None,
        reference: str | os.PathLike[str] | None = None,
        parameters: str | os.PathLike[str] | None = None,
        buffers: Iterable[str] = (),
        missing_state: str | None = None,
        no_weight_decay: Iterable[str] = (),
        ignore_file: Iterable[str] = (),
        strip_prefix: str | None = None,
        add_prefix: str | None = None,
        rename: dict[str, str] | None = None,
        threads: int | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._verify = verify
        if key_type not in ("name", "id"):
            raise UsageError(f"key_type cannot be {key_type!r}", expected="name, id", found=str(key_type))
        self._names = Names(model, optimizer, flatten_optimizer_state_dict)
        given: dict[str, object] = {"key_type": key_type, "clean_names": True}
        given |= {"units": units, "unit": unit, "use_orig_params": use_orig_params, "strategy": strategy}
        given |= {"param_dtype": param_dtype, "shard_size": shard_size, "reference": reference}
        given |= {"parameters": parameters, "buffers": buffers, "missing_state": missing_state}
        given |= {"no_weight_decay": no_weight_decay, "ignore_file": ignore_file}
        given |= {"strip_prefix": strip_prefix, "add_prefix": add_prefix, "rename": rename}
        self._options = ConvertOptions.of(**given, threads=threads)
        self._threads = self._options.threads if self._options.threads is not None else DEFAULT_THREADS
        self._open(os.fsdecode(path), locate=Locate.NOTHING)

    @property
    def checkpoint_id(self) -> str:
        """The path or URL."""
        return self._path

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint at the path, keyed and named as it will be loaded; its ``notes`` say what was inferred."""
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Step 0: open another source with the same options, if ``dcp.load`` is given a ``checkpoint_id``."""
        if checkpoint_id is not None:
            self._open(os.fsdecode(checkpoint_id), locate=Locate.NOTHING)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Step 1: every key that can be loaded, with dtype and shape; read again if the source was saved again."""
        try:
            self._sources.require_unchanged()
        except SourceError:
            self._open(self._path, locate=Locate.NOTHING)
        entries = self._entries_of_rank()
        return Metadata(
            state_dict_metadata=matching_names(entries.values, self._storage_metadata),
            planner_data=dict(entries.paths),
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self._path),
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Step 2: nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Step 3: the plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Step 4: the plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Step 5: fill this rank's shards.

        Raises StateDictMismatchError that lists every tensor that does not match, SourceError if a file has changed or
        its bytes do not have their checksum.
        """
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        entries = self._entries_of_rank()
        misplaced = _misplaced(planner, entries)
        shards = [item for item in tensors if item.storage_index.fqn not in misplaced]
        targets = [planner.resolve_tensor(item).detach() for item in shards]
        boxes = [_box_of(item, target) for item, target in zip(shards, targets, strict=True)]
        boxes += [box for local in misplaced.values() for box in local]
        self._require_match(boxes, planner, entries)
        if any(entries.values[item.storage_index.fqn] is UNREAD for item in values):
            entries = self._reopened()
        if not self._read(boxes, entries) and not self._read(boxes, self._reopened()):
            raise InternalError(f"{self._path}: an item was opened and not located")
        for item, target in zip(shards, targets, strict=True):
            planner.commit_tensor(item, target)
        entries = self._entries_of_rank()
        for item in values:
            value = _as_named_by(getattr(planner, "state_dict", {}), item, entries)
            planner.load_bytes(item, as_saved(value, self._checkpoint, self._check))
        self._sources.require_unchanged()
        self._sources.__exit__()  # files are closed; another load opens them again
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the path exists. ``dcp.load`` itself calls this only for its own readers."""
        with Sources() as sources:
            return sources.stat(os.fsdecode(checkpoint_id)) is not None

    def _open(self, path: str, *, locate: Locate) -> None:
        self._sources = Sources()
        self._path = path
        self._checkpoint = open_to_load(path, self._options, self._sources, locate=locate)
        self._check = ReadCheck(self._checkpoint, self._sources, everything=self._verify)
        self._entries: Entries | None = None
        self._rank = -1
        self._entries_of_rank()  # check now: dcp.load would wrap later errors

    def _entries_of_rank(self) -> Entries:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if self._entries is None or self._rank != rank:
            self._entries, self._rank = entries_of(self._checkpoint, self._names, rank), rank
        return self._entries

    def _reopened(self) -> Entries:
        """The same entries, with the bytes of every item located."""
        self._open(self._path, locate=Locate.ALL)
        return self._entries_of_rank()

    def _read(self, boxes: list[BoxToRead], entries: Entries) -> bool:
        return read_boxes(boxes, entries, self._checkpoint, self._check, threads=self._threads)

    def _storage_metadata(self, key: str, value: object) -> TensorStorageMetadata | BytesStorageMetadata:
        if not isinstance(value, Tensor):
            return BytesStorageMetadata()
        dtype = torch_dtype(value.dtype, key=key, source=self._path)
        shape = torch.Size(value.shape)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [whole])

    def _require_match(self, boxes: list[BoxToRead], planner: LoadPlanner, entries: Entries) -> None:
        """Raises if a tensor has a different dtype or shape: the plans of older torch versions do not check it.

        A planner that makes its own plans may request a part of a tensor.
        """
        own_plan = type(planner).create_local_plan is not DefaultLoadPlanner.create_local_plan
        whole = getattr(planner, "state_dict", {}) if not own_plan else {}
        wrong: dict[str, str] = {}
        cast = False
        for key, held_as, _, target in boxes:
            tensor = entries.tensor(key)
            stored, expected = tensor.dtype.name, str(target.dtype).removeprefix("torch.")
            if stored != expected:
                wrong[key], cast = f"{key}: {stored} in the checkpoint, {expected} in the state dict", True
            shape = tuple(getattr(whole.get(held_as), "shape", tensor.shape))
            if shape != tensor.shape:
                wrong[key] = f"{key}: {list(tensor.shape)} in the checkpoint, {list(shape)} in the state dict"
        if wrong:
            raise StateDictMismatchError(
                f"{self._path} holds {plural(len(wrong), 'tensor')} of a different dtype or shape than the state dict",
                details=list(wrong.values()),
                why="loading never casts: the choice of rounding is yours" if cast else None,
                next_step="make the state dict like the checkpoint"
                + (
                    ", or cast the checkpoint first: "
                    f"{flags.command('convert', self._path, 'DST', flags.dtype('DTYPE'))}"
                    if cast
                    else ""
                ),
                key=next(iter(wrong)),
            )


def _as_named_by(state: Mapping[str, Any], item: ReadItem, entries: Entries) -> Value:
    """The value for ``item``; names in the ``params`` of groups get the prefixes they have in ``state``."""
    value = entries.values[item.storage_index.fqn]
    current = state.get(item.dest_index.fqn)
    path = entries.paths.get(item.storage_index.fqn, ())
    if path[-3:-2] != ("param_groups",) or path[-1] != "params":
        return value
    if not isinstance(current, list) or not isinstance(value, list):
        return value
    wrapped_names = {clean(name): name for name in current if isinstance(name, str)}
    return [wrapped_names.get(name, name) if isinstance(name, str) else name for name in value]


def _box_of(item: ReadItem, target: torch.Tensor) -> BoxToRead:
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    return BoxToRead(item.storage_index.fqn, item.dest_index.fqn, box, target)


def _misplaced(planner: LoadPlanner, entries: Entries) -> dict[str, list[BoxToRead]]:
    """DTensors for which torch requests a different box than the rank holds, by key, with the one that it holds.

    If FSDP2 and tensor parallelism cut one dimension and rows do not divide evenly, the boxes that
    ``compute_local_shape_and_global_offset`` computes for the plan are wrong (torch 2.13): another part of the tensor,
    or more elements than the local tensor has. On a mesh that does not list its ranks in ascending order they are those
    of another rank.
    """
    boxes: dict[str, list[BoxToRead]] = {}
    in_order: dict[DeviceMesh, bool] = {}
    for key, value in getattr(planner, "state_dict", {}).items():
        if not isinstance(value, DTensor) or key not in entries.values:
            continue
        mesh = value.device_mesh
        if mesh not in in_order:
            in_order[mesh] = coordinate_in_groups(mesh) in (None, tuple(mesh.get_coordinate() or ()))
        if in_order[mesh] and not any(type(placement) is StridedShard for placement in value.placements):
            continue
        size, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        computed = [Box(tuple(offset), tuple(size))] if prod(size) else []
        held = held_boxes(value, key)
        if [part.box for part in held] != computed:
            boxes[key] = [BoxToRead(key, key, part.box, part.data.detach()) for part in held]
    return boxes
