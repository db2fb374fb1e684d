"""Whether units describe the model that a checkpoint of whole tensors holds: names, shapes, dtypes, order, groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fsdpckpt.flat.order import out_of_order
from fsdpckpt.flat.units.build import name_groups
from fsdpckpt.flat.units.names import NameList, model_names
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, OptimState, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import UnitParam, Units
from fsdpckpt.ir.values import Value

__all__ = ["contradictions", "listed_names"]


def contradictions(units: Units, checkpoint: Checkpoint, *, dtype: DType | None = None) -> list[str]:
    """Everything in ``checkpoint`` (logical, its optimizer keyed by name) that contradicts ``units``; none if they fit.

    ``dtype``: what the model section is cast to, None when it is not.
    """
    names = model_names(checkpoint, "the model section")
    found = list(_model(units, names, dtype)) if names is not None else []
    if names is not None and names.ordered and checkpoint.layout is not Layout.FLATTENED:
        found.extend(out_of_order(units, [param.name for param in names.params]))
    if checkpoint.optim is not None and checkpoint.optim.key_type == "name":
        found.extend(_optimizer(units, checkpoint.optim))
        found.extend(_groups(units, checkpoint.optim))
    return found


def _model(units: Units, names: NameList, dtype: DType | None) -> Iterator[str]:
    params, later = units.params(), {name for name, _ in units.shared}
    tied = dict(names.shared)
    held = {param.name: param for param in names.params}
    for name, param in params.items():
        found = held.get(tied.get(name, name))
        if found is None:
            yield f"the units have {name}, the model section has not"
        elif found.shape != param.shape:
            yield f"{name}: {list(param.shape)} by the units, {list(found.shape)} in the model section"
        elif (written := dtype if dtype is not None and found.dtype.floating else found.dtype) != param.dtype:
            yield f"{name}: {param.dtype.name} by the units, {written.name} in the model section"
        elif param.order != found.unit_param().order and found.stride is not None:
            yield f"{name}: strides {param.stride} by the units, {found.stride} in the model section"
    for name, found in held.items():
        if found.sharded and name not in params and name not in later:
            yield f"the model section has a parameter {name}, the units have not"


def _optimizer(units: Units, optim: OptimState) -> Iterator[str]:
    params = units.params()
    listed = {name for group in listed_names(optim) for name in group}
    for key, states in optim.state.items():
        name = clean(str(key))
        param = params.get(name)
        tensors = [leaf for leaf in states.values() if isinstance(leaf, Tensor)]
        if param is None:
            # What no group lists is a user's own entry beside the parameters' (TorchRec's keyed optimizers have them).
            if tensors and (name in listed or not listed):
                yield f"the optimizer has states of {name}, which the units do not have"
        else:
            yield from _states(name, param, states)


def _states(name: str, param: UnitParam, states: Mapping[str, Tensor | Value]) -> Iterator[str]:
    """States of other shapes than the parameter's exist (factors); all of one other shape contradict it."""
    shapes = {leaf.shape for leaf in states.values() if isinstance(leaf, Tensor) and leaf.numel > 1}
    if len(shapes) == 1 and param.shape not in shapes:
        yield f"{name}: {list(param.shape)} by the units, its optimizer states are {list(next(iter(shapes)))}"


def _groups(units: Units, optim: OptimState) -> Iterator[str]:
    known = set(units.params())
    listed = listed_names(optim)
    unknown = [name for group in listed for name in group if name not in known]
    stated = {clean(str(key)) for key, states in optim.state.items() if states}  # of these it is said already
    yield from (f"the param groups list {name}, which the units do not have" for name in unknown if name not in stated)
    own = name_groups(units)
    if own is None or unknown or not listed:
        return
    if len(own) != len(listed):
        yield f"the optimizer has {len(listed)} param groups, by the units {len(own)}"
        return
    for number, (names, by_units) in enumerate(zip(listed, own, strict=True)):
        for name in sorted(set(names) - set(by_units)):
            yield f"param group {number} lists {name}, by the units it does not"


def listed_names(optim: OptimState) -> Sequence[Sequence[str]]:
    """The names that each param group lists; empty when there are no groups."""
    return [[clean(str(key)) for key in group_params(group) or ()] for group in optim.param_groups or ()]
