"""Optimizers that list other parameters on each rank, or another order: saved by real FSDP1, carried, given back."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.flat.live.save import save_units, with_orders
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit
from tests.flat.live.conftest import World
from tests.oracle.compare import identical, require_identical
from tests.readers.contents import opened

pytestmark = pytest.mark.filterwarnings("ignore")

Named = list[tuple[str, nn.Parameter]]
Arrange = Callable[[int, Named], Any]


class Blocks(nn.Module):
    """Units of one size, in which nothing but the order tells ids apart. ``own``: a module of this rank alone."""

    def __init__(self, *, orig: bool, own: str = "") -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(2, 6) for _ in range(3)))
        for number in range(3):
            self.blocks[number] = FullyShardedDataParallel(
                self.blocks[number], use_orig_params=orig, device_id=torch.device("cpu")
            )
        if own:
            self.add_module(own, nn.Linear(2, 3))


def same(rank: int, named: Named) -> Any:
    return [param for _, param in named]


def reversed_on_odd_ranks(rank: int, named: Named) -> Any:
    return same(rank, named[::-1] if rank % 2 else named)


def in_groups(rank: int, named: Named) -> Any:
    return [
        {"params": reversed_on_odd_ranks(rank, named[1:])},
        {"params": [named[0][1]], "weight_decay": 0.5},
    ]


def train(
    world: World, folder: Path, arrange: Arrange, *, orig: bool, ranks: Sequence[int] = (0, 1), own: bool = False
) -> list[Any]:
    """Save each of the ranks, in this order, and return what it has; states depend on rank and name alone."""
    store = dist.HashStore()
    folder.mkdir(exist_ok=True)
    saved = {}
    for rank in ranks:
        world(len(ranks), rank=rank, store=store)
        torch.manual_seed(0)
        model = Blocks(orig=orig, own=f"own{min(rank, 1)}" if own else "")
        named = list(model.named_parameters())
        optimizer = torch.optim.AdamW(arrange(rank, named))
        for name, param in named:
            seed = zlib.crc32(name.encode()) + (0 if name.startswith("own") else rank)
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
            if not param.numel():
                param.grad = None
        optimizer.step()
        saved[rank] = optimizer.state_dict()
        torch.save(saved[rank], folder / f"optim_world_size_{len(ranks)}_rank_{rank}.pt")
        save_units(model, optimizer, folder)
    return [saved[rank] for rank in sorted(saved)]


def states_by_name(folder: Path, **options: Any) -> Any:
    """The states of what was saved in ``folder``, written to a file beside it."""
    full = folder.with_suffix(".pt")
    fsdpckpt.convert(folder, full, to="full", key_type="name", only="optim", **options)
    return torch.load(full)["state"]


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(("arrange", "ranks"), [(reversed_on_odd_ranks, (0, 1)), (in_groups, (2, 1, 0))])
def test_every_rank_s_ids_are_read_and_written_in_its_own_order(
    world: World, tmp_path: Path, arrange: Arrange, orig: bool, ranks: Sequence[int]
) -> None:
    count = len(ranks)
    train(world, tmp_path / "same", same, orig=orig, ranks=ranks)
    saved = train(world, tmp_path / "other", arrange, orig=orig, ranks=ranks)
    assert json.loads((tmp_path / "other" / "units.json").read_text())["version"] == 2
    expected = states_by_name(tmp_path / "same")
    require_identical(states_by_name(tmp_path / "other"), expected)
    again = {"to": "flattened", "world_size": count, "key_type": "id", "only": "optim"}
    units = tmp_path / "other" / "units.json"
    fsdpckpt.convert(tmp_path / "other.pt", tmp_path / "back", units=units, **again)
    fsdpckpt.convert(tmp_path / "other", tmp_path / "kept", **again)
    for folder in ("back", "kept"):
        for rank, state in enumerate(saved):
            written = torch.load(tmp_path / folder / f"optim_world_size_{count}_rank_{rank}.pt")
            require_identical(written, state)
        assert fsdpckpt.verify(tmp_path / folder).whole
    assert fsdpckpt.diff(tmp_path / "other", tmp_path / "kept").same
    with pytest.raises(NeedsInformationError, match="different orders") as error:
        fsdpckpt.convert(tmp_path / "other", tmp_path / "more", to="flattened", world_size=5)
    assert "--units FILE" in str(error.value.next_step)
    with pytest.raises(NeedsInformationError, match="another parameter on each rank") as error:
        fsdpckpt.convert(tmp_path / "other", tmp_path / "ids", to="sharded", container="dcp", world_size=2)
    assert "name" in str(error.value.next_step)
    fsdpckpt.convert(tmp_path / "other", tmp_path / "ids.pt", to="full", only="optim")
    ids = torch.load(tmp_path / "ids.pt")["state"]
    assert sorted(ids) == list(range(len(expected)))


def test_every_command_takes_the_order_from_a_units_file_elsewhere(world: World, tmp_path: Path) -> None:
    """Nothing else says it, and where lengths are equal nothing shows that it is missing."""
    states: dict[str, Any] = {}
    for name, arrange in (("same", same), ("other", reversed_on_odd_ranks)):
        train(world, tmp_path / name, arrange, orig=True)
        units = (tmp_path / name / "units.json").replace(tmp_path / f"{name}.json")
        states[name] = states_by_name(tmp_path / name, units=units)
    expected = states["same"]
    require_identical(states["other"], expected)
    verified = fsdpckpt.verify(tmp_path / "other", units=units, digests=True)
    assert verified.whole and verified.digests == fsdpckpt.verify(tmp_path / "other.pt", digests=True).digests
    assert fsdpckpt.diff(tmp_path / "other", tmp_path / "other.pt", units=units).same
    listed = (
        fsdpckpt.inspect(tmp_path / "other", units=units, stats=True).to_json()["tensors"],
        fsdpckpt.inspect(tmp_path / "other.pt", stats=True).to_json()["tensors"],
    )
    means = [{one["key"]: one["stats"]["norm"] for one in tensors} for tensors in listed]
    assert means[0] == pytest.approx(means[1]) and len(means[0]) == 18
    with fsdpckpt.open(tmp_path / "other", units=units) as found:
        key = next(key for key in found if key.endswith("blocks.1.weight.exp_avg"))
        assert identical(found[key].torch(), expected["blocks.1.weight"]["exp_avg"])
    wanted = {"optimizer": {"state": {"blocks.1.weight": {"exp_avg": torch.zeros(6, 2)}}}}
    dcp.load(wanted, storage_reader=fsdpckpt.StorageReader(tmp_path / "other", units=units), no_dist=True)
    filled = wanted["optimizer"]["state"]["blocks.1.weight"]["exp_avg"]
    assert identical(filled, expected["blocks.1.weight"]["exp_avg"])


def test_param_names_say_the_order_of_each_rank_and_not_that_of_the_ranks_that_will_load(
    world: World, tmp_path: Path
) -> None:
    train(world, tmp_path / "same", same, orig=True)
    train(world, tmp_path / "other", lambda rank, named: named[::-1] if rank else named, orig=True)
    (tmp_path / "same" / "units.json").replace(tmp_path / "other" / "units.json")
    expected = states_by_name(tmp_path / "same", units=tmp_path / "other" / "units.json")
    require_identical(states_by_name(tmp_path / "other"), expected)
    with pytest.raises(NeedsInformationError, match="different orders"):
        fsdpckpt.convert(tmp_path / "other", tmp_path / "back", to="flattened", world_size=2)


def test_units_of_an_optimizer_with_other_groups_say_no_order(world: World, tmp_path: Path) -> None:
    train(world, tmp_path / "other", lambda rank, named: named[::-1] if rank else named, orig=True)
    train(world, tmp_path / "groups", in_groups, orig=True)
    (tmp_path / "groups" / "units.json").replace(tmp_path / "other" / "units.json")
    found = opened(tmp_path / "other").optim
    assert found is not None
    (order,) = found.orders
    assert order.ranks == (1,) and order.groups == (tuple(range(6))[::-1],)


def test_a_name_that_is_left_out_or_new_leaves_the_orders_of_ranks_in_force(world: World, tmp_path: Path) -> None:
    train(world, tmp_path / "other", reversed_on_odd_ranks, orig=True)
    options = {"only": "optim", "exclude": ["blocks.1.*"], "rename": ["blocks.2=last"], "key_type": "id"}
    changed = tmp_path / "changed"
    fsdpckpt.convert(tmp_path / "other", changed, to="flattened", world_size=2, **options)
    names = [f"blocks.{n}.{word}" for n in range(3) for word in ("weight", "bias")]
    kept = [name for name in names if "blocks.1." not in name]
    for rank in range(2):
        old = torch.load(tmp_path / "other" / f"optim_world_size_2_rank_{rank}.pt")
        new = torch.load(changed / f"optim_world_size_2_rank_{rank}.pt")
        before, after = (listed[::-1] if rank else listed for listed in (names, kept))
        held = {name: new["state"][number] for number, name in enumerate(after) if number in new["state"]}
        expected = {name: old["state"][number] for number, name in enumerate(before) if number in old["state"]}
        expected = {name: states for name, states in expected.items() if name in kept}
        require_identical(held, expected)


def test_the_order_in_which_ranks_call_makes_no_difference(world: World, tmp_path: Path) -> None:
    for name, ranks in {"up": (0, 1, 2), "down": (2, 1, 0), "mixed": (1, 0, 2)}.items():
        train(world, tmp_path / name, reversed_on_odd_ranks, orig=True, ranks=ranks)
    files = {name: (tmp_path / name / "units.json").read_bytes() for name in ("up", "down", "mixed")}
    assert files["up"] == files["down"] == files["mixed"]
    document = json.loads(files["up"])
    assert document["groups"] == [[name for n in range(3) for name in (f"blocks.{n}.weight", f"blocks.{n}.bias")]]
    assert document["orders"] == [{"ranks": [1], "groups": [document["groups"][0][::-1]]}]


def test_parameters_that_one_rank_has_alone_stay_its_own(world: World, tmp_path: Path) -> None:
    saved = train(world, tmp_path / "saved", same, orig=True, ranks=(0, 1, 2), own=True)
    fsdpckpt.convert(tmp_path / "saved", tmp_path / "full.pt", to="full", key_type="name", only="optim")
    full = torch.load(tmp_path / "full.pt")
    own = ["own0.weight", "own0.bias", "own1.weight", "own1.bias"]
    assert [name for name in full["param_groups"][0]["params"] if name.startswith("own")] == own
    require_identical(full["state"]["own1.bias"], saved[2]["state"][7])
    fsdpckpt.convert(tmp_path / "saved", tmp_path / "back", to="flattened", world_size=3, only="optim")
    for rank, state in enumerate(saved):
        require_identical(torch.load(tmp_path / "back" / f"optim_world_size_3_rank_{rank}.pt"), state)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": (2, 3)}, "[3, 2] float32 on one rank and [2, 3] float32 on another"),
        ({"dtype": DTYPES["bfloat16"]}, "[3, 2] float32 on one rank and [3, 2] bfloat16 on another"),
        ({"requires_grad": False}, "[3, 2] float32 on one rank and [3, 2] float32, frozen, on another"),
        ({"stride": (1, 3)}, "[3, 2] float32 on one rank and [3, 2] float32 of strides [1, 3] on another"),
    ],
)
def test_what_differs_of_a_parameter_outside_of_the_units_is_said(change: dict[str, Any], text: str) -> None:
    inside, outside = (
        Parameter(name, shape, DTYPES["float32"]) for name, shape in (("blocks.0.weight", (6, 2)), ("head", (3, 2)))
    )
    units = units_of_lists(
        (Unit("blocks.0", (inside,)),), ("blocks.0.weight", "head"), use_orig_params=True, unmanaged=(outside,),
        world_size=2,
    )  # fmt: skip
    usual = units.with_groups((("blocks.0.weight",),))
    other = replace(units.with_groups((("head",),)), unmanaged=(replace(outside, **change),))
    with pytest.raises(SourceUnsupportedError) as refused:
        with_orders({None: usual, 1: other})
    assert refused.value.what == f"head is {text}"


def test_a_rank_that_lacks_a_sharded_parameter_is_named(world: World, tmp_path: Path) -> None:
    train(world, tmp_path / "c", lambda rank, named: same(rank, named[:-1] if rank else named), orig=False)
    with pytest.raises(SourceIncompleteError, match="not whole") as error:
        fsdpckpt.convert(tmp_path / "c", tmp_path / "full.pt", to="full", key_type="name")
    (detail,) = error.value.details
    assert detail.startswith("the optimizer of rank 1 has no blocks.2._flat_param")
    assert "some ranks are missing some of those states" in detail


def test_an_order_that_cannot_be_recorded_is_an_error_on_its_rank(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory on the disk of one machine: the file of rank 0 would lack the order of the others."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store = dist.HashStore()
    for rank in range(2):
        world(2, rank=rank, store=store)
        model = Blocks(orig=True)
        optimizer = torch.optim.AdamW(reversed_on_odd_ranks(rank, list(model.named_parameters())))
        if rank:
            (tmp_path / "units.json").unlink()
            with pytest.raises(SourceUnsupportedError, match=r"rank 1 lists .* in a different order"):
                save_units(model, optimizer, tmp_path)
        else:
            save_units(model, optimizer, tmp_path)
