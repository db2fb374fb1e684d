"""The scenarios of PyTorch's own FSDP1 optimizer tests: which model, which modules are units, which optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.optim import _NamedOptimizer
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from tests.oracle.flat_models import Convolutions, Nested, SameSized, TiedTransformer, Tiny, Unused
from tests.oracle.toy import clean

__all__ = ["SCENARIOS", "Keyed", "Scenario", "scenario", "variants"]

ORIG, FLAT = True, False


class Keyed(AdamW):
    """An optimizer as TorchRec's ``KeyedOptimizer``: state by the wrapped model's names, and one extra state."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        super().__init__(named.values(), lr=1e-2, foreach=False)
        self.names = list(named)

    def state_dict(self) -> dict[str, Any]:
        content = super().state_dict()
        groups = [
            {**group, "params": sorted(self.names[i] for i in group["params"])} for group in content["param_groups"]
        ]
        state = {self.names[number]: states for number, states in content["state"].items()}
        return {"state": {**state, "tables": torch.tensor(7.25)}, "param_groups": groups}


def _adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, foreach=False, **options)


def _trained(model: nn.Module) -> Optimizer:
    """Only what requires a gradient, with names: the groups then have ``param_names``."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return AdamW(named, lr=1e-2, foreach=False)


def _groups(model: nn.Module) -> Optimizer:
    """Two groups in a different order than ``model.parameters()``; with original parameters they cut across units."""
    named = [(clean(name), parameter) for name, parameter in model.named_parameters()]
    flat = any(name.endswith("_flat_param") for name, _ in named)
    second = [p for name, p in named if ("outer" in name if flat else p.ndim == 1 and "bias" in name)]
    taken = set(map(id, second))
    groups = [
        {"params": second, "lr": torch.tensor(3e-3), "betas": (0.8, 0.999), "weight_decay": 0.0, "label": "second"},
        {"params": [p for _, p in named if id(p) not in taken], "betas": (0.9, 0.95), "label": ["rest", 1]},
    ]
    return AdamW(groups, lr=1e-2, foreach=False)


def _biases(name: str) -> bool:
    return name.endswith("bias")


def _named(model: nn.Module) -> Optimizer:
    return _NamedOptimizer(model.named_parameters(), AdamW, None, model, lr=1e-2, foreach=False)


@dataclass(frozen=True)
class Scenario:
    """``units``: names of the wrapped modules, the root ("") among them unless it stays outside of FSDP.

    ``ignored``: the ignored parameters. ``frozen``: which parameters require no gradient. ``orig``:
    the values of ``use_orig_params`` it exists for. ``group``: ranks in one sharding group (HYBRID_SHARD). ``mix``:
    also saved as verl does, at 2 and 3 ranks and at its ``mix_world``. ``dcp``: its model is also saved with
    ``dcp.save``, at 3 ranks. ``worlds``: where it is trained.
    """

    name: str
    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    optimizer: Callable[[nn.Module], Optimizer] = _adamw
    orig: tuple[bool, ...] = (ORIG, FLAT)
    ignored: tuple[str, ...] = ()
    frozen: Callable[[str], bool] | None = None
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    param_dtype: torch.dtype | None = None
    group: int | None = None
    mix: bool = False
    dcp: bool = False
    worlds: tuple[int, ...] = (2, 3, 4)

    @property
    def name_keyed(self) -> bool:
        """Whether the optimizer's own state dict is keyed by names."""
        return self.optimizer in (_named, Keyed)

    def mix_world(self, *, orig: bool) -> int:
        """The world size at which its ``mix`` is unflattened; different scenarios have different ones."""
        return 2 + (orig + len(self.name)) % 3


_OUTER = ("", "outer", "outer.inner")
_LAYERS = tuple(f"transformer.{side}.layers.{i}" for side, i in (("encoder", 0), ("encoder", 1), ("decoder", 0)))
_UNUSED = ("", "first", "constant", "last")
_NESTED = Scenario("nested", Nested, _OUTER, mix=True, dcp=True, worlds=(1, 2, 3, 4))

SCENARIOS = (
    _NESTED,
    Scenario("rewrapped", Nested, ("", "first", "outer.tail"), worlds=(2, 3)),
    Scenario("transformer", TiedTransformer, ("", *_LAYERS), lambda m: _adamw(m, amsgrad=True), mix=True),
    Scenario("ignored", Nested, _OUTER, ignored=("outer.tail.weight", "outer.tail.bias", "outer.gain"), mix=True),
    Scenario("outside", Nested, ("outer", "outer.inner"), worlds=(2, 3)),
    Scenario("frozen_unit", Nested, _OUTER, _trained, frozen=lambda name: ".inner." in name, mix=True),
    Scenario("frozen_all", Nested, _OUTER, frozen=lambda name: ".inner." in name, worlds=(3,)),
    Scenario("frozen_some", Nested, _OUTER, _trained, orig=(ORIG,), frozen=_biases),
    Scenario("unused", Unused, _UNUSED, worlds=(1, 2, 3)),
    replace(_NESTED, name="no_shard", strategy=ShardingStrategy.NO_SHARD, mix=False, dcp=False, worlds=(2, 3)),
    replace(_NESTED, name="grad_op", strategy=ShardingStrategy.SHARD_GRAD_OP, mix=False, dcp=False, worlds=(3,)),
    replace(_NESTED, name="hybrid", strategy=ShardingStrategy.HYBRID_SHARD, group=2, worlds=(4,)),
    Scenario("sgd", Nested, _OUTER, lambda m: SGD(m.parameters(), lr=1e-2, foreach=False), worlds=(3,)),
    Scenario(
        "momentum", Nested, _OUTER, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False), worlds=(3,)
    ),
    Scenario(
        "adagrad", Tiny, ("", "one", "two"), lambda m: Adagrad(m.parameters(), lr=0.1, foreach=False), worlds=(2, 4)
    ),
    Scenario("odd_states", Nested, _OUTER, worlds=(2, 3)),
    Scenario("groups", Nested, _OUTER, _groups, worlds=(2, 3)),
    Scenario("named", Nested, _OUTER, _named, worlds=(2, 3)),
    Scenario("keyed", Nested, _OUTER, Keyed, orig=(ORIG,), worlds=(2, 3)),
    Scenario("mixed", Nested, _OUTER, param_dtype=torch.bfloat16, mix=True),
    Scenario("bf16", lambda: Nested(torch.bfloat16), _OUTER, worlds=(2, 3)),
    Scenario("channels_last", Convolutions, ("", "block"), worlds=(2, 3)),
    Scenario("tiny", Tiny, ("", "one", "two"), mix=True, dcp=True),
    Scenario("same_sized", SameSized, ("", "a.0", "a.1", "a.2", "b"), mix=True),
)


def scenario(name: str) -> Scenario:
    """The scenario of this name."""
    return next(entry for entry in SCENARIOS if entry.name == name)


def variants(world: int) -> Iterator[tuple[Scenario, bool]]:
    """Every scenario trained at ``world`` ranks with every ``use_orig_params`` it exists for."""
    for entry in SCENARIOS:
        if world in entry.worlds:
            for orig in entry.orig:
                yield entry, orig
