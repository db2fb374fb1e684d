"""Quantized weights and the tensors that say what their elements stand for: a map moves both, or neither."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import UsageError
from tests.oracle.compare import identical

FUSE = """
format = 1
rest = "keep"

[[rule]]
from = ["{module*}.q.weight", "{module*}.k.weight"]
to = "{module*}.qk.weight"
steps = [{ cat = 0 }]
"""
WITH_SCALES = (
    FUSE
    + """
[[rule]]
from = ["{module*}.q.weight_scale_inv", "{module*}.k.weight_scale_inv"]
to = "{module*}.qk.weight_scale_inv"
steps = [{ cat = 0 }]
"""
)
RENAME = 'format = 1\nrest = "keep"\n[[rule]]\nfrom = "{module*}.q.weight"\nto = "{module*}.query.weight"\n'

FP8 = torch.randn(4, 4).to(torch.float8_e4m3fn)
CODES = torch.randint(0, 255, (8, 1), dtype=torch.uint8)
INT8 = torch.randint(-9, 9, (4, 4), dtype=torch.int8)


def model_of(weight: torch.Tensor, beside: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value
        for part in "qk"
        for name, value in {f"l.{part}.weight": weight, **{f"l.{part}{end}": v for end, v in beside.items()}}.items()
    }


@pytest.mark.parametrize("rules", [FUSE, RENAME], ids=["joined", "renamed"])
@pytest.mark.parametrize(
    ("weight", "beside"),
    [
        (FP8, {".weight_scale_inv": torch.rand(1, 1)}),
        (FP8, {".input_scale": torch.rand(())}),
        (CODES, {".weight.absmax": torch.rand(2), ".weight.quant_state.bitsandbytes__nf4": CODES.flatten()}),
        (INT8, {".SCB": torch.rand(4)}),
    ],
    ids=["fp8", "fp8-activations", "nf4", "int8"],
)
def test_scales_are_not_left_behind(
    tmp_path: Path, weight: torch.Tensor, beside: dict[str, torch.Tensor], rules: str
) -> None:
    torch.save({"model": model_of(weight, beside)}, tmp_path / "source.pt")
    (tmp_path / "map.toml").write_text(rules)
    with pytest.raises(UsageError) as error:
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map=tmp_path / "map.toml")
    assert "moves quantized weights" in error.value.what
    assert f"l.q{next(iter(beside))}, of l.q.weight" in str(error.value)


def test_a_map_with_rules_for_scales_moves_them(tmp_path: Path) -> None:
    model = model_of(FP8, {".weight_scale_inv": torch.rand(1, 2)})
    torch.save({"model": model}, tmp_path / "source.pt")
    (tmp_path / "map.toml").write_text(WITH_SCALES)
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", map=tmp_path / "map.toml")
    made = torch.load(tmp_path / "made.pt")["model"]
    assert made.keys() == {"l.qk.weight", "l.qk.weight_scale_inv"}
    scales = [model[f"l.{part}.weight_scale_inv"] for part in "qk"]
    assert identical(made["l.qk.weight_scale_inv"], torch.cat(scales))


def test_a_parameter_that_is_called_scale_beside_a_float_weight_stays(tmp_path: Path) -> None:
    model = model_of(torch.rand(4, 4), {".weight_scale": torch.rand(4), ".scale": torch.rand(4)})
    torch.save({"model": model}, tmp_path / "source.pt")
    (tmp_path / "map.toml").write_text(FUSE)
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", map=tmp_path / "map.toml")
    assert torch.load(tmp_path / "made.pt")["model"].keys() == {
        "l.qk.weight", "l.q.weight_scale", "l.k.weight_scale", "l.q.scale", "l.k.scale",
    }  # fmt: skip
