"""The form that the states of several parameters have in common: what a further parameter's would look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.ir.checkpoint import ParamKey
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.planner.state_shapes import Shape

__all__ = ["Known", "ParamOf", "Read", "StateForm", "States", "ZeroForm", "state_form"]

Read: TypeAlias = Callable[[Tensor], bytes]
States: TypeAlias = Mapping[str, Tensor | Value]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a parameter. ``managed`` as in ``Tensor``."""

    shape: Shape
    dtype: DType
    managed: bool | None


ParamOf: TypeAlias = Callable[[ParamKey], Known | None]


@dataclass(frozen=True, slots=True)
class ZeroForm:
    """A state in the shape of its parameter. ``dtype``: None for the parameter's own."""

    dtype: DType | None
    managed: bool | None


@dataclass(frozen=True, slots=True)
class StateForm:
    """``states``, in order: a form for those in the parameter's shape, the value itself for what all have equal.

    ``doubts``: why there is no common form.
    """

    states: Mapping[str, ZeroForm | Tensor | Value]
    doubts: tuple[str, ...]


def state_form(siblings: Mapping[ParamKey, States], param_of: ParamOf, read: Read | None) -> StateForm:
    """The common form of the states of ``siblings``. ``read`` gives the bytes of a 0-dim tensor."""
    if not siblings:
        return StateForm({}, ("no other parameter of its group has states to go by",))
    if len({frozenset(states) for states in siblings.values()}) > 1:
        return StateForm({}, ("the others of its group do not have the same states",))
    doubts: list[str] = []
    found: dict[str, ZeroForm | Tensor | Value] = {}
    for name, first in next(iter(siblings.values())).items():
        values = {key: states[name] for key, states in siblings.items()}
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        if len(tensors) == len(values) and any(tensor.ndim for tensor in tensors.values()):
            found[name] = _zero_form(name, tensors, param_of, doubts)
            continue
        found[name] = first
        if len({_identity(value, read) for value in values.values()}) > 1:
            doubts.append(f"the others of its group do not agree on {name}")
    return StateForm(found, tuple(doubts))


def _identity(value: Tensor | Value, read: Read | None) -> tuple[str, object]:
    """Equal for values that are equal. Without ``read`` no two tensors are known to be."""
    if isinstance(value, Tensor):
        return value.dtype.name, read(value) if read is not None and not value.ndim else id(value)
    return type(value).__name__, repr(value)


def _zero_form(name: str, tensors: Mapping[ParamKey, Tensor], param_of: ParamOf, doubts: list[str]) -> ZeroForm:
    """The dtype that all have; else the parameter's own, where each has that of its parameter."""
    params = {key: param_of(key) for key in tensors}
    for key, tensor in tensors.items():
        known = params[key]
        if known is not None and known.shape != tensor.shape:
            doubts.append(f"the state {name} of {key} does not have the shape of its parameter")
            break
    dtypes = {tensor.dtype.name: tensor.dtype for tensor in tensors.values()}
    managed = next(iter(tensors.values())).managed
    if len(dtypes) == 1:
        return ZeroForm(next(iter(dtypes.values())), managed)
    if any((known := params[key]) is None or known.dtype is not tensor.dtype for key, tensor in tensors.items()):
        doubts.append(f"{name} has several dtypes in its group: {', '.join(dtypes)}")
    return ZeroForm(None, managed)
