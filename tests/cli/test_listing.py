"""The rows of ``inspect``: everything in a pipe, at most as wide as the screen and folded on a terminal."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdpckpt.api import inspect
from fsdpckpt.cli.folded_stats import joined_stats
from fsdpckpt.cli.listing import folded_rows, listing
from fsdpckpt.describe import Description, describe
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Evidence, EvidenceKind, Layout, Ledger, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Stats, Tensor
from tests.cli.conftest import Run, run, saved
from tests.ir.optimizers import without_entry

__all__ = ["run", "saved"]

WIDTH, FEED = 16384, 53248
MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (1024, WIDTH), "self_attn.v_proj": (1024, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (FEED, WIDTH), "mlp.up_proj": (FEED, WIDTH),
    "mlp.down_proj": (WIDTH, FEED), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
}  # fmt: skip


def tensor(shape: tuple[int, ...], dtype: str = "float32", placement: str = "[Shard(0)]") -> Tensor:
    chunks = Chunks.rows(ndim=len(shape), rank=[0], file=[0], offset=[0], start=[(0,) * len(shape)], size=[shape])
    return Tensor(DTYPES[dtype], shape, chunks, True, placement if shape else "whole")


def described(params: dict[str, Tensor], *, ids: bool = False) -> Description:
    state = {
        number if ids else name: {"step": tensor(()), **{key: tensor(param.shape) for key in ("exp_avg", "exp_avg_sq")}}
        for number, (name, param) in enumerate(params.items())
    }
    groups = [{"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": None, "params": list(state)}]
    optim = Optimizer.of(dict(state), groups)
    files = (Stored("405b/__0_0.distcp", 1),)
    evidence = (
        Evidence(EvidenceKind.SECTIONS, "405b: model and optimizer"),
        Evidence(EvidenceKind.CONTAINER, "a DCP directory: 405b has a .metadata file"),
    )
    origin, ledger = Origin("405b", Layout.SHARDED, Container.DCP, "plain", 8), Ledger(evidence=evidence)
    model = ModelState(dict(params))
    return describe(Checkpoint(origin, files=files, model=model, optim=optim, extra={}, ledger=ledger))


def llama(layers: int = 126) -> dict[str, Tensor]:
    shapes = {"model.embed_tokens.weight": (128256, WIDTH)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in MATRICES.items()}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (128256, WIDTH)}
    return {name: tensor(shape, "bfloat16") for name, shape in shapes.items()}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_screen(description: Description, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``inspect`` prints on a terminal of this width."""
    from fsdpckpt.cli.inspect import inspect_command
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.options.commands import InspectOptions

    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("fsdpckpt.api.inspect", lambda *_, **__: description)
    assert inspect_command(Streams(as_json=False, quiet=False), "405b", InspectOptions()) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_model_of_405_billion_parameters_fits_the_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_screen(described(llama()), columns, monkeypatch)
    assert len(lines) < 24  # the prompt has a line, too
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert "model.layers.{0..125}.self_attn.q_proj.weight  x126" in text
    assert "*.{exp_avg,exp_avg_sq}  x2,274" in text
    assert lines[-1] == "problems: none"
    assert lines[-6].startswith("405b: sharded, dcp")
    assert lines[-3].startswith("optim: keyed by name, 3,411 tensors")
    assert "lr=0.001, betas=(0.9, 0.95), weight_decay=0.1" in lines[-2]


@pytest.mark.parametrize("columns", [24, 60, 80, 100, 120, 200])
def test_no_row_is_wider_than_the_screen_and_no_two_are_the_same(columns: int) -> None:
    params = {f"{tower}.blocks.{n}.layer.{k}.SelfAttention.relative_attention_bias.weight": tensor((n + 2, k + 2))
              for tower in ("encoder", "decoder") for n in range(3) for k in range(2)}  # fmt: skip
    for unfold in (False, True):
        lines, headings = listing(described(params), ranks=False, unfold=unfold, columns=columns)
        assert max(map(len, lines)) <= columns
        assert 0 in headings
        assert columns < 80 or len(set(lines)) == len(lines)


def test_ranks_fit_110_columns() -> None:
    lines, _ = listing(described(llama(2)), ranks=True, unfold=False, columns=110)
    assert max(map(len, lines)) <= 110
    assert len(lines) == 1 + 2 * 4 * 21  # each key and its chunk: a model of 2 layers has 21 parameters
    assert lines[0].split() == ["rank", "box", "file", "offset"]
    assert lines[1].startswith("model model.embed_tokens.weight  bfloat16 [")


def test_chunks_at_80_columns_stand_below_their_whole_keys() -> None:
    description = described(llama(2))
    lines, _ = listing(description, ranks=True, unfold=False, columns=80)
    assert max(map(len, lines)) <= 80
    keys = [line.split()[1] for line in lines[1:] if not line.startswith(" ")]
    assert keys == [named.key for named in description.tensors]


@pytest.mark.parametrize(("columns", "fewer"), [(44, True), (80, True), (140, False)])
def test_statistics_leave_room_for_the_names(columns: int, fewer: bool) -> None:
    stats = Stats(*[-1.2345e-06] * 5, nan=0, inf=0)
    description = described(llama(2))
    measured = dataclasses.replace(description, stats=(stats,) * len(description.tensors))
    lines, headings = listing(measured, ranks=False, unfold=True, columns=columns)
    assert max(map(len, lines)) <= columns
    keys = [line.split()[0] for at, line in enumerate(lines) if at not in headings]
    if columns >= 80:
        assert len(set(keys)) == len(keys) and "model.layers.0.input_layernorm.weight" in keys
        assert lines[0].endswith("NaN  Inf") and (" norm " in lines[0]) is not fewer
    assert lines[-1].startswith("columns left out: ") is fewer


