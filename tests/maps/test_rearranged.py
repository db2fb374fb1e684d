"""Tensors that are transposed, cut along columns and rearranged: against torch, for any sizes, ranks and layouts, and
back.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from tests.oracle.compare import require_identical

State = dict[str, Any]
MAP = """
format = 1
rest = "error"

[values]
half = ["head_dim / 2"]
groups = 2

[[rule]]
from = "{layer}.conv"
to = "{layer}.kernel"
steps = [{ transpose = [0, 1] }, { rearrange = "a b c -> (c a) b" , axes = { c = 3 } }]

[[rule]]
from = "{layer}.columns"
to = ["{layer}.left", "{layer}.right"]
steps = [{ split = 1, sizes = ["groups * 2", 1] }, { transpose = [0, 1], of = [1] }]

[[rule]]
from = "{layer}.rotary"
to = "{layer}.halves"
steps = [{ rearrange = "(heads half two) i -> (heads two half) i", axes = { two = 2, half = "half" } }]

[[rule]]
from = ["{layer}.part{n}.a", "{layer}.part{n}.b"]
to = "{layer}.parts"
steps = [{ stack = "n", dim = 1 }, { cat = 2, sizes = [1, 2] }]

[[rule]]
from = "{layer}.part{n}.bias"
to = "{layer}.biases"
steps = [{ stack = "n" }]
"""


def parameters(chance: random.Random, dtype: torch.dtype) -> State:
    state: State = {}
    for layer in ("first", "second"):
        rows, inner, heads = (chance.randint(1, 9) for _ in range(3))
        state[f"{layer}.conv"] = torch.randn(rows, inner, 3)
        state[f"{layer}.columns"] = torch.randn(rows, 5 * inner)
        state[f"{layer}.rotary"] = torch.randn(heads * 6, inner)
        for number in range(3):
            state[f"{layer}.part{number}.a"] = torch.randn(rows, inner)
            state[f"{layer}.part{number}.b"] = torch.randn(rows, 2 * inner)
            state[f"{layer}.part{number}.bias"] = torch.randn(rows)
    return {name: value.to(dtype) for name, value in state.items()}


def written_out(state: State) -> State:
    """What ``MAP`` makes of parameters, in torch's own words."""
    made: State = {}
    for layer in ("first", "second"):
        conv, columns, rotary = (state[f"{layer}.{name}"] for name in ("conv", "columns", "rotary"))
        made[f"{layer}.kernel"] = conv.permute(2, 1, 0).reshape(-1, conv.shape[0])
        left, right = columns.split([columns.shape[1] * 4 // 5, columns.shape[1] // 5], dim=1)
        made[f"{layer}.left"], made[f"{layer}.right"] = left, right.T
        made[f"{layer}.halves"] = rotary.view(-1, 3, 2, rotary.shape[1]).transpose(1, 2).reshape(rotary.shape)
        parts = [torch.stack([state[f"{layer}.part{n}.{name}"] for n in range(3)], dim=1) for name in "ab"]
        made[f"{layer}.parts"] = torch.cat(parts, dim=2)
        made[f"{layer}.biases"] = torch.stack([state[f"{layer}.part{n}.bias"] for n in range(3)])
    return made


def saved(path: Path, seed: int, **groups: Any) -> State:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = parameters(chance, torch.bfloat16)
    moments = {name: torch.randn(value.shape) for name, value in model.items()}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": moments[name]} for name in model}
    checkpoint = {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}}
    torch.save(checkpoint, path)
    return checkpoint


def moments(state: State) -> State:
    return {name: entry["exp_avg"] for name, entry in state["optimizer"]["state"].items()}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "map.toml").write_text(MAP)
    return {"map": tmp_path / "map.toml", "map_value": {"half": 3}, "verify": "full"}


@pytest.mark.parametrize("seed", range(3))
def test_every_step_gives_what_torch_gives_and_its_inverse_gives_the_bytes_back(
    tmp_path: Path, options: dict[str, Any], seed: int
) -> None:
    checkpoint = saved(tmp_path / "source.pt", seed)
    ranks = {"to": "sharded", "container": ("torch", "dcp")[seed % 2], "world_size": seed + 2}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "source", **ranks)  # uneven and empty shards
    fsdpckpt.convert(tmp_path / "source", tmp_path / "made.pt", to="full", **options)
    fsdpckpt.convert(tmp_path / "source", tmp_path / "made", **{**ranks, "world_size": 4}, **options)
    made = torch.load(tmp_path / "made.pt")
    require_identical(made["model"], written_out(checkpoint["model"]))
    require_identical(moments(made), written_out(moments(checkpoint)))
    assert fsdpckpt.diff(tmp_path / "made.pt", tmp_path / "made").same
    fsdpckpt.convert(tmp_path / "made", tmp_path / "back.pt", to="full", inverse=True, **options)
    back = torch.load(tmp_path / "back.pt")
    require_identical(back["model"], checkpoint["model"])
    require_identical(moments(back), moments(checkpoint))


