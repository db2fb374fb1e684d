"""A model and its optimizer after a step, what is saved of them, and conversions in the directory of a test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError

__all__ = ["RANK_FILES", "Job", "converted", "listed", "messages", "notes", "recorded", "refused", "save", "states"]

RANK_FILES: dict[str, Any] = {"to": "sharded", "container": "torch"}


class Job:
    """``model``, or parameters of these shapes, and an optimizer after one step with random gradients.

    ``groups``: the names of its parameters, group by group (None: one group of all that are trained). ``words``: it
    was given named parameters, with this before each name.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, tuple[int, ...]],
        groups: Sequence[Sequence[str]] | None = None,
        *,
        words: str | None = None,
        make: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> None:
        if isinstance(model, nn.Module):
            self.params = dict(model.named_parameters())
            self.model: dict[str, Any] = model.state_dict()
        else:
            self.params = {name: nn.Parameter(torch.randn(shape)) for name, shape in model.items()}
            self.model = {name: param.detach() for name, param in self.params.items()}
        self.groups = groups or [[name for name, param in self.params.items() if param.requires_grad]]
        given: list[Any] = []
        for names in self.groups:
            each = [self.params[name] for name in names]
            given.append(each if words is None else [(words + n, param) for n, param in zip(names, each, strict=True)])
        self.optimizer = make([{"params": each} for each in given], **{"foreach": False, **settings})
        for param in self.params.values():
            if param.requires_grad:
                param.grad = torch.randn_like(param)
        self.optimizer.step()

    @property
    def ids(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def named(self, lead: str = "") -> dict[str, Any]:
        """The optimizer keyed by names, with ``lead`` before each."""
        saved, names = self.optimizer.state_dict(), [[lead + name for name in group] for group in self.groups]
        keys = list(chain(*names))
        groups = [{**group, "params": of} for group, of in zip(saved["param_groups"], names, strict=True)]
        return {"state": {keys[at]: states for at, states in saved["state"].items()}, "param_groups": groups}

    def saved(self, keys: str = "id", lead: str = "") -> dict[str, Any]:
        """What a script saves; ``lead``: before the names of the model."""
        model = {lead + name: leaf for name, leaf in self.model.items()} if lead else self.model
        return {"model": model, "optimizer": self.ids if keys == "id" else self.named()}

    def moment(self, name: str) -> torch.Tensor:
        return self.optimizer.state[self.params[name]]["exp_avg"]

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        return {name: self.moment(name) for group in self.groups for name in group}


def save(content: Any, name: str = "source.pt") -> str:
    torch.save(content, name)
    return name


def listed(groups: Iterable[Iterable[str]], name: str = "order.txt", between: str = "\n\n") -> str:
    """A file for ``--parameters``: the names of each group."""
    Path(name).write_text(between.join("\n".join(group) for group in groups))
    return name


def converted(source: str | Path, target: str, **options: Any) -> Any:
    """Convert to one torch file; returns what it holds."""
    fsdpckpt.convert(source, target, **options)
    return torch.load(target)


def refused(error: type[FsdpckptError], words: str, source: str | Path, target: str, **options: Any) -> Any:
    """A conversion ends with this error, and nothing is written; returns the error."""
    with pytest.raises(error, match=words or None) as raised:
        fsdpckpt.convert(source, target, **options)
    assert not Path(target).exists()
    return raised.value


def states(content: Any) -> Any:
    """The states of the optimizer, which may be all that a file holds."""
    return content.get("optimizer", content)["state"]


def recorded(target: str | Path) -> Any:
    """``fsdpckpt.json`` in a directory that was written."""
    return json.loads((Path(target) / "fsdpckpt.json").read_text())


def notes(report: Any, kind: str) -> list[Any]:
    return [note for note in report.notes if note.kind == kind]


def messages(report: Any, words: str) -> list[str]:
    """The messages of a report that have ``words``."""
    return [note.message for note in report.notes if words in note.message]
