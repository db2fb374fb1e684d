"""Ways in which values could change or get lost on their way through several containers; each was a bug once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.oracle.compare import identical, require_identical, require_parts

WORLD = 3
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def to_full(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    fsdpckpt.convert(source, target, to="full", verify="full", **options)
    return torch.load(target, weights_only=False)


def to_ranks(source: Path, target: Path, world_size: int, **options: Any) -> list[dict[str, Any]]:
    """The extras that each rank gets."""
    fsdpckpt.convert(source, target, to="sharded", container="torch", world_size=world_size, verify="full", **options)
    names = [target / f"extra_state_world_size_{world_size}_rank_{rank}.pt" for rank in range(world_size)]
    return [torch.load(name, weights_only=False) for name in names]


def rank_files(directory: Path, extras: list[dict[str, Any]]) -> Path:
    """A model that is whole on every rank, and these extras, as ``torch.save`` of each rank would leave them."""
    directory.mkdir()
    model = {"l.weight": torch.randn(5, 3)}
    for rank, extra in enumerate(extras):
        saved(model, directory / f"model_world_size_{len(extras)}_rank_{rank}.pt")
        saved(extra, directory / f"extra_state_world_size_{len(extras)}_rank_{rank}.pt")
    return directory


def model() -> dict[str, torch.Tensor]:
    return {"l.weight": torch.randn(5, 3), "l.bias": torch.randn(5)}


# --- casts ------------------------------------------------------------------------------------------------------------


def every_float(name: str) -> torch.Tensor:
    """Numbers of all sizes, numbers half-way between two short floats, and their neighbours."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    generator = torch.Generator().manual_seed(11)
    tiny = torch.arange(0, 2**15, 7, dtype=torch.int16).view(torch.float16).double()
    tiny = tiny[tiny.isfinite()]
    between = (tiny[:-1] + tiny[1:]) / 2
    spread = torch.randn(4001, generator=generator, dtype=torch.float64)
    spread = spread * 10.0 ** torch.randint(-9, 6, (4001,), generator=generator)
    edges = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 448, 464, 465, 57344, 61440, 65504, 65520])
    numbers = [spread, tiny, between, between * (1 + 2**-30), between * (1 - 2**-30), edges.double()]
    return torch.cat(numbers).to(dtype)


@pytest.mark.parametrize("name", FLOATS)
def test_a_cast_gives_the_numbers_that_torch_gives_whatever_the_types(tmp_path: Path, name: str) -> None:
    values = {f"l.{other}": every_float(other) for other in FLOATS}
    found = to_full(saved({"model": values}, tmp_path / "a.pt"), tmp_path / "b.pt", dtype=name)["model"]
    for key, value in values.items():
        expected, cast = value.to(getattr(torch, name)), found[key]
        assert cast.dtype is expected.dtype
        nan = expected.double().isnan()
        assert identical(cast.double().isnan(), nan), key
        same = cast.view(torch.uint8).view(len(value), -1) == expected.view(torch.uint8).view(len(value), -1)
        assert same.all(dim=1)[~nan].all(), key


def test_a_dtype_that_only_holds_scales_is_no_target_of_a_cast(tmp_path: Path) -> None:
    source = saved({"model": model()}, tmp_path / "a.pt")
    with pytest.raises(UsageError):
        to_full(source, tmp_path / "b.pt", dtype="float8_e8m0fnu")


@pytest.mark.parametrize("container", ["torch", "dcp", "safetensors"])
def test_a_cast_of_the_model_does_not_reach_the_same_dict_among_the_extras(tmp_path: Path, container: str) -> None:
    weights = model()
    source = saved({"model": weights, "ema": weights}, tmp_path / "a.pt")
    middle = tmp_path / ("b.pt" if container == "torch" else "b")
    fsdpckpt.convert(source, middle, to="full", container=container, dtype="bfloat16", verify="full")
    found = to_full(middle, tmp_path / "c.pt")
    for key, weight in weights.items():
        assert identical(found["ema"][key], weight)
        assert identical(found["model"][key], weight.bfloat16())


# --- extras -----------------------------------------------------------------------------------------------------------


