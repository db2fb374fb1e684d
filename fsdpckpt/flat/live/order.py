"""``model.parameters()`` of a model wrapped with ``use_orig_params=False``, as it was before the wrapping."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdpckpt.flat.live.states import Managed
from fsdpckpt.ir.names import clean, joined
from fsdpckpt.ir.units import FLAT_PARAM

__all__ = ["module_parameters"]


def module_parameters(model: nn.Module, managed: list[Managed]) -> Iterator[tuple[str, bool]]:
    """(original name, whether its place among its module's parameters is not known), module by module.

    Flat parameters remember the parameters of each module in order. Of ignored ones beside them only the order among
    themselves is known; they are listed first, as in the wrapped model.
    """
    held: dict[int, list[str]] = {}
    for one in managed:
        for info, name in zip(one.flat_param._param_infos, one.names, strict=True):
            held.setdefault(id(info.module), []).append(name)
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        plain = []
        for name, param in module.named_parameters(recurse=False):
            if name != FLAT_PARAM and id(param) not in seen:
                seen.add(id(param))
                plain.append(joined(clean(prefix), name))
        kept = held.get(id(module), [])
        mixed = bool(plain and kept)
        yield from ((name, mixed and number == 0) for number, name in enumerate([*plain, *kept]))
