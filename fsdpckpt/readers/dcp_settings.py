"""Hyper-parameters that are tensors, such as a tensor learning rate: the only tensors whose values a reader looks at.

A flattened optimizer (``StateDictOptions(flatten_optimizer_state_dict=True)``) repeats every hyper-parameter for each
parameter, and its groups can only be put together again by comparing them.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.dcp_directory import DcpDirectory
from fsdpckpt.readers.tree import FileTable
from fsdpckpt.storage.sources import Sources

__all__ = ["settings_of", "share_equal_settings"]

SMALL = 64  # bytes: a setting is one number or a few; anything larger is data and not looked at


def _is_setting(key: str) -> bool:
    """Whether ``key`` is ``<optimizer>.param_groups.<fqn>.<name>``; with a group's number it is the nested form."""
    _, found, rest = f".{key}".partition(".param_groups.")
    return bool(found) and not re.fullmatch(r"\d+\.[^.]+", rest)


def settings_of(found: DcpDirectory) -> DcpDirectory:
    """The same directory with only the small tensors of param groups in it."""
    tensors = {
        key: tensor
        for key, tensor in found.metadata.tensors.items()
        if _is_setting(key) and len(tensor.shape) == 0 and tensor.dtype.itemsize <= SMALL
    }
    return replace(found, metadata=replace(found.metadata, tensors=tensors, items={}))


def share_equal_settings(tensors: MutableMapping[str, Tensor], files: FileTable, sources: Sources) -> None:
    """Make settings with the same dtype and bytes one object: so ``optimizers`` sees which parameters agree."""
    paths = [file.path for file in files.files()]
    seen: dict[tuple[str, bytes], Tensor] = {}
    for key, tensor in tensors.items():
        if _is_setting(key) and tensor.shape == () and len(tensor.pieces):
            source = sources.open(paths[int(tensor.pieces.file[0])])
            content = source.read(int(tensor.pieces.offset[0]), tensor.nbytes)
            tensors[key] = seen.setdefault((tensor.dtype.name, content), tensor)
