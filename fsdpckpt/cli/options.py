"""The options that several commands share, and the choices of each: strings only, so that --help imports nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "AsJson",
    "ContainerChoice",
    "LayoutChoice",
    "PartChoice",
    "Quiet",
    "SectionChoice",
    "Source",
    "TensorChoice",
    "Threads",
    "VerifyChoice",
]


class LayoutChoice(StrEnum):
    full = "full"
    sharded = "sharded"


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
Threads: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="Threads that read and compute.", show_default=False)
]
