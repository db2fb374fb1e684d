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
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, named

PARAMS = (
    named("top", 3),
    *(named(f"l.p{number}", 2, 2) for number in range(6)),
    named("l.one", 1),
    named("l.no", 0, 2),
)
UNITS = build_units(PARAMS, ("", "l"), Settings(use_orig_params=False))
NUMBERS = np.asarray([3, 4, 3, 1.5], np.float32)


def number(index: int, *shape: int, dtype: str = "float32") -> Tensor:
    """The tensor of one element at ``NUMBERS[index]``."""
    return Tensor(DTYPES[dtype], shape, Chunks.whole(file=0, offset=4 * index, shape=shape))


def details(
    states: Mapping[str, Mapping[str, Tensor | Value]], tmp_path: Path, units: Units = UNITS
) -> tuple[str, ...]:
    """What is reported of these states; nothing where they agree."""
    path = tmp_path / "data"
    path.write_bytes(NUMBERS.tobytes())
    held: dict[ParamKey, dict[str, Tensor | Value]] = {name: dict(entry) for name, entry in states.items()}
    source: Checkpoint = replace(
        checkpoint(1, optim=Optimizer.of(held, None), layout=Layout.FULL), files=(Stored(str(path), 16),)
    )
    with Sources() as sources:
        require_equal_states(replace(source, optim=None), units, sources)
        try:
            require_equal_states(source, units, sources)
        except SourceUnsupportedError as error:
            assert error.details
            return error.details
    return ()


def test_equal_bytes_at_other_places_agree_and_other_bytes_do_not(tmp_path: Path) -> None:
    assert details({"l.p0": {"step": number(0)}, "l.p1": {"step": number(2)}}, tmp_path) == ()
    assert details({"l.p0": {"step": number(0)}, "l.p1": {"step": number(1)}}, tmp_path) == (
        "unit 'l', state step: 3.0 (float32) for l.p0; 4.0 (float32) for l.p1",
    )


def test_equal_bytes_of_another_dtype_or_type_do_not_agree(tmp_path: Path) -> None:
    states: dict[str, dict[str, Tensor | Value]] = {
        "l.p0": {"step": number(0), "n": 1}, "l.p1": {"step": number(2, dtype="int32"), "n": True}
    }  # fmt: skip
    assert [text.split(":")[0] for text in details(states, tmp_path)] == ["unit 'l', state step", "unit 'l', state n"]


def test_a_tensor_and_a_plain_value_are_both_shown(tmp_path: Path) -> None:
    assert details({"l.p0": {"step": number(3)}, "l.p1": {"step": 1.5}}, tmp_path) == (
        "unit 'l', state step: 1.5 (float32) for l.p0; 1.5 for l.p1",
    )


@pytest.mark.parametrize(("count", "others"), [(4, "l.p1, l.p2, l.p3, l.p4"), (5, "l.p1, l.p2, l.p3, l.p4 and 1 more")])
def test_four_of_each_value_are_named(tmp_path: Path, count: int, others: str) -> None:
    states: dict[str, dict[str, Tensor | Value]] = {f"l.p{n}": {"mode": "b"} for n in range(1, count + 1)}
    assert details({"l.p0": {"mode": "a"}, **states}, tmp_path) == (
        f"unit 'l', state mode: 'a' for l.p0; 'b' for {others}",
    )


def test_units_need_not_agree_with_each_other(tmp_path: Path) -> None:
    assert details({"top": {"step": number(0)}, "l.p1": {"step": number(1)}}, tmp_path) == ()


def test_the_root_is_named_as_such(tmp_path: Path) -> None:
    params = (named("a", 3), named("b", 3))
    units = build_units(params, ("",), Settings(use_orig_params=False))
    held: dict[ParamKey, dict[str, Tensor | Value]] = {"a": {"n": 1}, "b": {"n": 2}}
    with Sources() as sources, pytest.raises(SourceUnsupportedError) as caught:
        require_equal_states(checkpoint(1, optim=Optimizer.of(held, None)), units, sources)
    assert caught.value.details == ("the root unit, state n: 1 for a; 2 for b",)


def test_a_step_of_one_element_is_compared_even_with_a_parameter_of_one_element(tmp_path: Path) -> None:
    assert len(details({"l.p0": {"step": number(0, 1)}, "l.one": {"step": number(1, 1)}}, tmp_path)) == 1
    assert len(details({"l.p0": {"count": number(0, 1)}, "l.p1": {"count": number(1, 1)}}, tmp_path)) == 1
    assert len(details({"l.p0": {"count": number(0)}, "l.one": {"count": number(1)}}, tmp_path)) == 1


def test_parameters_of_one_element_share_their_step_and_no_other_state(tmp_path: Path) -> None:
    units = build_units((named("a", 1), named("b", 1)), ("",), Settings(use_orig_params=False))
    states = {name: {"step": number(at, 1), "exp_avg": number(at, 1)} for at, name in enumerate("ab")}
    assert details(states, tmp_path, units) == (
        "the root unit, state step: 3.0 (float32, shape [1]) for a; 4.0 (float32, shape [1]) for b",
    )


def test_a_state_in_the_shape_of_its_parameter_is_each_ones_own(tmp_path: Path) -> None:
    assert details({"l.p0": {"exp_avg": number(0)}, "l.one": {"exp_avg": number(1, 1)}}, tmp_path) != ()
    square = Tensor(DTYPES["float32"], (2, 2), Chunks.whole(file=0, offset=0, shape=(2, 2)))
    other = Tensor(DTYPES["bfloat16"], (2, 2), Chunks.whole(file=0, offset=0, shape=(2, 2)))
    assert details({"l.p0": {"exp_avg": square}, "l.p1": {"exp_avg": other}}, tmp_path) == ()


def test_a_number_for_each_parameter_is_compared_with_that_of_a_parameter_of_one_element(tmp_path: Path) -> None:
    assert details({"l.p0": {"count": number(0, 1)}, "l.one": {"count": number(2, 1)}}, tmp_path) == ()
    assert details({"l.p0": {"count": number(0, 1)}, "l.one": {"count": number(1, 1)}}, tmp_path) == (
        "unit 'l', state count: 3.0 (float32, shape [1]) for l.p0; 4.0 (float32, shape [1]) for l.one",
    )


def test_scales_of_a_single_block_are_each_ones_own(tmp_path: Path) -> None:
    states: dict[str, dict[str, Tensor | Value]] = {
        f"l.p{at}": {"state1": number(at, 2, 2, dtype="uint8"), "absmax1": number(at, 1)} for at in range(2)
    }
    assert details(states, tmp_path) == ()


def test_factors_of_a_state_are_each_ones_own(tmp_path: Path) -> None:
    rows = [Tensor(DTYPES["float32"], (2,), Chunks.whole(file=0, offset=at, shape=(2,))) for at in (0, 4)]
    assert details({"l.p0": {"row": rows[0]}, "l.p1": {"row": rows[1]}}, tmp_path) == ()


def test_a_parameter_without_elements_took_no_step(tmp_path: Path) -> None:
    assert details({"l.p0": {"step": number(0)}, "l.no": {"step": number(1)}}, tmp_path) == ()
