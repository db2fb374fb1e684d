"""What cannot be written as flat parameters is refused by name, and nothing is dropped or made up instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.placements import Flattened
from fsdpckpt.ir.units import Strategy, Units
from tests.flat.flat_source import ORDER, Model, loaded, param, units, written
from tests.oracle.compare import identical
from tests.refusals import Refused


def without_state(model: Model) -> None:
    del model.states["b.bias"]


def with_factors(model: Model) -> None:
    for name, entry in model.states.items():
        entry["row_var"] = torch.randn(max(model.weights[name].shape[0], 2))


def with_dtypes(model: Model) -> None:
    model.states["b.weight"]["odd"], model.states["b.bias"]["odd"] = torch.randn(7, 2), torch.randn(1).double()


def with_another_state(model: Model) -> None:
    model.states["b.bias"]["max_exp_avg_sq"] = torch.randn(1)


def ungrouped(model: Model) -> None:
    model.groups = [{"params": list(ORDER[1:])}]


def sliced_factor(ckpt: Checkpoint) -> None:
    assert ckpt.optim is not None
    states = ckpt.optim.state["a.weight"]
    states["row_var"] = replace(states["row_var"], sharded=True, cut=Flattened())  # type: ignore[type-var]


def unknown_dtype(ckpt: Checkpoint) -> None:
    assert ckpt.model is not None
    for name, leaf in ckpt.model.params.items():
        ckpt.model.params[name] = replace(leaf, dtype=DTYPES["complex32"])  # type: ignore[type-var]


@dataclass(frozen=True)
class Row:
    """``change``: of what was trained; ``damage``: of its checkpoint. ``also``: units that can be written of it."""

    of: Units
    refused: Refused
    change: Callable[[Model], object] = lambda _: None
    damage: Callable[[Checkpoint], object] = lambda _: None
    also: Units | None = None


FLAT, ORIG, WHOLE = units(orig=False), units(orig=True), units(orig=True, strategy=Strategy.NO_SHARD)
FACTORS = Refused(3, "a.weight: state row_var is [5]", silent=["top"])  # whose state has its own shape
ROWS = {
    "a unit of which one parameter has no state": Row(FLAT, Refused(4, "b.bias"), without_state, also=ORIG),
    "factors": Row(FLAT, FACTORS, with_factors, also=WHOLE),
    "factors of original parameters": Row(ORIG, FACTORS, with_factors, also=WHOLE),
    "a slice of a factor": Row(WHOLE, Refused(3, "row_var"), with_factors, sliced_factor),
    "parameters of a unit with different states": Row(
        FLAT,
        Refused(3, ["'b'", "state max_exp_avg_sq: no such state for b.weight; a tensor for b.bias"]),
        with_another_state,
        also=ORIG,
    ),
    "states of several dtypes": Row(
        FLAT, Refused(3, "odd has several dtypes: float32 for b.weight, float64 for b.bias"), with_dtypes, also=ORIG
    ),
    "a state that no group lists": Row(ORIG, Refused(3, ["top", "none of its groups"]), ungrouped),
    "a dtype in which the padding is unknown": Row(ORIG, Refused(3, "complex32"), damage=unknown_dtype),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_no_flat_parameter_can_hold_is_refused(name, tmp_path):
    row, model = ROWS[name], Model(seed=7)
    row.change(model)
    ckpt = model.checkpoint()
    row.damage(ckpt)
    row.refused.by(lambda: written(tmp_path, model, row.of, 3, ckpt=ckpt))
    if row.also is None:
        return
    written(tmp_path, model, row.also, 2, ckpt=ckpt)
    states = loaded(tmp_path, "optim", 1, 2)["state"]
    if row.change is without_state:
        assert sorted(states) == [1, 2, 3]
    if row.change is with_factors:
        assert identical(states[1]["row_var"], model.states["a.weight"]["row_var"])


def test_an_unmanaged_parameter_that_the_checkpoint_lacks_keeps_its_id_and_has_no_entry(tmp_path):
    model, order = Model(seed=18), ("a.weight", "gone", "top", "a.bias", "b.weight", "b.bias")
    of = units(orig=True, groups=(order,), parameters=order, unmanaged=(param("gone", (3,)),))
    target = written(tmp_path, model, of, 1, ckpt=replace(model.checkpoint(), model=None))
    optim = loaded(tmp_path, "optim", 0, 1)
    assert optim["param_groups"][0]["params"] == [0, 2, 3, 4, 5] and sorted(optim["state"]) == [0, 2, 3, 4, 5]
    assert identical(optim["state"][2]["exp_avg"], model.states["top"]["exp_avg"])
    assert [(note.kind, note.keys) for note in target.notes] == [("missing-state", ("gone",))]


def test_more_ranks_than_the_memory_has_room_for_are_refused_at_the_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdpckpt.writers.torch_ranks.memory_bytes", lambda: 1)
    error = Refused(2, "needs more memory").by(lambda: written(tmp_path, Model(), ORIG, 1))
    assert "--world-size 1 " in error.text and error.expected == "up to 1 B of memory"
