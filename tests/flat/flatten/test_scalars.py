"""States that a flat parameter has once: who has to agree, on what, and how a disagreement is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.flat.flatten.states import require_equal_states
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, named

States = Mapping[str, Mapping[str, Tensor | Value]]
PARAMS = (
    named("top", 3), named("top2", 3), *(named(f"l.p{number}", 2, 2) for number in range(6)), named("l.one", 1),
    named("l.no", 0, 2), named("k.a", 1), named("k.b", 1),
)  # fmt: skip
UNITS = build_units(PARAMS, ("", "l", "k"), Settings(use_orig_params=False))
NUMBERS = np.asarray([3, 4, 3, 1.5], np.float32)


def tensor(index: int, *shape: int, dtype: str = "float32") -> Tensor:
    """A tensor at ``NUMBERS[index]``: of shape () and (1,), that number."""
    return Tensor(DTYPES[dtype], shape, Chunks.whole(file=0, offset=4 * index, shape=shape))


def of_mode(count: int) -> States:
    return {"l.p0": {"mode": "a"}, **{f"l.p{number}": {"mode": "b"} for number in range(1, count + 1)}}


# fmt: off
CASES: dict[str, tuple[States, tuple[str, ...]]] = {
    "equal bytes at other places": ({"l.p0": {"step": tensor(0)}, "l.p1": {"step": tensor(2)}}, ()),
    "other bytes": (
        {"l.p0": {"step": tensor(0)}, "l.p1": {"step": tensor(1)}},
        ("unit 'l', state step: 3.0 (float32) for l.p0; 4.0 (float32) for l.p1",)),
    "equal bytes of another dtype, and equal values of another type": (
        {"l.p0": {"step": tensor(0), "n": 1}, "l.p1": {"step": tensor(2, dtype="int32"), "n": True}},
        ("unit 'l', state step: 3.0 (float32) for l.p0; 1077936128 (int32) for l.p1",
         "unit 'l', state n: 1 for l.p0; True for l.p1")),
    "a tensor and a plain value": (
        {"l.p0": {"step": tensor(3)}, "l.p1": {"step": 1.5}},
        ("unit 'l', state step: 1.5 (float32) for l.p0; 1.5 for l.p1",)),
    "a tensor in the shape of its parameter and a plain value": (
        {"l.p0": {"odd": tensor(0, 2, 2)}, "l.p1": {"odd": None}},
        ("unit 'l', state odd: a tensor for l.p0; None for l.p1",)),
    "a number with and without a dimension": (
        {"l.p0": {"odd": tensor(0)}, "l.p1": {"odd": tensor(2, 1)}},
        ("unit 'l', state odd: 3.0 (float32) for l.p0; 3.0 (float32, shape [1]) for l.p1",)),
    "a state that one of them lacks, and one in which they agree": (
        {"l.p0": {"max": tensor(0, 2, 2), "calls": 1}, "l.p1": {"calls": 1}},
        ("unit 'l', state max: a tensor for l.p0; no such state for l.p1",)),
    "no number, which is equal to itself": ({"l.p0": {"x": float("nan")}, "l.p1": {"x": float("nan")}}, ()),
    "four of each value are named": (
        of_mode(4), ("unit 'l', state mode: 'a' for l.p0; 'b' for l.p1, l.p2, l.p3, l.p4",)),
    "four of five": (
        of_mode(5), ("unit 'l', state mode: 'a' for l.p0; 'b' for l.p1, l.p2, l.p3, l.p4 and 1 more",)),
    "units need not agree with each other": ({"top": {"step": tensor(0)}, "l.p1": {"step": tensor(1)}}, ()),
    "the root is named as such": (
        {"top": {"n": 1}, "top2": {"n": 2}}, ("the root unit, state n: 1 for top; 2 for top2",)),
    "a parameter without elements took no step": ({"l.p0": {"step": tensor(0)}, "l.no": {"step": tensor(1)}}, ()),

    # Tensors of one element, which may be the state of a parameter of one element
    "a step, also of a parameter of one element": (
        {"l.p0": {"step": tensor(0, 1)}, "l.one": {"step": tensor(1, 1)}},
        ("unit 'l', state step: 3.0 (float32, shape [1]) for l.p0; 4.0 (float32, shape [1]) for l.one",)),
    "another number": (
        {"l.p0": {"count": tensor(0, 1)}, "l.p1": {"count": tensor(1, 1)}},
        ("unit 'l', state count: 3.0 (float32, shape [1]) for l.p0; 4.0 (float32, shape [1]) for l.p1",)),
    "a number without dimensions": (
        {"l.p0": {"count": tensor(0)}, "l.one": {"count": tensor(1)}},
        ("unit 'l', state count: 3.0 (float32) for l.p0; 4.0 (float32) for l.one",)),
    "a number of a parameter of one element among others": (
        {"l.p0": {"count": tensor(0, 1)}, "l.one": {"count": tensor(1, 1)}},
        ("unit 'l', state count: 3.0 (float32, shape [1]) for l.p0; 4.0 (float32, shape [1]) for l.one",)),
    "an equal one": ({"l.p0": {"count": tensor(0, 1)}, "l.one": {"count": tensor(2, 1)}}, ()),
    "parameters of one element share their step and no other state": (
        {f"k.{name}": {"step": tensor(at, 1), "exp_avg": tensor(at, 1)} for at, name in enumerate("ab")},
        ("unit 'k', state step: 3.0 (float32, shape [1]) for k.a; 4.0 (float32, shape [1]) for k.b",)),

    # What is each one's own
    "states in the shapes of the parameters": (
        {"l.p0": {"exp_avg": tensor(0, 2, 2)}, "l.p1": {"exp_avg": tensor(0, 2, 2, dtype="bfloat16")}}, ()),
    "a number for one, and the state of a parameter of one element": (
        {"l.p0": {"exp_avg": tensor(0)}, "l.one": {"exp_avg": tensor(1, 1)}},
        ("unit 'l', state exp_avg: 3.0 (float32) for l.p0; 4.0 (float32, shape [1]) for l.one",)),
    "scales of a single block": (
        {f"l.p{at}": {"state1": tensor(at, 2, 2, dtype="uint8"), "absmax1": tensor(at, 1)} for at in range(2)}, ()),
    "factors": ({"l.p0": {"row": tensor(0, 2)}, "l.p1": {"row": tensor(1, 2)}}, ()),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_a_unit_agree_on_what_their_flat_parameter_has_once(name: str, tmp_path: Path) -> None:
    states, says = CASES[name]
    (tmp_path / "data").write_bytes(NUMBERS.tobytes())
    optim = Optimizer.of({key: dict(entry) for key, entry in states.items()}, None)
    source = replace(
        checkpoint(1, optim=optim, layout=Layout.FULL), files=(Stored(str(tmp_path / "data"), NUMBERS.nbytes),)
    )
    found: tuple[str, ...] = ()
    with Sources() as sources:
        require_equal_states(replace(source, optim=None), UNITS, sources)
        try:
            require_equal_states(source, UNITS, sources)
        except SourceUnsupportedError as error:
            found = tuple(error.details)
            assert found
    assert found == says
