"""Knows which states of an optimizer show the shape of their parameter: the one place that decides it.

Most states *mirror* their parameter: one element for each of its elements, in its shape, as Adam's moments. They are
known by name (``_MIRRORS``: those of torch.optim and of the usual libraries; each was compared with what the library
makes for matrices, vectors, convolutions and scalars). A state that mirrors has its parameter's shape, except

- one value (NovoGrad's second moment), or one for each row (Nero, NorMuon: the first dimension, then ones);
- no element (a state that the library makes later);
- the same elements with neighbouring dimensions joined (heavyball, SOAP with ``merge_dims``);
- twice the elements in front (bitsandbytes' AdEMAMix: ``state1`` is two moments);
- the states of a parameter with a low-rank projection (GaLore, APOLLO: the group has a ``rank``, the entry a
  ``projector``) or of masked elements alone (SPAM: the entry has a ``mask``).

Of every other state the shape proves nothing about one parameter: counters, factors (Adafactor, CAME, SM3),
preconditioners and their lists (Shampoo, SOAP, Kron), bitsandbytes' scales and maps, Prodigy's samples, and LBFGS's
vectors, which span all parameters. torchao's codes and scales stand for a state of the shape that they record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from fsdpckpt.ir.counters import is_counter
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value

Shape: TypeAlias = tuple[int, ...]
StateShapes: TypeAlias = frozenset[Shape]
"""The shapes of one parameter's states; empty if none shows the parameter's shape."""

_MIRRORS = frozenset(
    {
        # torch.optim
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta"),
        *("exp_inf", "ax", "prev", "step_size"),
        # schedulefree, pytorch_optimizer, bitsandbytes; fp32 masters beside the moments
        *("z", "exp_avg_slow", "exp_avg_diff", "exp_avg_var", "exp_hessian_diag_sq", "hessian", "previous_grad"),
        *("slow_buffer", "lookahead_params", "moments", "momentum", "state1", "state2"),
        *("master_param", "master_params", "master_weight", "fp32_param"),
    }
)
# Of LBFGS, which has them for its first parameter alone: until a gradient is not zero only the count.
_SPANNING = frozenset({"prev_flat_grad", "old_dirs", "func_evals"})
_FACTORS = frozenset({"row", "col", "r", "c"})  # words in the names of factored states
_DOUBLED = "state1"
_LOW_RANK_GROUP = "rank"
_NOT_ALL_ELEMENTS = frozenset({"projector", "mask"})


class ShownShape(NamedTuple):
    """A tensor among the states of a parameter that shows a shape for it."""

    name: str
    state: str  # that it is or belongs to
    tensor: Tensor
    shape: tuple[int, ...]


def shown_shapes(entry: Mapping[str, object]) -> Iterator[ShownShape]:
    """Each tensor in ``entry`` that has dimensions, with the shape that its parameter would have.

    For torchao's codes and scales that is the shape of their state. Counters, maps and bitsandbytes' scales show none.
    """
    parts = state_parts(entry)
    for name, leaf in entry.items():
        if not isinstance(leaf, Tensor) or not leaf.ndim or is_counter(name, leaf) or name in parts.maps:
            continue
        state = parts.codes.get(name) or parts.scales.get(name, name)
        if state == name:
            yield ShownShape(name, name, leaf, leaf.shape)
        elif state in parts.shapes:
            yield ShownShape(name, state, leaf, parts.shapes[state])


class ShownShapes:
    """What the states of ``optim`` show about the shapes of its parameters."""

    def __init__(self, optim: Optimizer) -> None:
        self._state = optim.state
        self._in_low_rank = {
            key
            for group, keys in zip(optim.groups or (), optim.in_groups(), strict=False)
            if isinstance(group.settings.get(_LOW_RANK_GROUP), int)
            for key in keys
        }
        self._shaped = shaped_states(optim)

    def of(self, key: ParamKey) -> StateShapes:
        """The shapes of which one is the parameter's, or all are factors of it; empty if nothing shows it.

        A parameter whose moments have no dimensions has none either.
        """
        states = self._state.get(key, {})
        if self._covers_no_parameter(key, states):
            return frozenset()
        whole = list(_whole_states(states))
        shapes = frozenset(shown.shape for shown in whole if mirrors(shown.state))
        if not shapes:
            shapes = frozenset(shown.shape for shown in whole if _FACTORS.isdisjoint(shown.name.split("_")))
        if shapes:
            return shapes
        scalars = [name for name, leaf in states.items() if isinstance(leaf, Tensor) and not leaf.ndim]
        return frozenset({()}) if any(name in self._shaped for name in scalars) else frozenset()

    def mirrored(self, key: ParamKey) -> Iterator[tuple[str, Shape]]:
        """Each state of the parameter that mirrors it: its name and shape."""
        states = self._state.get(key, {})
        if not self._covers_no_parameter(key, states):
            for shown in _whole_states(states):
                if mirrors(shown.state):
                    yield shown.name, shown.shape

    def _covers_no_parameter(self, key: ParamKey, states: Mapping[str, Tensor | Value]) -> bool:
        """Whether the states are known to be of a projection, of chosen elements alone, or of all parameters."""
        return (
            key in self._in_low_rank or not _NOT_ALL_ELEMENTS.isdisjoint(states) or spanning_state(states) is not None
        )


def mirrors(name: str) -> bool:
    """Whether a state of this name has its parameter's shape."""
    return name in _MIRRORS


