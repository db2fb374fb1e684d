"""Units that are not those of a checkpoint are refused with every difference, before anything is laid out."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from fsdpckpt.flat.units.request import contradictions
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit, Units
from tests.flat.flat_source import ORDER, Model, param, units
from tests.ir.optimizers import with_entry


def differences(of: Units, checkpoint: Checkpoint) -> list[str]:
    """All but those in dtype, which these models of random bits have everywhere."""
    return [text for text in contradictions(of, checkpoint) if DTYPES["float32"].name not in text]


def in_units_order(model: Model) -> Model:
    model.weights = OrderedDict((name, model.weights[name]) for name in ORDER)
    return model


@pytest.mark.parametrize("orig", [True, False])
def test_names_and_shapes_of_another_model(orig):
    root = Unit("", (param("top"), param("a.weight", (3, 5)), param("gone", (2,)), param("a.bias")))
    of = units_of_lists((root, units(orig=orig).units[1]), (*ORDER, "gone"), use_orig_params=orig)
    assert differences(of, in_units_order(Model(seed=1)).checkpoint()) == [
        "a.weight: [3, 5] in the units, [5, 3] in the model section",
        "gone is in the units, not in the model section",
        "a.weight: [3, 5] in the units, its optimizer states are [5, 3]",
    ]


def test_parameters_that_the_units_lack():
    of = units_of_lists(
        (Unit("", (param("top"), param("a.weight"), param("a.bias"))),), ORDER[:3], use_orig_params=True
    )
    ckpt = in_units_order(Model(seed=2)).checkpoint()
    lost = [f"the optimizer has states of {name}, which the units do not have" for name in ORDER[3:]]
    assert differences(of, ckpt) == [
        *(f"the model section has a parameter {name}, the units do not" for name in ORDER[3:]),
        *lost,
    ]
    ckpt.model = None
    assert differences(of, ckpt) == lost


def test_a_model_section_without_tensors_has_none_of_the_parameters():
    ckpt = in_units_order(Model(seed=3)).checkpoint()
    assert ckpt.model is not None
    ckpt.model.params = {"extra": 1}
    assert differences(units(orig=True), ckpt) == [f"{n} is in the units, not in the model section" for n in ORDER]


def test_the_names_of_a_shared_parameter_are_one():
    model = in_units_order(Model(seed=14))
    ckpt = model.checkpoint()
    of = units(orig=True, shared=(("head", "top"),))
    assert ckpt.optim is not None and ckpt.model is not None
    ckpt.optim = with_entry(ckpt.optim, "head", dict(ckpt.optim.state["top"]))
    twice = "the optimizer has states for top and for head, which are one parameter in the units"
    ckpt.model.params["head"] = ckpt.model.params["top"]
    assert differences(of, ckpt) == [twice]
    ckpt.model.params["head"] = ckpt.model.params["a.weight"]
    other = "head is another name of top in the units, of a.weight in the model section"
    assert differences(of, ckpt) == [other, twice]
    ckpt.model.params["head"] = model.raw.whole(torch.zeros(7, dtype=torch.complex32), sharded=True)
    assert differences(of, ckpt) == ["head: [3] in the units, [7] in the model section", twice]
