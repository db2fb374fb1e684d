"""``--parameters`` in the optimizer's order names the ids of flat shards without a units file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.oracle.compare import require_identical

SHAPES = {"a.weight": (6, 4), "b.weight": (6, 4), "c.weight": (6, 4), "d.weight": (6, 4), "d.bias": (6,)}
OWN = (["d.weight", "a.weight"], ["c.weight", "b.weight"])
"""The optimizer's groups: matrices of one shape, in an order that is not the model's. The bias is frozen."""


def saved(place: Path, *, orig: bool, unit: str, own: tuple[list[str], ...] = OWN) -> dict[str, Any]:
    """Writes ``full.pt``, ``flat`` (by id, without what says its units), and ``order.txt``; the truth by name."""
    generator = torch.Generator().manual_seed(1)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    trained = [name for names in own for name in names]
    states = {
        name: {"step": torch.tensor(2.0), "exp_avg": torch.randn(SHAPES[name], generator=generator)} for name in trained
    }
    groups = [{"lr": 0.1 * (number + 1), "params": list(names)} for number, names in enumerate(own)]
    by_name = {"model": model, "optimizer": {"state": states, "param_groups": groups}}
    torch.save(by_name, place / "full.pt")
    fsdpckpt.convert(
        place / "full.pt",
        place / "flat",
        to="flattened",
        world_size=2,
        unit=[unit],
        use_orig_params=orig,
        key_type="id",
        buffers=["none"],
    )
    (place / "flat" / "fsdpckpt.json").unlink()
    (place / "order.txt").write_text("\n\n".join("\n".join(names) for names in own))
    (place / "one_part.txt").write_text("\n".join(trained))
    return by_name


@pytest.mark.parametrize("order", ["order.txt", "one_part.txt"])
@pytest.mark.parametrize("unit", ["none", "*"])
def test_ids_of_flat_shards_get_the_names_that_the_optimizer_lists(order: str, unit: str, tmp_path: Path) -> None:
    truth = saved(tmp_path, orig=True, unit=unit)
    reference: dict[str, Any] = {"reference": tmp_path / "model.pt", "unit": [unit]}
    torch.save(truth["model"], tmp_path / "model.pt")
    with pytest.raises(NeedsInformationError, match="cannot be inferred") as asked:
        fsdpckpt.convert(tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name", **reference)
    assert "--parameters" in str(asked.value.next_step)
    fsdpckpt.convert(
        tmp_path / "flat", tmp_path / "out.pt", to="full", key_type="name", parameters=tmp_path / order, **reference
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [*OWN]
    require_identical(found["optimizer"]["state"], truth["optimizer"]["state"])
    require_identical(found["model"], truth["model"])


def test_flat_parameters_get_the_groups_that_blank_lines_divide(tmp_path: Path) -> None:
    """With ``use_orig_params=False`` ids stand for flat parameters: each module has one, of equal length."""
    own = (["b.weight", "d.weight", "d.bias"], ["a.weight", "c.weight"])
    truth = saved(tmp_path, orig=False, unit="*", own=own)
    torch.save(truth["model"], tmp_path / "model.pt")
    fsdpckpt.convert(
        tmp_path / "flat",
        tmp_path / "out.pt",
        to="full",
        key_type="name",
        reference=tmp_path / "model.pt",
        unit=["*"],
        parameters=tmp_path / "order.txt",
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    require_identical(found["optimizer"]["state"], truth["optimizer"]["state"])