def test_statistics_of_folded_keys_are_those_of_all_elements() -> None:
    arrays = [np.float64([1, 2, 7]) * (n + 1) for n in range(3)]
    each = [
        (Stats(a.min(), a.max(), a.mean(), a.std(), float(np.linalg.norm(a)), nan=n, inf=0), a.size + n)
        for n, a in enumerate(arrays)
    ]
    joined, whole = joined_stats(each), np.concatenate(arrays)
    assert joined is not None
    assert joined.numbers == pytest.approx((1, 21, whole.mean(), whole.std(), np.linalg.norm(whole)))
    assert joined.nan == 3
    assert joined_stats([*each, (None, 4)]) is None
    nothing = Stats(None, None, None, None, None, nan=4, inf=0)
    assert joined_stats([(nothing, 4), (nothing, 4)]) == dataclasses.replace(nothing, nan=8)


def test_states_that_differ_from_their_parameters_are_told() -> None:
    params = {f"layers.{n}.weight": tensor((4, 3)) for n in range(4)}
    description = described(params)
    optim = description.checkpoint.optim
    assert optim is not None
    optim.state["layers.2.weight"]["exp_avg"] = tensor((4, 3), "bfloat16")
    rows = folded_rows(describe(description.checkpoint))
    assert [(row.key, row.dtype, row.count) for row in rows] == [
        ("layers.{0..3}.weight", "float32", 4),
        ("*.step", "float32", 4),
        ("*.exp_avg_sq", "float32", 4),
        ("layers.{0..1,3}.weight.exp_avg", "float32", 3),
        ("layers.2.weight.exp_avg", "bfloat16", 1),
    ]


def test_a_parameter_without_state_is_not_hidden_by_a_star() -> None:
    params = {f"layers.{n}.weight": tensor((4, 3)) for n in range(4)}
    description = described(params)
    optim = description.checkpoint.optim
    assert optim is not None
    description.checkpoint.optim = without_entry(optim, "layers.1.weight")  # its group still lists it
    rows = folded_rows(describe(description.checkpoint))
    assert [(row.key, row.count) for row in rows[1:]] == [
        ("layers.{0,2..3}.weight.step", 3),
        ("layers.{0,2..3}.weight.{exp_avg,exp_avg_sq}", 6),
    ]


def test_an_optimizer_by_ids_does_not_claim_the_models_shapes() -> None:
    rows = folded_rows(described(llama(2), ids=True))
    assert [(row.key, row.shape, row.count) for row in rows[-2:]] == [
        ("*.step", "[]", 21),
        ("*.{exp_avg,exp_avg_sq}", "several", 42),
    ]


def test_states_alone_are_folded_by_layer() -> None:
    from fsdpckpt.ir.checkpoint import Section

    description = describe(described(llama()).checkpoint, section=Section.OPTIM)
    keys = [row.key for row in folded_rows(description)]
    assert "model.layers.{0..125}.mlp.up_proj.weight.{exp_avg,exp_avg_sq}" in keys
    assert len(keys) == 2 * 12


def test_the_random_states_of_all_ranks_are_one_row(tmp_path: Path) -> None:
    for rank in range(3):
        model = {"w": torch.full((2, 2), 3.0)}
        extra = {"rng": {"cpu": torch.full((16,), rank, dtype=torch.uint8)}, "epoch": 2}
        torch.save(model, tmp_path / f"model_world_size_3_rank_{rank}.pt")
        torch.save(extra, tmp_path / f"extra_state_world_size_3_rank_{rank}.pt")
    rows = folded_rows(inspect(tmp_path))
    assert [(row.key, row.count) for row in rows if row.section == "extra"] == [("rank{0..2}.rng.cpu", 3)]


def test_all_unfolds_and_a_pipe_is_never_folded(run: Run, saved: Path) -> None:
    piped = run("inspect", saved).out
    assert piped == run("inspect", saved, "--all").out
    assert len(piped.splitlines()[piped.splitlines().index("") + 1 :]) == 1 + 24


def test_an_empty_key_can_be_seen(run: Run, tmp_path: Path) -> None:
    torch.save({"model": {"": torch.ones(2), "a.b": torch.ones(2)}, "": 5}, tmp_path / "a.pt")
    torch.save({"model": {"": torch.zeros(2), "a.b": torch.ones(2)}, "": 5}, tmp_path / "b.pt")
    shown = run("inspect", tmp_path / "a.pt").out
    assert "\nmodel    ''   float32" in shown and "\n  '' = 5\n" in shown
    assert "  model '' float32 [2]\n" in run("verify", tmp_path / "a.pt", "--digests").out
    assert "* model ''  " in run("diff", tmp_path / "a.pt", tmp_path / "b.pt").out
    assert run("inspect", tmp_path / "a.pt", "--names-only").out == "\na.b\n", "what a script reads is the key itself"


def test_each_of_several_models_and_optimizers_is_a_section_with_a_name(tmp_path: Path, run: Run) -> None:
    net = torch.nn.Linear(4, 3)
    muon = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    adamw = torch.optim.AdamW(net.parameters()).state_dict()
    models = {"net": net.state_dict(), "ema": {"model": net.state_dict()}}
    torch.save({**models, "muon": muon, "adamw": adamw}, tmp_path / "a.pt")
    text = run("inspect", tmp_path / "a.pt").out
    assert "model:ema: 2 tensors" in text and "ema.model.weight" in text
    assert "optim:muon: param groups: 1" in text and "optim:adamw: param groups: 1" in text
