"""Every option, declared once: ``declare`` says how, ``convert`` and ``commands`` have the records of the commands."""

from fsdpckpt.options.convert import (
    AUTO_DTYPE,
    CASTABLE_DTYPES,
    DEFAULT_MAX_SHARD_SIZE,
    DTYPE,
    FLAVORS,
    ConvertOptions,
    EachOptions,
    Launcher,
    LaunchOptions,
    LinkMode,
    MissingState,
    OutputScope,
    TensorForm,
    VerifyLevel,
)

__all__ = [
    "AUTO_DTYPE",
    "CASTABLE_DTYPES",
    "DEFAULT_MAX_SHARD_SIZE",
    "DTYPE",
    "FLAVORS",
    "ConvertOptions",
    "EachOptions",
    "LaunchOptions",
    "Launcher",
    "LinkMode",
    "MissingState",
    "OutputScope",
    "TensorForm",
    "VerifyLevel",
]
