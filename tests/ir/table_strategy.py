"""Hypothesis strategy: checkpoints with optimizers of every form that a reader may give."""

from __future__ import annotations

from hypothesis import strategies as st

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer, OwnValue, ParamKey
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, Value

__all__ = ["any_checkpoint"]

NAMES = ("w", "b", "l.0.w", "l.10.w", "l.2.w", "_orig_mod.w", "l._orig_mod.0.b", "module.b")


def _tensor(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
    offset = draw(st.integers(0, 3)) * 512  # some tensors are stored in one place
    dtype = DTYPES[draw(st.sampled_from(["float32", "bfloat16", "int64"]))]
    sharded = draw(st.sampled_from([True, False, None]))
    return Tensor(dtype, shape, Chunks.whole(file=0, offset=offset, shape=shape), sharded)


def _states(draw: st.DrawFn) -> dict[str, Tensor | Value]:
    names = draw(st.permutations(["step", "exp_avg", "exp_avg_sq"]))[: draw(st.integers(0, 3))]
    return {name: _tensor(draw) if draw(st.booleans()) else draw(st.integers()) for name in names}


def _sequence(draw: st.DrawFn, items: list[Value]) -> Value:
    return tuple(items) if draw(st.booleans()) else items


@st.composite
def any_checkpoint(draw: st.DrawFn) -> Checkpoint:
    """Ids or names, groups or none, ``param_names`` in their order or another, entries and values of a user, ties."""
    model = None
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(NAMES), unique=True))
        params = {name: _tensor(draw) if draw(st.booleans()) else draw(st.text()) for name in names}
        model = ModelState(params, draw(st.sampled_from([None, {"": {"version": 1}}])))
    return Checkpoint(
        Origin("SRC", Layout.FULL, Container.TORCH, "plain", 1),
        files=(),
        model=model,
        optim=_optimizer(draw) if draw(st.booleans()) else None,
    )


def _optimizer(draw: st.DrawFn) -> Optimizer:
    by_id = draw(st.booleans())
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    keys: list[ParamKey] = [*draw(st.permutations(range(len(names))))] if by_id else [*names]
    groups: list[dict[Key, Value]] | None = None
    if draw(st.booleans()):
        groups, start = [], 0
        for number in range(draw(st.integers(0, 3))):
            end = draw(st.integers(start, len(keys)))
            listed = {"params": _sequence(draw, [*keys[start:end]])} if draw(st.integers(0, 5)) else {}
            entries: dict[Key, Value] = {"lr": number, **listed, "betas": (0.9, 0.95)}
            if draw(st.booleans()):
                words = draw(st.permutations(names[start:end]))
                lead = draw(st.sampled_from(["", "module."]))
                entries["param_names"] = _sequence(draw, [f"{lead}{word}" for word in words])
            groups.append(entries)
            start = end
    stored = draw(st.permutations(keys))[: draw(st.integers(0, len(keys)))]
    state = {key: _states(draw) for key in stored}
    if draw(st.booleans()):
        state["user"] = OwnValue(3) if draw(st.booleans()) else {"seen": 1}
    return Optimizer.of(state, groups, {"by_user": 1} if draw(st.booleans()) else {})
