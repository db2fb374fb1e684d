"""Items of a DCP directory never share bytes; a place in ``.metadata`` that is wrong by one number makes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy import array

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.readers.dcp import overlaps

Places = dict[Any, Any]


def moved(places: Places, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Change the place of ``name``; the second argument is that of ``model.b``, another tensor of its size."""
    by_key = {index.fqn: index for index in places}
    places[by_key[name]] = change(places[by_key[name]], places[by_key["model.b"]])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    model = {name: torch.randn(5, 3) for name in "abc"}
    dcp.save({"model": model, "note": "text", "empty": torch.zeros(0, 3)}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "the place of another": lambda own, other: other,
    "longer": lambda own, other: replace(own, length=own.length + 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.a", "model.c"])
def test_an_item_in_the_place_of_another_is_a_contradiction(
    saved: Path, tmp_path: Path, name: str, change: str
) -> None:
    assert fsdpckpt.verify(saved).problems == ()
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    moved(metadata.storage_data, name, CHANGES[change])
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SourceCorruptError, match="one of them is somewhere else"):
        fsdpckpt.convert(saved, tmp_path / "out.pt", to="full")
    assert any(problem.kind == "overlap" for problem in fsdpckpt.verify(saved).problems)


@pytest.mark.parametrize("sorted_at_once", [True, False])
def test_items_are_compared_file_by_file(sorted_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes of two files are two places."""
    apart = overlaps._Places(array([0, 1, 2]), array([0, 1, 1]), array([0, 0, 8]), array([8, 8, 9]))
    if not sorted_at_once:
        monkeypatch.setattr(overlaps, "_are_apart", lambda places: False)
    monkeypatch.setattr(overlaps, "_places", lambda metadata: apart)
    metadata: Any = SimpleNamespace(tensors=dict.fromkeys("ab"), items=dict.fromkeys("c"))
    assert list(overlaps.shared_bytes(metadata)) == []
    monkeypatch.setattr(overlaps, "_places", lambda metadata: apart._replace(end=array([8, 9, 9])))
    assert [problem.key for problem in overlaps.shared_bytes(metadata)] == ["c"]
