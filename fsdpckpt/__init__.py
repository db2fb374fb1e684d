"""fsdpckpt: convert, inspect, compare and verify PyTorch FSDP checkpoints, parameters and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpckpt.version import __version__

if TYPE_CHECKING:
    from fsdpckpt.api import convert, diff, inspect, open, save_units, verify  # noqa: A004
    from fsdpckpt.loading.reader import StorageReader

__all__ = ["StorageReader", "__version__", "convert", "diff", "inspect", "open", "save_units", "verify"]


def __getattr__(name: str) -> object:
    """The API, imported on first use: ``import fsdpckpt`` costs nothing."""
    if name not in ("StorageReader", "convert", "diff", "inspect", "open", "save_units", "verify"):
        raise AttributeError(f"module 'fsdpckpt' has no attribute {name!r}")
    from importlib import import_module

    # The storage reader is one of torch's classes: only who asks for it pays for that import.
    return getattr(import_module("fsdpckpt.loading.reader" if name == "StorageReader" else "fsdpckpt.api"), name)
