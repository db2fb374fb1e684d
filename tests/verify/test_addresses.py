"""What a leaf is, is decided by where it is: by no word that happens to stand among the keys that lead to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.ir.sections import alone
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.changes import standings
from fsdpckpt.verify.integrity import check_steps
from fsdpckpt.verify.leaves import Address, dotted, parameter_of, setting_of


def optimizer(steps: Iterable[float], rate: float) -> dict[str, Any]:
    state = {number: {"step": torch.tensor(step), "exp_avg": torch.ones(2)} for number, step in enumerate(steps)}
    return {"state": state, "param_groups": [{"lr": rate, "params": list(state)}]}


@pytest.mark.parametrize("place", [("state",), ("param_groups", "state"), ("optimizers", "first")])
def test_the_place_of_an_optimizer_is_none_of_its_keys(place: tuple[str, ...]) -> None:
    of_state = Address(Section.OPTIM, ("state", "w", "exp_avg")).below(place)
    of_rate = Address(Section.OPTIM, ("param_groups", 0, "lr")).below(place)
    assert (parameter_of(of_state, {}), setting_of(of_state)) == (("w", "exp_avg"), None)
    assert (parameter_of(of_rate, {}), setting_of(of_rate)) == ((None, None), "lr")
    assert dotted(of_state) == ".".join((*place, "state.w.exp_avg"))


def test_an_entry_beside_the_states_is_no_state_whatever_it_is_called() -> None:
    beside = Address(Section.OPTIM, ("scaler", "state", "w"))
    rate = Address(Section.OPTIM, ("scaler", "param_groups.first.lr"))
    assert parameter_of(beside, {}) == parameter_of(rate, {}) == (None, None)
    assert setting_of(beside) is setting_of(rate) is None


def test_learning_rates_are_those_of_groups_alone(tmp_path: Path) -> None:
    for name, rate in (("a", 0.5), ("b", 0.25)):
        first, second = optimizer([1.0, 1.0], rate), optimizer([2.0, 2.0], rate / 2)
        first["param_groups.old.lr"] = rate * 100
        torch.save({"state": {"first": first, "second": second}}, tmp_path / f"{name}.pt")
    a, b = standings(fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt"))
    assert (dict(a.rates), dict(b.rates)) == ({0.5: 1, 0.25: 1}, {0.25: 1, 0.125: 1})
    assert dict(a.steps) == dict(b.steps) == {1.0: 2, 2.0: 2}


def test_a_step_that_cannot_be_read_hides_none_of_another_optimizer(tmp_path: Path) -> None:
    """The keys of both are the same within each."""
    content = {"optimizer": optimizer([1.0, 1.0], 0.5), "critic": {"optimizer": optimizer([1.0, 2.0], 0.5)}}
    torch.save({"model": {"a.w": torch.ones(2)}, **content}, tmp_path / "c.pt")
    with Sources() as sources:
        found = open_checkpoint(str(tmp_path / "c.pt"), sources=sources)
        views = {named.name: alone(found, named) for named in found.named}
        (main, other) = (view for name, view in sorted(views.items(), key=lambda each: "critic" in each[0]))
        assert main.optim is not None and other.optim is not None
        unreadable = [main.optim.state[0]["step"]]
        (problem,) = check_steps(other, unreadable, sources=sources, threads=1)  # type: ignore[arg-type]
        assert "1" in problem.message and "2" in problem.message
        assert check_steps(main, unreadable, sources=sources, threads=1) == []  # type: ignore[arg-type]
