"""fsdpckpt: convert, inspect, compare and verify PyTorch FSDP checkpoints, parameters and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpckpt.version import __version__

if TYPE_CHECKING:
    from fsdpckpt.api import convert, diff, inspect, open, save_units, verify  # noqa: A004

__all__ = ["__version__", "convert", "diff", "inspect", "open", "save_units", "verify"]


def __getattr__(name: str) -> object:
    """The API, imported on first use: ``import fsdpckpt`` costs nothing."""
    if name not in ("convert", "diff", "inspect", "open", "save_units", "verify"):
        raise AttributeError(f"module 'fsdpckpt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("fsdpckpt.api"), name)
