"""The options that several commands share, and the choices of each: strings only, so that --help imports nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "AsJson",
    "BackendChoice",
    "ContainerChoice",
    "DeviceChoice",
    "KeyTypeChoice",
    "LauncherChoice",
    "LayoutChoice",
    "MissingStateChoice",
    "PartChoice",
    "Quiet",
    "SectionChoice",
    "Source",
    "StrategyChoice",
    "TensorChoice",
    "Threads",
    "UnitsFile",
    "VerifyChoice",
    "VisibilityChoice",
]


class LayoutChoice(StrEnum):
    full = "full"
    sharded = "sharded"
    flattened = "flattened"


class KeyTypeChoice(StrEnum):
    name_ = "name"
    id_ = "id"


class StrategyChoice(StrEnum):
    full_shard = "full-shard"
    shard_grad_op = "shard-grad-op"
    hybrid_shard = "hybrid-shard"
    no_shard = "no-shard"


class MissingStateChoice(StrEnum):
    error = "error"
    zeros = "zeros"
    skip = "skip"


class ContainerChoice(StrEnum):
    torch = "torch"
    dcp = "dcp"
    safetensors = "safetensors"


class SectionChoice(StrEnum):
    model = "model"
    optim = "optim"
    extra = "extra"


class PartChoice(StrEnum):
    model = "model"
    optim = "optim"


class TensorChoice(StrEnum):
    dtensor = "dtensor"
    sharded_tensor = "sharded-tensor"


class VerifyChoice(StrEnum):
    none = "none"
    structure = "structure"
    full = "full"


class LauncherChoice(StrEnum):
    auto = "auto"
    local = "local"
    torchrun = "torchrun"


class DeviceChoice(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class BackendChoice(StrEnum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


class VisibilityChoice(StrEnum):
    shared = "shared"
    node = "node"


Source: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="A file, a directory or a URL; what it holds is recognised.", show_default=False
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="No talk and no progress on stderr.")]
UnitsFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--units", metavar="FILE", help="A units file, for flattened shards.", show_default=False),
]
Threads: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Threads that read and compute.", show_default=False)
]
