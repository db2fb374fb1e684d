"""A shared parameter that is left out under its first name: its place in a model without that name is not in units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.oracle.compare import identical


class Tied(nn.Module):
    """All parameters have one shape; ``head`` is ``embed`` under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(4, 4, bias=False)


WITHOUT_EMBED = ["body.weight", "head.weight", "last.weight"]
LEFT_OUT: dict[str, Any] = {"exclude": "embed.*"}


@pytest.fixture
def states(tmp_path: Path) -> dict[str, torch.Tensor]:
    """``exp_avg`` by name, of what ``flat`` in the same directory holds."""
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    to_flat: dict[str, Any] = {"to": "flattened", "world_size": 2, "unit": ["body"], "use_orig_params": True}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", **to_flat)
    named = model.named_parameters(remove_duplicate=False)
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in named}


@pytest.mark.parametrize(
    "options",
    [{"world_size": 1}, {"to": "full", "key_type": "id"}, {"to": "sharded", "world_size": 2, "key_type": "id"}],
    ids=lambda options: options.get("to", "flattened"),
)
@pytest.mark.usefixtures("states")
def test_what_counts_parameters_asks_for_its_place(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(NeedsInformationError, match=r"the place of head\.weight in the order") as error:
        fsdpckpt.convert(tmp_path / "flat", tmp_path / "out", **options, **LEFT_OUT)
    assert "--key-type name" in str(error.value.next_step)
    assert not (tmp_path / "out").exists()


def test_the_way_out_gives_each_parameter_its_own_states(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    """As the error says: by name first, then with the model's order."""
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "named.pt", to="full", key_type="name", **LEFT_OUT)
    named = torch.load(tmp_path / "named.pt")["optimizer"]["state"]
    assert {name: identical(named[name]["exp_avg"], states[name]) for name in named} == dict.fromkeys(named, True)
    assert set(named) == set(WITHOUT_EMBED)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(WITHOUT_EMBED))
    fsdpckpt.convert(tmp_path / "named.pt", tmp_path / "ids.pt", key_type="id", parameters=str(order))
    by_id = torch.load(tmp_path / "ids.pt")["optimizer"]["state"]
    for number, name in enumerate(WITHOUT_EMBED):
        assert identical(by_id[number]["exp_avg"], states[name])


def test_without_either_name_nothing_is_asked(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    both = {"exclude": ["embed.*", "head.*"]}
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="id", **both)
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert identical(state[0]["exp_avg"], states["body.weight"])
    assert identical(state[1]["exp_avg"], states["last.weight"])
