"""Flattened shards whose units nobody knows: what can be checked is checked, and nothing false is said."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.units.request import write_units
from fsdpckpt.ir.checkpoint import Layout
from tests.flat.flat_checkpoints import unit, units_of
from tests.oracle.compare import require_identical
from tests.oracle.fake_group import as_rank

GOLDEN = Path(__file__).parent.parent / "golden"
FORMS = ["torch-2.4/f1_flat_raw", "torch-2.4/f1_tiny_o", "torch-2.4/f1_nested_o", "torch-2.4/f1_orig_local"]


def copied(form: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / form, target, ignore=shutil.ignore_patterns("truth")))


def edit(path: Path, key: int, state: str, value: torch.Tensor) -> None:
    content = torch.load(path, weights_only=True)
    content["state"][key][state] = value
    torch.save(content, path)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_ranks_hold_nothing_of_are_no_problem(form: str, tmp_path: Path) -> None:
    result = fsdpckpt.verify(copied(form, tmp_path / "c"), digests=True, finite=True)
    assert result.problems == ()
    assert result.records > 0 and all(digest.sha256 for digest in result.digests)


def test_a_changed_byte_and_steps_that_disagree_between_ranks_and_between_parameters_are_found(tmp_path: Path) -> None:
    directory = copied("torch-2.4/f1_orig_raw", tmp_path / "c")
    located = fsdpckpt.inspect(directory, keys=["2.exp_avg"], ranks=True).tensors[0].tensor.chunks
    path = directory / f"optim_{int(located.rank[1])}.pt"
    data = bytearray(path.read_bytes())
    data[int(located.offset[1]) + 1] ^= 4
    path.write_bytes(data)
    (problem,) = fsdpckpt.verify(directory).problems
    assert (problem.kind, problem.file) == ("checksum", str(path))
    directory = copied("torch-2.4/f1_orig_raw", tmp_path / "steps")
    edit(directory / "optim_1.pt", 2, "step", torch.tensor(9.0))  # ranks 0 and 1 both hold some of it
    edit(directory / "optim_0.pt", 0, "step", torch.tensor(5.0))
    result = {(problem.kind, problem.key) for problem in fsdpckpt.verify(directory).problems}
    assert result == {("replica", "2.step"), ("step", "0.step")}


def test_inspect_shows_slices_as_they_are_and_where_each_rank_has_its_own(tmp_path: Path) -> None:
    directory = copied("torch-2.4/f1_tiny_o", tmp_path / "c")
    result = fsdpckpt.inspect(directory, keys=["2.exp_avg"], ranks=True)
    assert (result.checkpoint.layout, result.checkpoint.world_size, result.key_type) == (Layout.FLATTENED, 4, "id")
    document = result.to_json(ranks=True)
    (row,) = cast("list[Any]", document["tensors"])
    assert (row["shape"], row["placement"]) == ([21], "slices")
    chunks = [(chunk["rank"], chunk["box"]) for chunk in row["pieces"]]
    assert chunks == [(1, [[0, 4]]), (2, [[4, 16]]), (3, [[16, 21]])]
    assert "unnamed" in {note.kind for note in result.checkpoint.notes}


def test_diff_compares_slices_as_they_are(tmp_path: Path) -> None:
    one, other = copied("torch-2.4/f1_flat_raw", tmp_path / "a"), copied("torch-2.4/f1_flat_raw", tmp_path / "b")
    assert fsdpckpt.diff(one, other).same
    changed = torch.load(other / "optim_1.pt", weights_only=True)["state"][1]["exp_avg"]
    changed[7] += 1.0
    edit(other / "optim_1.pt", 1, "exp_avg", changed)
    (entry,) = [entry for entry in fsdpckpt.diff(one, other).entries if entry.sigil != "="]
    assert (entry.sigil, entry.key) == ("*", "1.exp_avg")
    assert "1 of 550 elements differ, first at [282]" in entry.detail


def test_problems_of_slices_that_have_names_are_told_once(tmp_path: Path) -> None:
    """A parameter without state is a problem of its id, and with units of its name, never of both."""
    from fsdpckpt.ir.dtypes import DTYPES
    from fsdpckpt.ir.parameters import Parameter
    from fsdpckpt.ir.unit_lists import units_of_lists
    from fsdpckpt.ir.units import Unit
    from fsdpckpt.ir.units_json import encode, render

    params = [Parameter(name, (8,), DTYPES["float32"]) for name in ("a", "m.b")]
    units = units_of_lists((Unit("", (params[0],)), Unit("m", (params[1],))), ("a", "m.b"), use_orig_params=False)
    for rank in range(2):
        state = {0: {"exp_avg": torch.randn(4, generator=torch.Generator().manual_seed(rank))}}
        groups = [{"lr": 0.1, "params": [0, 1]}]
        torch.save({"state": state, "param_groups": groups}, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    assert [problem.key for problem in fsdpckpt.verify(tmp_path).problems] == ["1"]
    (tmp_path / "units.json").write_text(render(encode(units)))
    assert [problem.key for problem in fsdpckpt.verify(tmp_path).problems] == ["m.b"]


def test_units_that_contradict_the_slices_are_a_problem_of_verify_and_an_error_of_diff(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.randn(5, 3), "b": torch.randn(7, 3)}}, tmp_path / "full.pt")
    options = {"to": "flattened", "world_size": 2, "unit": "none", "use_orig_params": False, "buffers": "none"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", **options)
    other = units_of(unit("", {"a": (5, 3), "b": (11, 3)}), use_orig_params=False)
    (tmp_path / "flat" / "fsdpckpt.json").unlink()  # which has the units, too
    write_units(other, str(tmp_path / "flat" / "units.json"))
    (problem, *_) = fsdpckpt.verify(tmp_path / "flat").problems
    assert problem.kind == "units"
    with pytest.raises(SourceCorruptError, match="units"):
        fsdpckpt.diff(tmp_path / "flat", tmp_path / "full.pt")


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, ShardingStrategy.FULL_SHARD), (2, ShardingStrategy.NO_SHARD), (2, None)]
)
def test_prefixes_of_fsdp_in_an_optimizer_keyed_by_name_are_no_difference(
    tmp_path: Path, world_size: int, strategy: ShardingStrategy | None, steps: int
) -> None:
    """Where nothing is cut, only these prefixes show that an optimizer was flattened; every conversion drops them."""
    (tmp_path / "a").mkdir()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            torch.manual_seed(rank if strategy is None else 0)
            layers = nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Linear(3, 7)))
            model = FullyShardedDataParallel(
                layers,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                use_orig_params=True,
                sharding_strategy=strategy,
                device_id=torch.device("cpu"),
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.randn(2, 5)).sum().backward()
                optimizer.step()
            names = [name for name, _ in model.named_parameters()]
            saved = optimizer.state_dict()
            saved["state"] = {names[key]: states for key, states in saved["state"].items()}
            saved["param_groups"][0]["params"] = names
            torch.save(saved, tmp_path / "a" / f"optim_world_size_{world_size}_rank_{rank}.pt")
            fsdpckpt.save_units(model, optimizer, tmp_path / "a")
    for to, options in (("flattened", {"world_size": 3}), ("flattened", {"world_size": 1}), ("full", {})):
        target = tmp_path / f"{to}{options.get('world_size', '')}"
        fsdpckpt.convert(tmp_path / "a", target, to=to, **options)
        for pair in ((tmp_path / "a", target), (target, tmp_path / "a")):
            found = fsdpckpt.diff(*pair)
            assert found.same and found.count("=") > 4 * 3 * steps, [
                each for each in found.entries if each.sigil != "="
            ]
    other = torch.load(target, weights_only=True)
    other["optimizer"]["param_groups"][0]["params"][0] += "x"
    torch.save(other, tmp_path / "other.pt")
    assert not fsdpckpt.diff(tmp_path / "a", tmp_path / "other.pt").same


@pytest.mark.parametrize("flavor", [None, "accelerate"])
def test_factored_states_of_whole_parameters_fit_the_units(tmp_path: Path, flavor: str | None) -> None:
    """Adafactor keeps a row and a column of each matrix. On one rank FSDP1 does not cut it, so that it can do so."""

    def trained(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        model(torch.arange(10.0).reshape(2, 5)).sum().backward()
        optimizer.step()
        return model, optimizer.state_dict()

    def by_name(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
        names = [name for name, _ in model.named_parameters()]
        saved["state"] = {names[key]: states for key, states in saved["state"].items()}
        saved["param_groups"][0]["params"] = names
        return saved

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    with as_rank(0, 1):
        wrapped = FullyShardedDataParallel(deepcopy(layers), use_orig_params=True, device_id=torch.device("cpu"))
        truth = by_name(*trained(wrapped))
    assert truth["state"]["_fsdp_wrapped_module.0.weight"]["row_var"].shape == (3, 1)
    model, saved = trained(layers)
    torch.save({"model": model.state_dict(), "optimizer": by_name(model, saved)}, tmp_path / "a.pt")
    options: dict[str, Any] = {"unit": "none", "use_orig_params": True, "flavor": flavor}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b", to="flattened", world_size=1, verify="full", **options)
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b").same
    if flavor is None:
        found = torch.load(tmp_path / "b" / "optim_world_size_1_rank_0.pt", weights_only=True)["state"]
        require_identical(found, truth["state"])


@pytest.mark.parametrize(
    "lead", ["_orig_mod.", "_fsdp_wrapped_module.", "l._checkpoint_wrapped_module.", "_orig_mod.l._orig_mod."]
)
@pytest.mark.parametrize("keys", ["name", "id"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_prefixes_of_wrappers_that_flat_parameters_do_not_have_are_no_difference(
    tmp_path: Path, lead: str, keys: str, world_size: int
) -> None:
    """Those of a compiled model, for example; the report says that they are lost."""
    model = {f"{lead}z": torch.randn(5, 3), f"{lead}a": torch.randn(7)}
    order = list(model) if keys == "name" else [0, 1]
    state = {key: {"exp_avg": torch.randn_like(tensor)} for key, tensor in zip(order, model.values(), strict=True)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": order}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "a.pt")
    report = fsdpckpt.convert(
        tmp_path / "a.pt",
        tmp_path / "b",
        to="flattened",
        world_size=world_size,
        unit="none",
        use_orig_params=True,
        key_type="name",
    )
    assert any("2 keys lost the prefixes of wrapper modules" in note.message for note in report.notes)
    for pair in ((tmp_path / "a.pt", tmp_path / "b"), (tmp_path / "b", tmp_path / "a.pt")):
        found = fsdpckpt.diff(*pair)
        assert found.same and found.count("=") == 6 and "wrapper modules" in found.notes[0]
    short = {name.replace(lead, ""): tensor for name, tensor in model.items()}
    torch.save({"model": short}, tmp_path / "short.pt")
    assert not fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "short.pt", only="model").same, "both say what they are"


def test_names_that_would_become_one_keep_their_prefixes(tmp_path: Path) -> None:
    for name, lr in (("a.pt", 1.0), ("b.pt", 2.0)):
        state = {f"{lead}w": {"exp_avg": torch.full((2,), lr)} for lead in ("", "_fsdp_wrapped_module.")}
        torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}, tmp_path / name)
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [each.key for each in found.entries if each.sigil == "*"] == [
        "w.exp_avg",
        "_fsdp_wrapped_module.w.exp_avg",
    ]
