"""Models whose parameters are shared, ignored or frozen in ways that decide what lies in which unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.oracle.flat_models import Convolutions, Nested, Outer, Perceptron, SameSized, TiedTransformer, Tiny

__all__ = ["CASES", "Case", "wrapped"]


class TiedAcross(nn.Module):
    """A weight that two units hold: the root's ``outside`` first, the wrapped ``block``'s second."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(5, 7, bias=False)
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
        self.last = nn.Linear(3, 2)
        self.outside.weight = self.block[0].weight


class TiedHead(nn.Module):
    """A language model whose head is a unit of its own and has the weight of the root's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.body = Perceptron(5)
        self.head = nn.Linear(5, 6)
        self.head.weight = self.embed.weight


class Twice(nn.Module):
    """One module under two names, another within a unit under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.block = nn.ModuleList([nn.LayerNorm(5), nn.Linear(5, 2)])
        self.block.append(self.block[1])
        self.again = self.first


class OwnParameters(nn.Module):
    """A module with parameters of its own, of which the middle one is ignored, around a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(3, 5))
        self.kept = nn.Parameter(torch.empty(7))
        self.inner = Perceptron()
        self.after = nn.Parameter(torch.empty(2))


class TiedInside(nn.Module):
    """Within one module a bias that is the shared weight's neighbour, the shared one registered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.body = Perceptron(5)
        self.output = nn.Linear(5, 6)
        self.output.weight = self.embed.weight


class Normalised(nn.Module):
    """Batch normalisation, which mixed precision leaves out by wrapping it separately."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.block = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7, affine=False), nn.BatchNorm1d(7))


def _frozen() -> nn.Module:
    model = Nested()
    model.outer.inner.requires_grad_(requires_grad=False)
    return model


def _partly_frozen() -> nn.Module:
    model = Nested()
    model.first.bias.requires_grad_(requires_grad=False)
    return model


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    classes: tuple[type[nn.Module], ...]
    ignored: tuple[str, ...] = ()
    both: bool = True  # False: only FSDP1 with use_orig_params=True can wrap it
    mixed: bool = False  # a module has ignored parameters beside managed ones


CASES = {
    "nested": Case(Nested, (Outer, Perceptron)),
    "only the root": Case(Nested, ()),
    "every linear layer": Case(Nested, (nn.Linear, nn.LayerNorm)),
    "tied transformer": Case(TiedTransformer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)),
    "attention in layers": Case(TiedTransformer, (nn.MultiheadAttention, nn.TransformerEncoderLayer)),
    "channels_last": Case(Convolutions, (nn.Sequential,)),
    "tiny": Case(Tiny, (nn.Linear,)),
    "same sizes": Case(SameSized, (nn.Linear,)),
    "tied across units": Case(TiedAcross, (nn.Sequential,)),
    "tied inside": Case(TiedInside, (Perceptron,)),
    "a module twice": Case(Twice, (nn.ModuleList,)),
    "a wrapped module twice": Case(Twice, (nn.Linear,)),
    "frozen unit": Case(_frozen, (Perceptron,)),
    "partly frozen": Case(_partly_frozen, (Outer,), both=False),
    "ignored module": Case(Nested, (Outer, Perceptron), ("outer.inner",)),
    "ignored module above a unit": Case(Nested, (Perceptron,), ("outer",)),
    "ignored parameters": Case(Nested, (Perceptron,), ("first.bias", "outer.inner.up.*"), mixed=True),
    "own parameters": Case(OwnParameters, (Perceptron,), ("kept",), mixed=True),
}


def wrapped(case: Case, model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """``model`` under FSDP1 with a ``ModuleWrapPolicy``, as a training script wraps it."""
    named = dict(model.named_modules())
    modules = [named[name] for name in case.ignored if name in named]
    params = [
        param
        for name, param in model.named_parameters()
        for glob in case.ignored
        if glob not in named and (name == glob or (glob.endswith("*") and name.startswith(glob[:-1])))
    ]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=options.pop("auto_wrap_policy", ModuleWrapPolicy(case.classes)),
        ignored_states=params or modules or None,
        device_id=torch.device("cpu"),
        **options,
    )
