"""What each key of a flattened optimizer is under units: a parameter, or a whole unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fsdpckpt.ir.checkpoint import OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value

__all__ = ["KeyMatching", "order_of_ids"]


def order_of_ids(units: Units) -> Sequence[str]:
    """What the ids of an optimizer without param groups count."""
    return units.optimizer_keys() if units.groups is None else [key for group in units.groups for key in group]


class KeyMatching:
    """One attempt; ``contradictions`` fills the other attributes.

    ``keys``: each key of the optimizer to an original name or a unit's key. ``told``: the groups as ``param_names``
    state them, where the units do not. ``proved``: what was compared, in words.
    """

    def __init__(self, optim: OptimState, units: Units) -> None:
        self.optim = optim
        self.units = units
        self.params = units.params()
        self.by_key = {unit.key: unit for unit in units.units}
        self.keys: dict[ParamKey, str] = {}
        self.told: tuple[tuple[str, ...], ...] | None = None
        self.proved: list[str] = []

    def contradictions(self) -> Iterator[str]:
        """Everything in keys, groups and ``param_names`` that the units do not allow."""
        if self.optim.key_type == "name":
            yield from self._by_name()
        elif self.optim.param_groups is None:
            yield from self._ungrouped()
        else:
            yield from self._by_id(self.optim.param_groups)

    def _by_name(self) -> Iterator[str]:
        known = [*self.by_key, *(param.name for param in self.units.unmanaged)]
        possible = dict.fromkeys(self.params if self.units.use_orig_params else known)
        listed = [key for group in self.optim.param_groups or () for key in group_params(group) or ()]
        for key in dict.fromkeys([*self.optim.state, *listed]):
            if clean(str(key)) in possible:
                self.keys[key] = clean(str(key))
            elif key in listed:
                yield f"optim: the groups list {key}, which the units do not have"

    def _ungrouped(self) -> Iterator[str]:
        order = order_of_ids(self.units)
        self.keys.update({key: order[key] for key in self.optim.state if isinstance(key, int) and key < len(order)})
        yield from (
            f"optim {key}: the units have {len(order)} parameters" for key in self.optim.state if key not in self.keys
        )

    def _by_id(self, groups: Sequence[Mapping[Key, Value]]) -> Iterator[str]:
        ids = [group_params(group) or [] for group in groups]
        names = self._groups([len(listed) for listed in ids], groups)
        if isinstance(names, str):
            yield names
            return
        for number, (listed, own) in enumerate(zip(ids, names, strict=True)):
            if len(listed) != len(own):
                yield f"param group {number} lists {len(listed)} parameters, by the units it has {len(own)}"
                return
            self.keys.update(zip(listed, own, strict=True))
        yield from self._compare_param_names(groups)

    def _groups(self, lengths: Sequence[int], groups: Sequence[Mapping[Key, Value]]) -> Sequence[Sequence[str]] | str:
        """The keys of each param group, or why they are not known."""
        if self.units.groups is not None:
            if len(self.units.groups) != len(lengths):
                return f"the optimizer has {len(lengths)} param groups, by the units {len(self.units.groups)}"
            return self.units.groups
        told = [_param_names(group) for group in groups]
        if all(told):
            self.told = tuple(tuple(clean(name) for name in names) for names in told)
            return self.told
        if len(lengths) > 1:
            return (
                f"the optimizer has {len(lengths)} param groups, and the units do not say which parameters are in which"
            )
        order = self.units.optimizer_keys()
        trained = tuple(key for key in order if self._requires_grad(key))
        return [order if lengths[0] == len(order) else trained]

    def _requires_grad(self, key: str) -> bool:
        return self.by_key[key].requires_grad if key in self.by_key else self.params[key].requires_grad

    def _compare_param_names(self, groups: Sequence[Mapping[Key, Value]]) -> Iterator[str]:
        known = {*self.by_key, *self.params}
        compared = 0
        for group in groups:
            for key, name in zip(group_params(group) or (), _param_names(group), strict=False):
                compared += 1
                if clean(name) not in known:
                    yield f"param_names: {clean(name)} is not among the units' parameters"
                elif self.keys[key] != clean(name):
                    yield f"optim {key} is {clean(name)} by param_names, {self.keys[key]} by the units"
        if compared:
            self.proved.append(f"{compared} param_names of the groups agree with the units")


def _param_names(group: Mapping[Key, Value]) -> list[str]:
    names = group.get("param_names")
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []
