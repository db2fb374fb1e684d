"""One call that converts an oracle checkpoint, as the end-to-end tests need it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters import Report
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.ir.checkpoint import Container
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from tests.oracle.compare import differences, optimizer_by_id, settings_by_parameter
from tests.oracle.forms import Form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

__all__ = ["buffers", "converted", "expected", "load_full", "same_as_truth"]


def converted(oracle: Oracle, form: Form, world: int, target: Path, options: ConvertOptions) -> Report:
    """Convert ``form`` as saved at ``world`` ranks to ``target``."""
    return convert(Solo(), str(oracle.checkpoints(world) / form.path), str(target), options, NoProgress())


def buffers(form: Form, world: int, container: Container) -> tuple[str, ...]:
    """The ``--buffers`` that this source needs to become sharded.

    DCP metadata does not tell a buffer without elements from a parameter without elements; only rank files care.
    """
    open_question = form.container == "dcp" and container is Container.TORCH
    return BUFFERS if form.needs_buffers(world) or open_question else ()


def expected(oracle: Oracle, form: Form, world: int) -> dict[str, Any]:
    """The full model and optimizer PyTorch had when it saved ``form``, with the key type of that form."""
    truth = {name: dict(section) for name, section in _truth(oracle.truth(world, form.truth)).items()}
    if form.keys == "id":
        truth["optimizer"] = optimizer_by_id(truth["optimizer"])
    return truth


@functools.cache
def _truth(path: Path) -> dict[str, Any]:
    return load_full(path)


def load_full(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def same_as_truth(found: dict[str, Any], truth: dict[str, Any], *, grouped: bool = True) -> list[str]:
    """Every difference between two full checkpoints in model and optimizer.

    ``grouped`` False: the groups may be cut in another way, as long as every parameter has the same settings.
    """
    if not grouped:
        found = {**found, "optimizer": settings_by_parameter(found["optimizer"])}
        truth = {**truth, "optimizer": settings_by_parameter(truth["optimizer"])}
    return [
        *differences(found["model"], truth["model"], "model"),
        *differences(found["optimizer"], truth["optimizer"], "optimizer"),
    ]
