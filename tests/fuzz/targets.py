"""Every parser of untrusted bytes as a function of bytes: it may raise errors of ``fsdpckpt.errors``, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.formats.dcp import parse_metadata
from fsdpckpt.formats.dcp.items import ItemReader, Structures
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.formats.safetensors import read_header
from fsdpckpt.formats.torch.tensors import TensorBuilder
from fsdpckpt.formats.zip import ZipRecord, read_directory, top_folder
from fsdpckpt.ir.units_json import loads
from fsdpckpt.readers.deepspeed.universal import ArchiveCache
from fsdpckpt.readers.protocol import FileTable
from fsdpckpt.readers.safetensors import read_safetensors
from fsdpckpt.storage.local import MemoryFile
from tests.fuzz import checkpoints
from tests.fuzz.layouts import SAVED, WRITTEN
from tests.opened_by import OpenedBy

__all__ = ["TARGETS", "Target", "harmless"]

Target = Callable[[bytes], object]


_RECORDS = {f"data/{number}": ZipRecord(f"data/{number}", 64 * number, 4096, 0) for number in range(64)}


def _pickle(data: bytes) -> object:
    return load(data, file="it.pt", tensors=TensorBuilder(_RECORDS, "it.pt"))


def _zip(data: bytes) -> object:
    source = MemoryFile(data, "it.pt")
    return top_folder(source), read_directory(source)


def _item(data: bytes) -> object:
    return ItemReader(MemoryFile(data, "__0_0.distcp"), Structures()).tensors(np.array([0]), np.array([len(data)]))


def _torch(data: bytes) -> object:
    source, cache = MemoryFile(data, "it.pt"), ArchiveCache()
    archive = cache.read(source, 0)
    assert cache.read(source, 0).checksums.crc.tolist() == archive.checksums.crc.tolist()
    return archive


def _safetensors(data: bytes) -> object:
    sources = OpenedBy(lambda path: MemoryFile(data, path))
    return read_safetensors(["d/it.safetensors"], FileTable(), sources)


def _values(data: bytes) -> object:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return decode_allowed(document, file="it.safetensors")


TARGETS: dict[str, Target] = {
    "pickle": _pickle,
    "plain-pickle": lambda data: load(data, file="it.pkl"),
    "dcp-metadata": lambda data: parse_metadata(MemoryFile(data, "d/.metadata")),
    "zip": _zip,
    "torch": _torch,
    "dcp-item": _item,
    "safetensors-header": lambda data: read_header(MemoryFile(data, "it.safetensors")),
    "safetensors": _safetensors,
    "safetensors-index": checkpoints.safetensors_index,
    "safetensors-document": checkpoints.safetensors_document,
    "sharding-info": checkpoints.sharding_info,
    "units": lambda data: loads(data, source="units.json"),
    "values-json": _values,
    "manifest": checkpoints.manifest,
    "journal": checkpoints.journal,
    "index-page": checkpoints.index_page,
    "file-names": checkpoints.file_names,
    "torch-checkpoint": checkpoints.torch_checkpoint,
    "rank-files": checkpoints.rank_files,
    "dcp-checkpoint": checkpoints.dcp_checkpoint,
    **{f"{kind}-checkpoint": checkpoints.checkpoint_with(kind) for kind in SAVED},
    "written-checkpoint": checkpoints.checkpoint_with(*WRITTEN),
}


def harmless(target: Target, data: bytes) -> bool:
    """Run ``target`` on ``data``: True when it was parsed, False when it was refused. Anything else is raised."""
    try:
        target(data)
    except InternalError:
        raise
    except FsdpckptError:
        return False
    return True
