"""What each entry among a parameter's states is of a quantized one, whichever library made it."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.quantized import Blockwise, joined_states, split_state
from fsdpckpt.ir.state_parts import StateParts, state_parts
from fsdpckpt.ir.state_shapes import shown_shapes
from fsdpckpt.ir.torchao import Blocks
from fsdpckpt.ir.values import Global
from tests.ir.checkpoints import tensor

FOUR_BITS = Blocks(
    Global("torchao.optim.subclass_4bit", "OptimState4bit"), DTYPES["float32"], (6, 4), block=8, signed=True
)
TORCHAO: dict[Any, Any] = split_state(
    "exp_avg", FOUR_BITS, {"codes": tensor(3, 4, dtype="uint8"), "scale": tensor(3, 1), "qmap": tensor(16)}
)
BITSANDBYTES = {"state1": tensor(256, dtype="uint8"), "absmax1": tensor(1), "qmap1": tensor(256)}
ADAM = {"step": tensor(), "exp_avg": tensor(6, 4), "state1": tensor(256), "qmap1": tensor(256)}


OF_BITSANDBYTES = StateParts(scales={"absmax1": "state1"}, maps={"qmap1": "state1"})


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (
            TORCHAO,
            StateParts(
                {"exp_avg.codes": "exp_avg"},
                {"exp_avg.scale": "exp_avg"},
                {"exp_avg.qmap": "exp_avg"},
                shapes={"exp_avg": (6, 4)},
            ),
        ),
        (BITSANDBYTES, OF_BITSANDBYTES),
        ({"__bnb_optimizer_quant_state__": BITSANDBYTES}, OF_BITSANDBYTES),
        (ADAM, StateParts()),
    ],
)
def test_each_entry_is_a_part_of_its_state_in_every_library(entry: dict[str, Any], parts: StateParts) -> None:
    assert state_parts(entry) == parts


def test_parts_show_the_shape_of_their_parameter_or_none() -> None:
    shown = {(each.name, each.state): each.shape for each in shown_shapes({**TORCHAO, **BITSANDBYTES})}
    assert shown == {
        ("exp_avg.codes", "exp_avg"): (6, 4),
        ("exp_avg.scale", "exp_avg"): (6, 4),
        ("state1", "state1"): (256,),
    }


def test_split_states_are_joined_again() -> None:
    joined = dict(joined_states({"step": 3, **TORCHAO}))
    assert list(joined) == ["step", "exp_avg"]
    state = joined["exp_avg"]
    assert isinstance(state, Blockwise) and state.blocks == FOUR_BITS
    assert {part: one.shape for part, one in state.tensors.items()} == {"codes": (3, 4), "scale": (3, 1), "qmap": (16,)}
