"""What FSDP1 would flatten, module by module, without wrapping anything: parameters on the meta device will do.

Follows ``torch/distributed/fsdp``: ``wrap._post_order_apply`` and ``ModuleWrapPolicy`` (which modules, in which order),
``_init_utils._get_orig_params`` (which parameters are left for a unit), and
``FlatParamHandle._init_flat_param_and_metadata`` (their order, and shared ones).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import nn

from fsdpckpt.ir.names import joined

__all__ = ["Flattened", "Wrapping"]

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Flattened:
    """One unit: the FQN of its module, its parameters in flattened order."""

    prefix: str
    module: nn.Module
    params: Named


@dataclass(slots=True)
class Wrapping:
    """A model in the making. ``own``: parameters that each module (by identity) still has, in its own order.

    With ``use_orig_params=True`` flattened parameters stay where they are and are not flattened again; otherwise they
    are gone from the unit's modules, and a parameter shared with a module outside is flattened there once more.
    """

    model: nn.Module
    use_orig_params: bool
    ignored: Collection[int]
    own: dict[int, Named] = field(init=False)
    units: list[Flattened] = field(init=False, default_factory=list)
    shared: list[tuple[str, str]] = field(init=False, default_factory=list)
    names: dict[tuple[int, str], str] = field(init=False, default_factory=dict)
    """(module, name in it) of each flattened parameter to its FQN."""
    _done: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.own = {id(module): _own(module) for module in self.model.modules()}

    def run(self, chosen: Collection[int]) -> None:
        """Wrap the modules ``chosen`` (by identity), children before parents, the root last and always."""
        found: list[tuple[str, nn.Module]] = []
        _post_order(self.model, "", found, {id(self.model)})
        shared: dict[str, list[tuple[str, str]]] = {}
        for prefix, module in found:
            if module is self.model or id(module) in chosen:
                self._wrap(prefix, module, shared)
        # Found children first, and listed as model.parameters() lists flat parameters: parents first.
        places = {prefix: number for number, (prefix, _) in enumerate(self.model.named_modules())}
        self.units.sort(key=lambda unit: places[unit.prefix])
        self.shared = [pair for unit in self.units for pair in shared[unit.prefix]]

    def _wrap(self, prefix: str, root: nn.Module, shared: dict[str, list[tuple[str, str]]]) -> None:
        managed = {
            id(param)
            for module in root.modules()
            for _, param in self.own[id(module)]
            if id(param) not in self.ignored and id(param) not in self._done
        }
        if not managed:
            return
        first: dict[int, str] = {}
        unit = Flattened(prefix, root, [])
        later: list[tuple[str, str]] = []
        touched: dict[tuple[int, str], tuple[nn.Module, nn.Parameter]] = {}
        again: dict[tuple[int, str], tuple[nn.Module, nn.Parameter]] = {}
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, param in self.own[id(module)]:
                if id(param) not in managed:
                    continue
                if id(param) in first:
                    later.append((joined(path, name), first[id(param)]))
                    again.setdefault((id(module), name), (module, param))
                    continue
                first[id(param)] = joined(path, name)
                unit.params.append((joined(path, name), param))
                self.names[id(module), name] = joined(path, name)
                touched[id(module), name] = (module, param)
        self.units.append(unit)
        shared[prefix] = later
        self._done |= managed if self.use_orig_params else set()
        self._register(touched | {slot: held for slot, held in again.items() if slot not in touched})

    def _register(self, touched: dict[tuple[int, str], tuple[nn.Module, nn.Parameter]]) -> None:
        """What flattening does to the modules' own parameters (``_safe_setattr_tensor_or_param``): each is deleted,
        and with ``use_orig_params=True`` set again, which puts it last."""
        for (module, name), (_, param) in touched.items():
            self.own[module] = [one for one in self.own[module] if one[0] != name]
            if self.use_orig_params:
                self.own[module].append((name, param))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``model.named_parameters()``: of the wrapped model with ``use_orig_params=True``, else of the original."""
        known = {id(param): name for unit in self.units for name, param in unit.params} if self.use_orig_params else {}
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            own = self.own[id(module)] if self.use_orig_params else _own(module)
            left = {id(param) for _, param in self.own[id(module)]}
            for name, param in own:
                held = self.names.get((id(module), name))
                if not self.use_orig_params and held is not None:
                    yield held, param
                elif id(param) in left and id(param) not in seen:
                    seen.add(id(param))
                    yield known.get(id(param), joined(path, name)), param

    def aliases(self, listed: Collection[str]) -> Iterator[tuple[str, str]]:
        """(later name, listed name) of parameters that are still in the modules under another name too."""
        names = {id(param): name for name, param in self.parameters()}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name, param in self.own[id(module)]:
                first = names.get(id(param))
                if first is not None and first in listed and first != joined(path, name):
                    yield joined(path, name), first


def _own(module: nn.Module) -> Named:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _post_order(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    for name, child in module.named_children():
        if id(child) not in seen:
            seen.add(id(child))
            _post_order(child, joined(prefix, name), found, seen)
    found.append((prefix, module))
