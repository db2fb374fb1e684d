"""What cannot be written as flat parameters is refused by name, and nothing is dropped or made up instead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.placements import Flattened
from fsdpckpt.ir.units import Strategy
from tests.flat.flat_source import ORDER, Model, loaded, param, units, written
from tests.oracle.compare import identical


def refused(tmp_path, error, model, of, *named, ckpt=None, key_type="id", world_size=3):
    """The error's text: every one of ``named`` is in it."""
    with pytest.raises(error) as caught:
        written(tmp_path, model, of, world_size, ckpt=ckpt, key_type=key_type)
    text = caught.value.text
    assert all(word in text for word in named), text
    return caught.value


def test_a_unit_of_which_one_parameter_has_no_state_names_the_option(tmp_path):
    model = Model(seed=6)
    del model.states["b.bias"]
    refused(tmp_path, NeedsInformationError, model, units(orig=False), "b.bias")
    written(tmp_path, model, units(orig=True), 2)
    assert sorted(loaded(tmp_path, "optim", 1, 2)["state"]) == [1, 2, 3]


@pytest.mark.parametrize("orig", [True, False])
def test_factored_states_are_refused_by_name(tmp_path, orig):
    model = Model(seed=7)
    for name, entry in model.states.items():
        entry["row_var"] = torch.randn(max(model.weights[name].shape[0], 2))
    error = refused(tmp_path, SourceUnsupportedError, model, units(orig=orig), "a.weight: state row_var is [5]")
    assert "top" not in str(error)  # its state has its own shape


def test_factored_states_are_carried_where_nothing_is_sharded(tmp_path):
    model = Model(seed=8)
    model.states["a.weight"]["row_var"] = torch.randn(5)
    written(tmp_path, model, units(orig=True, strategy=Strategy.NO_SHARD), 2)
    assert identical(loaded(tmp_path, "optim", 1, 2)["state"][1]["row_var"], model.states["a.weight"]["row_var"])


def test_slices_of_a_factored_state_are_no_state_to_carry(tmp_path):
    model = Model(seed=17)
    model.states["a.weight"]["row_var"] = torch.randn(5)
    ckpt = model.checkpoint()
    assert ckpt.optim is not None
    leaf = ckpt.optim.state["a.weight"]["row_var"]
    ckpt.optim.state["a.weight"]["row_var"] = replace(leaf, sharded=True, cut=Flattened())  # type: ignore[type-var]
    refused(tmp_path, SourceUnsupportedError, model, units(orig=True, strategy=Strategy.NO_SHARD), "row_var", ckpt=ckpt)


def test_parameters_of_a_unit_with_different_states_are_refused(tmp_path):
    model = Model(seed=9)
    model.states["b.bias"]["max_exp_avg_sq"] = torch.randn(1)
    words = "state max_exp_avg_sq: no such state for b.weight; a tensor for b.bias"
    refused(tmp_path, SourceUnsupportedError, model, units(orig=False), "'b'", words)


def test_values_that_are_no_number_are_equal_to_themselves(tmp_path):
    model = Model(seed=19)
    for entry in model.states.values():
        entry["scale"] = float("nan")
    written(tmp_path, model, units(orig=False), 2)
    assert math.isnan(loaded(tmp_path, "optim", 0, 2)["state"][0]["scale"])


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (torch.tensor(1.0), 1.0, "1.0 (float32) for b.weight; 1.0 for b.bias"),
        (None, 3, "None for b.weight; 3 for b.bias"),
        (2, 3, "2 for b.weight; 3 for b.bias"),
        (1, True, "1 for b.weight; True for b.bias"),
        (torch.tensor(1.0), torch.tensor(1), "1.0 (float32) for b.weight; 1 (int64) for b.bias"),
        (torch.tensor(2.0), torch.tensor([2.0]), "2.0 (float32) for b.weight; 2.0 (float32, shape [1]) for b.bias"),
        (torch.randn(7, 2), 2.0, "a tensor for b.weight; 2.0 for b.bias"),
        (torch.randn(7, 2), torch.randn(1).double(), "several dtypes: float32 for b.weight, float64 for b.bias"),
    ],
)
def test_parameters_of_a_unit_that_disagree_on_a_state_are_refused(tmp_path, one, other, words):
    model = Model(seed=10)
    model.states["b.weight"]["odd"], model.states["b.bias"]["odd"] = one, other
    refused(tmp_path, SourceUnsupportedError, model, units(orig=False), "odd", words)
    written(tmp_path, model, units(orig=True), 2)


def test_an_unmanaged_parameter_that_the_checkpoint_lacks_keeps_its_id_and_has_no_entry(tmp_path):
    model, order = Model(seed=18), ("a.weight", "gone", "top", "a.bias", "b.weight", "b.bias")
    of = units(orig=True, groups=(order,), parameters=order, unmanaged=(param("gone", (3,)),))
    target = written(tmp_path, model, of, 1, ckpt=replace(model.checkpoint(), model=None))
    optim = loaded(tmp_path, "optim", 0, 1)
    assert optim["param_groups"][0]["params"] == [0, 2, 3, 4, 5] and sorted(optim["state"]) == [0, 2, 3, 4, 5]
    assert identical(optim["state"][2]["exp_avg"], model.states["top"]["exp_avg"])
    assert [(note.kind, note.keys) for note in target.notes] == [("missing-state", ("gone",))]


def test_a_state_that_no_group_lists_is_refused(tmp_path):
    model = Model(seed=13)
    model.groups = [{"params": list(ORDER[1:])}]
    refused(tmp_path, SourceCorruptError, model, units(orig=True), "top", "none of its groups")


def test_the_dtype_of_an_unknown_number_cannot_be_padded(tmp_path):
    model = Model(seed=16)
    ckpt = model.checkpoint()
    assert ckpt.model is not None
    of = units(orig=True)
    for name, leaf in ckpt.model.params.items():
        ckpt.model.params[name] = replace(leaf, dtype=DTYPES["complex32"])  # type: ignore[type-var]
    refused(tmp_path, SourceUnsupportedError, model, of, "complex32", ckpt=ckpt)


def test_more_ranks_than_the_memory_has_room_for_are_refused_at_the_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdpckpt.writers.torch_ranks.memory_bytes", lambda: 1)
    refused(tmp_path, UsageError, Model(), units(orig=True), "--world-size 1 ", "1 B of memory", world_size=1)
