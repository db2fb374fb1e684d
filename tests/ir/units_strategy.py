"""Hypothesis strategy: units of random module trees, as FSDP1 could have made them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Strategy, Unit, Units

__all__ = ["any_units"]

WORDS = ("a", "layers", "0", "1", "weight_v", "é", 'q"\\', "x y")
FLOATS = [DTYPES[name] for name in ("float32", "bfloat16", "float64", "float16")]


@st.composite
def any_units(draw: st.DrawFn) -> Units:
    """Consistent units: nested prefixes, strides, frozen and shared parameters, several groups."""
    paths = draw(st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), max_size=4))
    prefixes = list(dict.fromkeys(["", *(".".join(path) for path in paths)]))
    use_orig_params = draw(st.booleans())
    shard_size = draw(st.none() | st.integers(1, 4))
    units = [
        _unit(draw, prefix, use_orig_params=use_orig_params, grouped=shard_size is not None) for prefix in prefixes
    ]
    unmanaged = tuple(_param(draw, f"free{n}", draw(st.sampled_from(FLOATS))) for n in range(draw(st.integers(0, 2))))
    names = [param.name for unit in units for param in unit.params] + [param.name for param in unmanaged]
    parameters = _interleaved(draw(st.permutations(names)), units)
    built = units_of_lists(
        units=tuple(units),
        use_orig_params=use_orig_params,
        parameters=parameters,
        unmanaged=unmanaged,
        shared=tuple((f"tied{n}", draw(st.sampled_from(names))) for n in range(draw(st.integers(0, 2)))),
        world_size=None if shard_size is None and draw(st.booleans()) else (shard_size or 1) * draw(st.integers(1, 9)),
        shard_size=shard_size,
    )
    keys = draw(st.permutations(built.optimizer_keys()))
    cut = draw(st.integers(0, len(keys)))
    groups = draw(st.sampled_from([None, (), (tuple(keys[:cut]), tuple(keys[cut:])), (tuple(keys[:cut]),)]))
    return built.with_groups(groups)


def _interleaved(names: Sequence[str], units: Sequence[Unit]) -> tuple[str, ...]:
    """The units mixed, each with its own parameters in their order."""
    found = list(names)
    for unit in units:
        own = [param.name for param in unit.params]
        for at, name in zip(sorted(map(found.index, own)), own, strict=True):
            names = [*names[:at], name, *names[at + 1 :]]
    return tuple(names)


def _unit(draw: st.DrawFn, prefix: str, *, use_orig_params: bool, grouped: bool) -> Unit:
    dtype = draw(st.sampled_from(FLOATS))
    inside = f"{prefix}." if prefix else ""
    frozen = draw(st.booleans())
    params = []
    for number in range(draw(st.integers(1, 3))):
        requires_grad = draw(st.booleans()) if use_orig_params else not frozen
        params.append(_param(draw, f"{inside}p{number}", dtype, requires_grad=requires_grad, smallest=int(not number)))
    strategies = [Strategy.HYBRID_SHARD, Strategy.NO_SHARD] if grouped else list(Strategy)
    return Unit(prefix, tuple(params), draw(st.sampled_from(strategies)), draw(st.none() | st.sampled_from(FLOATS)))


def _param(draw: st.DrawFn, name: str, dtype: object, *, requires_grad: bool = True, smallest: int = 0) -> Parameter:
    """``smallest``: of its dimensions; FSDP1 refuses a unit without elements."""
    shape = tuple(draw(st.lists(st.integers(smallest, 9), min_size=1, max_size=4)))
    stride = None
    if draw(st.booleans()):
        steps, step = [0] * len(shape), 1
        for dim in draw(st.permutations(range(len(shape)))):
            steps[dim] = step
            step *= max(shape[dim], 1)
        stride = tuple(steps)
    return Parameter(name, shape, dtype, stride, requires_grad)  # type: ignore[arg-type]
