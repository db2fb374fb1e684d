"""What ``diff`` proposes where it cannot match ids with names: each way is followed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError

OWN = ["b", "a", "c"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An optimizer by id, and by name in a list that ``FSDP.rekey_optim_state_dict`` sorted; the order of the job."""
    states = {name: {"exp_avg": torch.randn(3, 2)} for name in OWN}
    by_id = {"state": dict(enumerate(states.values())), "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    by_name = {"state": states, "param_groups": [{"lr": 0.1, "params": sorted(OWN)}]}
    model = {name: torch.randn(3, 2) for name in OWN}
    torch.save({"optimizer": by_id}, tmp_path / "ids.pt")
    torch.save({"optimizer": by_name}, tmp_path / "names.pt")
    torch.save({"model": model}, tmp_path / "model.pt")
    (tmp_path / "order.txt").write_text("\n".join(OWN))
    params = {name: torch.nn.Parameter(leaf) for name, leaf in model.items()}
    job = torch.nn.ParameterDict(params)
    optimizer = torch.optim.SGD([params[name] for name in OWN], lr=0.1)
    fsdpckpt.save_parameter_order(job, optimizer, tmp_path / "units.json")
    (tmp_path / "far").mkdir()
    (tmp_path / "units.json").rename(tmp_path / "far" / "units.json")
    return tmp_path


def test_every_way_that_diff_names_leads_on(saved: Path) -> None:
    sides = saved / "ids.pt", saved / "names.pt"
    ways: dict[str, dict[str, Any]] = {
        "--parameters": {"parameters": saved / "order.txt"},
        "--units": {"units": saved / "far" / "units.json"},
        "--reference": {"reference": saved / "model.pt"},
    }
    with pytest.raises(NeedsInformationError, match="which id is which name") as asked:
        fsdpckpt.diff(*sides)
    assert set(re.findall(r"--[a-z][a-z-]*", str(asked.value.next_step))) == ways.keys()
    for options in ways.values():
        for pair in (sides, sides[::-1]):
            found = fsdpckpt.diff(*pair, **options)
            assert [entry.key for entry in found.entries if entry.sigil != "="] == [], options
