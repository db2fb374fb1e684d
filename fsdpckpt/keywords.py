"""Types the keywords of ``fsdpckpt.convert`` for type checkers and editors. Written by ``scripts/keywords``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict

import torch

from fsdpckpt.ir import Container, Layout, Section, Strategy
from fsdpckpt.options import Launcher, LinkMode, MissingState, TensorForm, VerifyLevel, Visibility

__all__ = ["ConvertKeywords"]


class ConvertKeywords(TypedDict, total=False):
    to: Layout | Literal["full", "sharded", "flattened"] | None
    container: Container | Literal["torch", "dcp", "safetensors"] | None
    world_size: int | None
    mesh: str | Iterable[str]
    placements: str | os.PathLike[str] | None
    like: str | os.PathLike[str] | None
    tensor: TensorForm | Literal["dtensor", "sharded-tensor"]
    torch_version: str | None
    mesh_device: str | None
    key_type: Literal["name", "id"] | None
    flavor: str | None
    max_shard_size: int | str
    only: Section | Literal["model", "optim", "extra"] | None
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    ignore_file: str | Iterable[str]
    clean_names: bool
    strip_prefix: str | None
    add_prefix: str | None
    rename: Mapping[str, str] | Iterable[tuple[str, str]]
    dtype: str | torch.dtype | None
    optim_dtype: str | torch.dtype | None
    missing_state: MissingState | Literal["error", "zeros", "skip"] | None
    no_weight_decay: str | Iterable[str]
    buffers: str | Iterable[str]
    units: str | os.PathLike[str] | None
    unit: str | Iterable[str]
    use_orig_params: bool | None
    strategy: Strategy | Literal["full-shard", "shard-grad-op", "hybrid-shard", "no-shard"] | None
    param_dtype: str | torch.dtype | None
    shard_size: int | None
    reference: str | os.PathLike[str] | None
    parameters: str | os.PathLike[str] | None
    dry_run: bool
    verify: VerifyLevel | Literal["none", "structure", "full"]
    link: LinkMode | Literal["copy", "auto", "hardlink", "reflink"]
    overwrite: bool
    resume: bool | None
    max_memory: int | str
    threads: int | None
    staging: str | os.PathLike[str] | None
    launcher: Launcher | Literal["auto", "local", "torchrun"]
    nproc_per_node: int | str | None
    nnodes: int
    node_rank: int | None
    rdzv_endpoint: str | None
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "nccl", "gloo"]
    output_visibility: Visibility | Literal["shared", "node"]
    fault_limit: float
