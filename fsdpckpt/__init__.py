"""Convert, inspect, compare and verify PyTorch FSDP checkpoints: parameters and optimizer state."""

import sys

from fsdpckpt.callable_verify import RootPackage
from fsdpckpt.version import __version__

TYPE_CHECKING = False  # typing's own, without the time that importing it takes
if TYPE_CHECKING:
    from fsdpckpt import comm
    from fsdpckpt.api import convert, convert_each, diff, inspect, open, save_parameter_order, save_units, verify  # noqa: A004
    from fsdpckpt.errors import (
        FsdpckptError,
        FsdpckptWarning,
        InternalError,
        InterruptedRunError,
        NeedsInformationError,
        SeveralCheckpointsError,
        SourceCorruptError,
        SourceError,
        SourceIncompleteError,
        SourceMissingError,
        SourceUnrecognisedError,
        SourceUnsafeError,
        SourceUnsupportedError,
        StateDictMismatchError,
        TargetError,
        TargetExistsError,
        TargetUnwritableError,
        TorchMissingError,
        UsageError,
        WorkerError,
    )
    from fsdpckpt.loading import StorageReader

__all__ = [
    "FsdpckptError", "FsdpckptWarning", "InternalError", "InterruptedRunError", "NeedsInformationError",
    "SeveralCheckpointsError", "SourceCorruptError", "SourceError", "SourceIncompleteError", "SourceMissingError",
    "SourceUnrecognisedError", "SourceUnsafeError", "SourceUnsupportedError", "StateDictMismatchError",
    "StorageReader", "TargetError", "TargetExistsError", "TargetUnwritableError", "TorchMissingError", "UsageError",
    "WorkerError", "__version__", "comm", "convert", "convert_each", "diff", "inspect", "open",
    "save_parameter_order", "save_units", "verify",
]  # fmt: skip

sys.modules[__name__].__class__ = RootPackage


def __dir__() -> list[str]:
    """The public names: what ``fsdpckpt.<TAB>`` offers. Without torch, no ``StorageReader``: it subclasses torch's."""
    from importlib.util import find_spec

    return [name for name in __all__ if name != "StorageReader" or find_spec("torch") is not None]


def __getattr__(name: str) -> object:
    """The API, imported on first use: ``import fsdpckpt`` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'fsdpckpt' has no attribute {name!r}")
    from importlib import import_module

    if name == "comm":
        return import_module("fsdpckpt.comm")
    if name == "StorageReader":
        from fsdpckpt.errors import require_torch

        require_torch("StorageReader needs")
        return import_module("fsdpckpt.loading").StorageReader
    module = "fsdpckpt.errors" if name.endswith(("Error", "Warning")) else "fsdpckpt.api"
    return getattr(import_module(module), name)