def spanning_state(states: Mapping[str, Tensor | Value]) -> str | None:
    """The name of a state that is one for all parameters, as vectors that join them in their order
    (``torch.optim.LBFGS``); None if there is none.
    """
    return next((name for name in states if name in _SPANNING), None)


def spanning_key(optim: Optimizer) -> tuple[ParamKey, str] | None:
    """The parameter that holds the states of all, and the first of these; None if each has its own."""
    found = ((key, spanning_state(states)) for key, states in optim.state.items())
    return next(((key, state) for key, state in found if state is not None), None)


def without_states(optim: Optimizer) -> list[ParamKey]:
    """The parameters that a group lists and that have no states although others have.

    Empty for an optimizer that keeps no states at all, and for one that keeps those of all with its first parameter.
    """
    if not any(optim.state.values()) or spanning_key(optim) is not None:
        return []
    return [key for key in optim.grouped_keys() if not optim.state.get(key)]


def _whole_states(states: Mapping[str, Tensor | Value]) -> Iterator[ShownShape]:
    """``shown_shapes`` without slices of flat parameters, which have a length and no shape."""
    for shown in shown_shapes(states):
        if not isinstance(shown.tensor.cut, (Slices, OneSlice)):
            yield shown


def may_mirror(name: str, state: Shape, parameter: Shape) -> bool:
    """Whether the state ``name`` of the first shape may mirror a parameter of the second. The rules are in the
    module's text.
    """
    if state == parameter or prod(state) in (0, 1) or (name == _DOUBLED and state == (2, *parameter)):
        return True
    if len(state) == len(parameter) and state[0] == parameter[0] and set(state[1:]) == {1}:
        return True
    return _is_reshaped(state, parameter)


def _is_reshaped(state: Shape, parameter: Shape) -> bool:
    """Whether one of the shapes is the other with neighbouring dimensions joined."""
    first, second = _places_of_cuts(state), _places_of_cuts(parameter)
    return prod(state) == prod(parameter) and (first <= second or second <= first)


def _places_of_cuts(shape: Shape) -> set[int]:
    """The products of the leading dimensions, without those of one element: (64, 3, 1, 3) has 64, 192 and 576."""
    return {prod(shape[: dim + 1]) for dim, size in enumerate(shape) if size != 1}


def shaped_states(optim: Optimizer) -> frozenset[str]:
    """The names of states that have dimensions for some parameter, as moments do."""
    return frozenset(
        name
        for states in optim.state.values()
        for name, leaf in states.items()
        if isinstance(leaf, Tensor) and leaf.ndim and not is_counter(name, leaf)
    )


def has_scalars(optim: Optimizer) -> bool:
    """Whether the states show a parameter without dimensions (CLIP's ``logit_scale``)."""
    shown = ShownShapes(optim)
    return any(() in shown.of(key) for key in optim.state)


def fits(shape: Shape | None, state_shapes: StateShapes) -> bool:
    """Whether a parameter of ``shape`` (None: not known) may have states of these shapes.

    One of them must be its own shape, or there are several and all can be factors of it (as Adafactor's). A single
    other shape never fits: it belongs to another parameter.
    """
    if shape is None or not state_shapes or shape in state_shapes:
        return True
    return len(state_shapes) > 1 and all(_is_factor(part, shape) for part in state_shapes)


def _is_factor(part: Shape, whole: Shape) -> bool:
    """Whether ``part`` is ``whole`` with some dimensions dropped, or with some shrunk to 1."""
    if len(part) == len(whole):
        return all(length in (1, size) for length, size in zip(part, whole, strict=True))
    remaining = iter(whole)
    return len(part) < len(whole) and all(size in remaining for size in part)  # in the same order


def is_part(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of the first shape can be a part of one of the second."""
    return len(part) == len(whole) and all(size <= extent for size, extent in zip(part, whole, strict=True))
