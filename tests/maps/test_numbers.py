"""Names with numbers that are computed: layers that begin elsewhere, stages and ranks that are counted through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceIncompleteError, UsageError
from fsdpckpt.maps.names import Pattern
from tests.oracle.compare import identical


@pytest.mark.parametrize(
    ("text", "words", "name"),
    [
        ("layers.{layer+1}.w", {"layer": "0"}, "layers.1.w"),
        ("layers.{layer-2}.w", {"layer": "12"}, "layers.10.w"),
        ("{a}.{stage*4+i}", {"a": "x", "stage": "2", "i": "3"}, "x.11"),
        ("{before*}h.{rank*10+e}", {"before": "", "rank": "0", "e": "0"}, "h.0"),
        ("layers.{layer+1}.w", None, "layers.0.w"),  # no layer is below 0
        ("layers.{layer+1}.w", None, "layers.01.w"),
        ("layers.{layer+1}.w", None, "layers.one.w"),
        ("layers.{layer+1}.w", None, "layers.-1.w"),
        ("layers.{layer-1}.w", None, "layers.\u0662.w"),  # a digit, and not one of those that PyTorch writes
        ("e.{rank*8+e}", None, "e.1234567890"),
    ],
)
def test_a_pattern_writes_and_reads_the_same_numbers_and_no_others(
    text: str, words: dict[str, str] | None, name: str
) -> None:
    assert Pattern(text).match(name) == words
    assert words is None or Pattern(text).format(words) == name


def saved(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = {name: torch.randn(3, 5) for name in names}
    states = {name: {"exp_avg": torch.randn(3, 5), "step": torch.tensor(4.0)} for name in names}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": names}]}
    torch.save({"model": model, "optimizer": optimizer}, path / "source.pt")
    return {**model, **{f"{name}.exp_avg": entry["exp_avg"] for name, entry in states.items()}}


def convert(path: Path, target: str, *rules: dict[str, Any], source: str = "source.pt", **options: Any) -> Any:
    (path / "map.json").write_text(json.dumps({"format": 1, "rest": "keep", "rule": rules}))
    fsdpckpt.convert(path / source, path / target, map=path / "map.json", verify="full", **options)
    return torch.load(path / target)


STAGES = [f"stage{stage}.layers.{layer}.w" for stage in range(3) for layer in range(2)]
THROUGH = {"from": "stage{stage}.layers.{layer}.w", "to": "layers.{stage*2+layer}.w"}

CASES: dict[str, tuple[list[str], dict[str, Any], dict[str, str]]] = {
    "offset": (
        [f"layers.{n}.w" for n in range(11)],
        {"from": "layers.{n}.w", "to": "h.{n+1}.w"},
        {f"layers.{n}.w": f"h.{n + 1}.w" for n in range(11)},
    ),
    "shifted in place": (  # each new name is also an old one
        [f"layers.{n}.w" for n in range(3, 7)],
        {"from": "layers.{n+1}.w", "to": "layers.{n}.w"},
        {f"layers.{n}.w": f"layers.{n - 1}.w" for n in range(3, 7)},
    ),
    "stages": (STAGES, THROUGH, {name: f"layers.{at}.w" for at, name in enumerate(STAGES)}),
    "other factor on the other side": (
        [f"a.{n}.w" for n in range(12)],
        {"from": "a.{rank*4+i}.w", "to": "b.{rank}.{i+1}.w"},
        {f"a.{n}.w": f"b.{n // 4}.{n % 4 + 1}.w" for n in range(12)},
    ),
    "not of the first": (
        ["layers.0.w", "layers.1.w", "layers.2.w"],
        {"from": "layers.{n}.w", "to": "layers.{n-1}.v"},
        {"layers.0.w": "layers.0.w", "layers.1.w": "layers.0.v", "layers.2.w": "layers.1.v"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_states_get_the_computed_names_and_their_old_ones_back(tmp_path: Path, case: str) -> None:
    names, rule, renamed = CASES[case]
    expected = saved(tmp_path, names)
    made = convert(tmp_path, "made.pt", rule)
    assert made["model"].keys() == made["optimizer"]["state"].keys() == set(renamed.values())
    for old, new in renamed.items():
        assert identical(made["model"][new], expected[old])
        assert identical(made["optimizer"]["state"][new]["exp_avg"], expected[f"{old}.exp_avg"])
    convert(tmp_path, "back.pt", rule, source="made.pt", inverse=True)
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / "back.pt").same


def test_experts_of_ranks_are_stacked_in_the_order_of_all_of_them(tmp_path: Path) -> None:
    expected = saved(tmp_path, [f"rank{rank}.experts.{e}.w" for rank in (1, 0) for e in (2, 0, 1)])
    (tmp_path / "count.json").write_text(
        json.dumps({"format": 1, "rest": "error", "rule": [{"from": "rank{rank}.experts.{e}.w", "to": "e.{rank*3+e}"}]})
    )
    stack = {"from": "e.{n}", "to": "experts", "steps": [{"stack": "n"}]}
    (tmp_path / "stack.json").write_text(json.dumps({"format": 1, "rest": "error", "rule": [stack]}))
    maps = [tmp_path / "count.json", tmp_path / "stack.json"]
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", map=maps, verify="full")
    made = torch.load(tmp_path / "made.pt")
    ordered = [f"rank{rank}.experts.{e}.w" for rank in range(2) for e in range(3)]
    assert identical(made["model"]["experts"], torch.stack([expected[name] for name in ordered]))
    moments = torch.stack([expected[f"{name}.exp_avg"] for name in ordered])
    assert identical(made["optimizer"]["state"]["experts"]["exp_avg"], moments)
    again = {"from": "e.{n+1}", "to": "experts", "steps": [{"stack": "n"}]}  # counted from 1 in the source
    saved(tmp_path, ["e.1", "e.2"])
    assert convert(tmp_path, "from-one.pt", again)["model"]["experts"].shape == (2, 3, 5)
    saved(tmp_path, ["e.1", "e.3"])
    with pytest.raises(SourceIncompleteError, match=r"e\.2 is missing"):
        convert(tmp_path, "gap.pt", again)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ([*STAGES, "stage0.layers.2.w"], THROUGH),  # would be layer 0 of the next stage
        (["a.0.b.5"], {"from": "a.{x}.b.{y}", "to": "c.{x*4+y}"}),
    ],
)
def test_a_factor_that_is_too_small_is_refused(tmp_path: Path, names: list[str], rule: dict[str, Any]) -> None:
    saved(tmp_path, names)
    with pytest.raises(UsageError, match=r"does not lead back|would be made of"):
        convert(tmp_path, "made.pt", rule)


def test_a_factor_says_how_many_are_stacked(tmp_path: Path) -> None:
    """The last of all is missing as any other is."""
    rule = {"from": "e.{rank*4+e}.w", "to": "rank{rank}.w", "steps": [{"stack": "e"}]}
    expected = saved(tmp_path, [f"e.{n}.w" for n in range(8)])
    made = convert(tmp_path, "made.pt", rule)["model"]
    assert identical(made["rank1.w"], torch.stack([expected[f"e.{n}.w"] for n in range(4, 8)]))
    for lost in (7, 3):
        saved(tmp_path, [f"e.{n}.w" for n in range(8) if n != lost])
        with pytest.raises(SourceIncompleteError, match=rf"e\.{lost}\.w is missing"):
            convert(tmp_path, "lost.pt", rule)
    saved(tmp_path, [f"e.{n}.w" for n in range(8)])
    ranks = {**rule, "to": "e{e}.w", "steps": [{"stack": "rank"}]}  # as many as there are
    assert convert(tmp_path, "ranks.pt", ranks)["model"]["e3.w"].shape == (2, 3, 5)