def test_tensors_that_are_made_of_one_are_no_views_of_it_and_row_major(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path / "source.pt", 5)
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", **options)
    fsdpckpt.convert(tmp_path / "made.pt", tmp_path / "back.pt", inverse=True, **options)
    for path in ("made.pt", "back.pt"):
        for name, tensor in torch.load(tmp_path / path)["model"].items():
            assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_the_numbers_of_a_map_come_from_the_configuration_or_the_command(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    saved(tmp_path / "source.pt", 0)
    del options["map_value"]
    with pytest.raises(NeedsInformationError, match="needs half, which is unknown") as error:
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", **options)
    assert "map_value={'half': 'N'}" in str(error.value)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"head_dim": 6}')
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "made.pt", reference=tmp_path / "base", **options)
    with pytest.raises(UsageError, match=r"contradicts config\.json"):
        fsdpckpt.convert(
            tmp_path / "source.pt", tmp_path / "x.pt", reference=tmp_path / "base", map_value={"half": 2}, **options
        )
    for given, what in (({"halves": 2}, "has no value halves"), ({"half": 0}, "not a whole number")):
        with pytest.raises(UsageError, match=what):
            fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map_value=given, **options)
    with pytest.raises(SourceUnsupportedError, match=r"rotary does not fit"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map_value={"half": 5}, **options)


def with_rule(path: Path, rule: str, rest: str = "keep") -> Path:
    path.write_text(f'format = 1\nrest = "{rest}"\n[[rule]]\n{rule}\n')
    return path


def test_tied_parameters_become_one_and_two_again(tmp_path: Path) -> None:
    rule = with_rule(tmp_path / "tie.toml", 'from = "embed"\nto = ["embed", "head"]\nuntie = true')
    weight = torch.randn(3, 2)
    entry = {"step": torch.tensor(2.0), "exp_avg": torch.randn(3, 2)}
    optimizer = {"state": {"embed": entry}, "param_groups": [{"lr": 0.1, "params": ["embed"]}]}
    torch.save({"model": {"embed": weight}, "optimizer": optimizer}, tmp_path / "one.pt")
    report = fsdpckpt.convert(tmp_path / "one.pt", tmp_path / "two.pt", map=rule)
    assert "head is added: it is tied to embed, which has the states" in [note.message for note in report.notes]
    two = torch.load(tmp_path / "two.pt")
    require_identical(two["model"], {"embed": weight, "head": weight})
    assert list(two["optimizer"]["state"]) == two["optimizer"]["param_groups"][0]["params"] == ["embed"]
    fsdpckpt.convert(tmp_path / "two.pt", tmp_path / "again.pt", map=rule, inverse=True)
    assert fsdpckpt.diff(tmp_path / "one.pt", tmp_path / "again.pt").same
    torch.save({"model": {"embed": weight, "head": weight + 1}}, tmp_path / "apart.pt")
    with pytest.raises(SourceUnsupportedError, match="embed and head differ") as error:
        fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "x.pt", map=rule, inverse=True)
    assert error.value.key == "head"
    optimizer["state"]["head"] = entry
    optimizer["param_groups"][0]["params"].append("head")
    torch.save({"model": {"embed": weight, "head": weight}, "optimizer": optimizer}, tmp_path / "both.pt")
    with pytest.raises(SourceUnsupportedError) as both:
        fsdpckpt.convert(tmp_path / "both.pt", tmp_path / "x.pt", map=rule, inverse=True)
    assert "states of its own" in str(both.value.why)


@pytest.mark.parametrize(
    ("rule", "rest", "what"),
    [
        ('from = "{any*}.a"\nto = "b.{any*}"', "error", "has no rule for 2 parameters"),
        ('from = "x.a"\nto = "x.b"', "keep", "makes x.b, which is there already"),
        ('from = "{m}.a"\nto = "{m}.c"\n[[rule]]\nfrom = "x.{n}"\nto = "y.{n}"', "keep", "x.a matches rule 1"),
        ('from = "{m*}.{n*}"\nto = "{n*}.{m*}"', "keep", "does not lead back"),
        ('from = "x.a"\nto = "z"\n[[rule]]\nfrom = "x.b"\nto = "z"', "keep", "z would be made of x.a and of x.b"),
    ],
)
def test_a_map_that_is_no_bijection_of_the_names_is_refused(tmp_path: Path, rule: str, rest: str, what: str) -> None:
    torch.save(dict.fromkeys(("x.a", "x.b", "x.y.c"), torch.ones(2)), tmp_path / "source.pt")
    path = with_rule(tmp_path / "map.toml", rule, rest)
    with pytest.raises(UsageError) as error:
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map=path)
    assert what in error.value.what and error.value.file == str(path)


def test_selected_names_are_the_sources_and_new_prefixes_are_the_targets(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(2), "b.w": torch.zeros(2)}, tmp_path / "source.pt")
    path = with_rule(tmp_path / "map.toml", 'from = "{m}.w"\nto = "{m}.weight"')
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map=path, include="a.w", add_prefix="model.")
    assert list(torch.load(tmp_path / "x.pt")["model"]) == ["model.a.weight"]


@pytest.mark.parametrize(
    ("rule", "model", "what"),
    [
        ('from = "a"\nto = "a.{n}"\nsteps = [{ unstack = "n" }]', {"a": (0, 3)}, "nothing would be left"),
        ('from = ["a", "b"]\nto = "c"\nsteps = [{ cat = 0 }]', {"a": (0, 3), "b": (4, 3)}, "does not fit"),
    ],
)
def test_tensors_without_elements_that_would_not_come_back_are_refused(
    tmp_path: Path, rule: str, model: dict[str, tuple[int, ...]], what: str
) -> None:
    torch.save({name: torch.randn(shape) for name, shape in model.items()}, tmp_path / "source.pt")
    with pytest.raises(SourceUnsupportedError) as error:
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "x.pt", map=with_rule(tmp_path / "map.toml", rule, "error"))
    assert what in str(error.value)