def test_extras_that_look_like_a_model_stay_extras_in_rank_files(tmp_path: Path) -> None:
    extras = {"scale": torch.randn(3), "ema": {"l.weight": torch.randn(5, 3)}, "epoch": 4}
    source = saved({"model": model(), **extras}, tmp_path / "a.pt")
    for rank in to_ranks(source, tmp_path / "ranks", WORLD, buffers=("none",)):
        assert identical(rank["scale"], extras["scale"]) and rank["epoch"] == 4
    found = to_full(tmp_path / "ranks", tmp_path / "b.pt")
    assert identical(found["scale"], extras["scale"])
    assert identical(found["ema"]["l.weight"], extras["ema"]["l.weight"])


SQUARE = torch.randn(4, 4)
OWN: dict[str, list[dict[str, Any]]] = {
    "a tensor": [{"cursor": torch.randn(7), "l": [rank]} for rank in range(WORLD)],
    "a large tensor": [{"cursor": torch.randn(300_001), "l": [rank]} for rank in range(WORLD)],
    "a tensor that is transposed": [{"cursor": SQUARE}, {"cursor": SQUARE.t()}],
    "a dict that has something else on one": [{"run": run, "epoch": 4} for run in ({"id": "x", "rank": 0}, {}, None)],
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("what", OWN)
def test_extras_that_ranks_differ_in_stay_each_ranks_own(tmp_path: Path, what: str, checked: bool) -> None:
    extras = OWN[what]
    torch.serialization.set_crc32_options(checked)
    try:
        source = rank_files(tmp_path / "a", extras)
    finally:
        torch.serialization.set_crc32_options(True)
    found = to_ranks(source, tmp_path / "b", len(extras) + 1, buffers=("none",))
    require_identical(found, [*extras, extras[0]])
    if "dict" in what:
        assert to_full(source, tmp_path / "full.pt")["run"] == extras[0]["run"]


@pytest.mark.parametrize("options", [{"to": "full"}, {"to": "sharded", "world_size": 2, "buffers": ("none",)}])
def test_only_the_extras_that_ranks_differ_in_are_said_to_differ(tmp_path: Path, options: dict[str, Any]) -> None:
    common = {"epoch": 4, "schedule": {"last": [1, 2.5], "table": torch.arange(5)}, "large": torch.randn(300_001)}
    extras = [{**common, "cursor": torch.tensor(rank), "seeds": {"own": rank, "all": 7}} for rank in range(WORLD)]
    source = rank_files(tmp_path / "a", extras)
    report = fsdpckpt.convert(source, tmp_path / "b", **options)
    assert [note.key for note in report.notes if "differs between" in note.message] == ["cursor", "seeds"]


def test_a_defaultdict_that_stands_in_two_places_is_read_in_both(tmp_path: Path) -> None:
    shared = defaultdict(list, {"seen": torch.randn(3)})
    source = saved({"model": model(), "one": shared, "two": {"three": shared}}, tmp_path / "a.pt")
    found = to_full(source, tmp_path / "b.pt")
    assert identical(found["one"]["seen"], shared["seen"])
    assert identical(found["two"]["three"]["seen"], shared["seen"])


@pytest.mark.parametrize("key", ["hooks", "l._extra_state"])
def test_an_empty_dict_in_the_model_is_kept_or_noted(tmp_path: Path, key: str) -> None:
    source = saved({"model": {**model(), key: {}}}, tmp_path / "a.pt")
    assert to_full(source, tmp_path / "b.pt")["model"][key] == {}
    fsdpckpt.convert(source, tmp_path / "c.safetensors")
    assert to_full(tmp_path / "c.safetensors", tmp_path / "c.pt")["model"][key] == {}
    report = fsdpckpt.convert(source, tmp_path / "d", to="sharded", world_size=2)
    assert any(f"model.{key} is an empty dict" in note.message for note in report.notes)
    for one in ("b.pt", "c.safetensors", "d"):
        assert fsdpckpt.diff(source, tmp_path / one).same and fsdpckpt.diff(tmp_path / one, source).same
    assert not fsdpckpt.diff(source, tmp_path / "d", strict=True).same


def test_a_note_says_that_defaultdicts_become_dicts(tmp_path: Path) -> None:
    extras = {"seen": defaultdict(int, {"a": 1}), "parts": (defaultdict(list), 1), "same": (defaultdict(list), 1)}
    source = saved({"model": model(), **extras}, tmp_path / "a.pt")
    dcp.save({"model": model(), **extras}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # enters dicts by itself
    ranks = rank_files(tmp_path / "ranks", [extras, extras])
    for path, where in ((source, f"{source}"), (ranks, "rank_0.pt and 1 more file"), (tmp_path / "dcp", "dcp")):
        notes = fsdpckpt.convert(path, tmp_path / f"{path.stem}-full.pt", to="full").notes
        (message,) = (note.message for note in notes if "defaultdict" in note.message)
        assert message.endswith(
            f"{where} become plain dicts: parts.0, same.0" + ("" if path.stem == "dcp" else ", seen")
        )


def test_a_list_that_held_the_model_and_the_optimizer_keeps_what_else_was_in_it_where_it_was(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.randn(5, 3)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    found = to_full(saved({"parts": [model(), optimizer, 7]}, tmp_path / "a.pt"), tmp_path / "b.pt")
    assert found["parts"] == [{}, {}, 7]  # no item moves: a job that reads number 2 finds it
    assert list(found) == ["model", "optimizer", "parts"]


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_ids_of_several_optimizers_are_numbers_again_after_dcp(tmp_path: Path) -> None:
    weights = model()
    optimizers = {
        name: {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(weight)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        }
        for name, weight in zip(("generator", "critic"), weights.values(), strict=True)
    }
    source = saved({"model": weights, "optimizers": optimizers}, tmp_path / "a.pt")
    fsdpckpt.convert(source, tmp_path / "b", to="sharded", world_size=2)
    found = to_full(tmp_path / "b", tmp_path / "c.pt")["optimizers"]
    for name, optimizer in optimizers.items():
        parameter = torch.nn.Parameter(torch.zeros_like(optimizer["state"][0]["exp_avg"]))
        live = torch.optim.Adam([parameter])
        live.load_state_dict(found[name])
        assert identical(live.state[parameter]["exp_avg"], optimizer["state"][0]["exp_avg"])


def test_keys_below_a_parameters_state_that_become_text_in_dcp_are_named(tmp_path: Path) -> None:
    state = {0: {"step": 1, "factors": {0: torch.randn(5, 5), 1: torch.randn(3, 3)}}}
    source = saved(
        {"model": model(), "optimizer": {"state": state, "param_groups": [{"params": [0, 1]}]}}, tmp_path / "a"
    )
    report = fsdpckpt.convert(source, tmp_path / "b", to="sharded", world_size=2)
    renamed = [note.message for note in report.notes if note.kind == "renamed"]
    assert len(renamed) == 1 and "0, 1 of optimizer.state.0.factors" in renamed[0]


def test_states_of_several_shapes_without_a_parameter_of_their_name_are_not_guessed_at(tmp_path: Path) -> None:
    state = {0: {"exp_avg": torch.randn(5, 3), "row": torch.randn(5)}, 1: {"exp_avg": torch.randn(5)}}
    root = {"model": model(), "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}
    source = saved(root, tmp_path / "a.pt")
    with pytest.raises(NeedsInformationError) as error:
        fsdpckpt.convert(source, tmp_path / "b", to="sharded", container="torch", world_size=2)
    assert error.value.details == ("0",)
    fsdpckpt.convert(source, tmp_path / "c", to="sharded", container="dcp", world_size=2)
    found = to_full(tmp_path / "c", tmp_path / "d.pt")
    require_parts(found["optimizer"]["state"][0], state[0])


def test_counters_are_not_cast_whatever_their_shape_and_moments_are(tmp_path: Path) -> None:
    """Some optimizers keep ``step`` as a tensor of one element; bfloat16 would make 257 of it 256."""
    state = {
        0: {"step": torch.tensor([257.0]), "exp_avg": torch.randn(5, 3)},
        1: {"step": torch.tensor(257.0), "exp_avg": torch.randn(5)},
    }
    root = {"model": model(), "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}
    source = saved(root, tmp_path / "a.pt")
    found = to_full(source, tmp_path / "b.pt", optim_dtype="bfloat16")["optimizer"]["state"]
    for key, entry in state.items():
        assert found[key]["step"].dtype is torch.float32 and identical(found[key]["step"], entry["step"])
        assert identical(found[key]["exp_avg"], entry["exp_avg"].bfloat16())


def test_a_square_weight_and_its_transpose_on_one_storage_stay_what_they_are(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    tied = {"a.weight": weight, "b.weight": weight.t(), "c.weight": weight[1:], "d.weight": weight}
    source = saved({"model": tied}, tmp_path / "a.pt")
    for middle in ("b.pt", "b.safetensors", "b"):
        fsdpckpt.convert(source, tmp_path / middle, to="full", container="dcp" if middle == "b" else None)
        found = to_full(tmp_path / middle, tmp_path / f"{middle}-c.pt")["model"]
        require_parts(found, tied)
