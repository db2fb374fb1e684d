"""Convert, inspect, compare and verify PyTorch FSDP checkpoints: parameters and optimizer state."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from fsdpckpt.version import __version__

if _TYPE_CHECKING:
    from fsdpckpt.api import convert, diff, inspect, open, save_units, verify  # noqa: A004
    from fsdpckpt.loading.reader import StorageReader

__all__ = ["StorageReader", "__version__", "convert", "diff", "inspect", "open", "save_units", "verify"]


def __dir__() -> list[str]:
    """The public names: what ``fsdpckpt.<TAB>`` offers."""
    return __all__


def __getattr__(name: str) -> object:
    """The API, imported on first use: ``import fsdpckpt`` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'fsdpckpt' has no attribute {name!r}")
    from importlib import import_module

    # The storage reader is a subclass of torch's: only those who ask for it pay for that import.
    return getattr(import_module("fsdpckpt.loading.reader" if name == "StorageReader" else "fsdpckpt.api"), name)
