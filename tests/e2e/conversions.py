"""Conversions of oracle checkpoints, and what PyTorch had when it saved them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import fsdpckpt
from fsdpckpt.converters import Report
from tests.oracle.compare import differences, optimizer_by_id, settings_by_parameter
from tests.oracle.forms import Form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

__all__ = ["buffers", "converted", "expected", "load_full", "require_truth"]


def converted(oracle: Oracle, form: Form, world: int, target: Path, **options: Any) -> Report:
    """Convert ``form`` as saved at ``world`` ranks to ``target``."""
    return fsdpckpt.convert(oracle.checkpoints(world) / form.path, target, **options)


def buffers(form: Form, world: int, container: str) -> tuple[str, ...]:
    """The ``--buffers`` that this source needs to become sharded.

    DCP metadata does not tell a buffer without elements from a parameter without elements; only rank files care.
    """
    open_question = form.container == "dcp" and container == "torch"
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


def require_truth(path: Path, truth: dict[str, Any], *, grouped: bool = True) -> dict[str, Any]:
    """The content of a full checkpoint, whose model and optimizer are those of ``truth``.

    ``grouped`` False: the groups may be cut in another way, as long as every parameter has the same settings.
    """
    content = load_full(path)
    own = (lambda optimizer: optimizer) if grouped else settings_by_parameter
    assert differences(content["model"], truth["model"], "model") == []
    assert differences(own(content["optimizer"]), own(truth["optimizer"]), "optimizer") == []
    return content
