"""Reads what lies beside weights and states their sizes: Hugging Face's ``config.json`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from fsdpckpt.ir.checkpoint import Checkpoint, Problem, Section
from fsdpckpt.ir.model_config import (
    ADAPTER_CONFIG,
    CONFIG,
    Disagreement,
    adapter_disagreements,
    certain_disagreements,
)
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources

HUGGING_FACE_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)(\.safetensors|\.bin)(\.index\.json)?")
"""Names of files that the configuration beside them describes; a file of any other name may be anything."""

_MAX_BYTES = 1 << 24  # the largest configurations list every quantized module: about a megabyte


def config_problems(checkpoint: Checkpoint, directory: str, names: Collection[str], sources: Sources) -> list[Problem]:
    """A fatal problem for each size of the weights that a configuration in ``directory`` contradicts for certain.

    ``names``: what ``directory`` holds. verl keeps the configuration in a ``huggingface`` directory.
    """
    model = checkpoint.model
    if model is None:
        return []
    shapes = {
        name: leaf.shape
        for name, leaf in model.params.items()
        if isinstance(leaf, Tensor) and not isinstance(leaf.cut, (Slices, OneSlice)) and leaf.dtype.kind == "float"
    }
    base = directory.rstrip("/")
    problems: list[Problem] = []
    if CONFIG in names:
        path = f"{base}/{CONFIG}"
        problems += _problems(path, certain_disagreements(config_fields(path, sources), shapes))
    elif "huggingface" in names:
        path = f"{base}/huggingface/{CONFIG}"
        problems += _problems(path, certain_disagreements(config_fields(path, sources), shapes))
    if ADAPTER_CONFIG in names:
        path = f"{base}/{ADAPTER_CONFIG}"
        problems += _problems(path, adapter_disagreements(config_fields(path, sources), shapes))
    return problems


def config_fields(path: str, sources: Sources) -> Mapping[str, object]:
    """The fields of the file; empty if it is missing, or no JSON object: it is no part of the weights."""
    entry = sources.stat(path)
    if entry is None or entry.directory or entry.nbytes > _MAX_BYTES:
        return {}
    try:
        document = json.loads(sources.open(path).read(0, entry.nbytes))
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _problems(path: str, found: list[Disagreement]) -> Iterator[Problem]:
    for each in found:
        in_weights = f"model {each.name}: {each.what} are {each.found}"
        if each.counts_layers:
            in_weights = f"model: {each.what} is {each.found}"
        message = f"{in_weights}, and {path} states {each.field} {each.stated}"
        yield Problem("config", message, key=each.name, file=path, section=Section.MODEL)
