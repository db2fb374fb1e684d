"""Models that each rank saved as what it holds: put together where the optimizer's DTensors prove how, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceCorruptError
from tests.converters.jobs import converted, notes, refused
from tests.converters.meshes import on_each_rank, save_each
from tests.oracle.compare import identical, require_identical, require_parts

Change = Callable[[int, dict[str, Any]], None]


class Net(nn.Module):
    """Tied weights, parameters of one shape, BatchNorm, and a buffer of the size of a rank's part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(6.0))


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Other values for each tensor, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    drawn: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        drawn[name] = torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor + 3
    if "head.weight" in drawn:
        drawn["head.weight"] = drawn["embed.weight"]
    return drawn


def save(
    make: Callable[[], nn.Module],
    world_size: int,
    *,
    frozen: str = "",
    change: Change = lambda rank, content: None,
) -> dict[str, torch.Tensor]:
    """RLinf's ``local_shard`` files, with the real FSDP2 layout of each rank. Returns the whole tensors."""
    Path("s").mkdir()
    whole = values(make())
    for rank in on_each_rank(world_size):
        model = make()
        model.load_state_dict(whole)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen or "\0"))
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for number, param in enumerate(trained):  # states alone: weights stay
            state = {"exp_avg": torch.zeros_like(param) + number, "exp_avg_sq": torch.zeros_like(param)}
            optimizer.state[param] = {"step": torch.tensor(3.0), **state}
        local = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
            for name, tensor in model.state_dict().items()
        }
        if "head.weight" in local:
            local["head.weight"] = local["embed.weight"]
        content = {"model": local, "optimizers": optimizer.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
        change(rank, content)
        torch.save(content, f"s/checkpoint_rank_{rank}.pt")
    return whole


@pytest.mark.parametrize(("make", "world_size"), [(Net, 4), (Uneven, 3), (Uneven, 8)])
def test_local_tensors_are_put_together_as_the_optimizers_dtensors_are_cut(
    make: Callable[[], nn.Module], world_size: int
) -> None:
    whole = save(make, world_size)
    buffers = ["mask"] if make is Net else []
    report = fsdpckpt.convert("s", "o.pt", buffers=buffers)
    found = torch.load("o.pt")["model"]
    assert list(found) == list(whole)
    require_identical(found, whole)
    (note,) = notes(report, "inferred")
    assert "put together as the optimizer's DTensors are cut ([Shard(0)])" in note.message
    assert [problem.key for problem in fsdpckpt.verify("s").problems] == buffers  # it may be a part
    fsdpckpt.convert("s", "two", world_size=2, only="model", buffers=buffers)
    require_parts(converted("two", "again.pt", only="model"), whole)


def test_slices_that_are_equal_on_all_ranks_are_parts_all_the_same() -> None:
    """Gains of one and biases of zero are, at the beginning of a training."""

    def as_new(rank: int, content: dict[str, Any]) -> None:
        for name, tensor in content["model"].items():
            if name != "mask" and tensor.is_floating_point():
                tensor.fill_(1)

    whole = save(Net, 4, change=as_new)
    found = converted("s", "o.pt", buffers=["mask"])["model"]
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in whole.items()}


def test_a_frozen_parameter_may_be_a_part_and_is_asked_for() -> None:
    whole = save(Uneven, 3, frozen="b")
    error = refused(NeedsInformationError, "2 model tensors", "s", "o.pt")
    assert [text.partition(":")[0] for text in error.details] == ["model b.weight", "model b.bias"]
    shown = fsdpckpt.inspect("s").checkpoint.problems
    for name in ("b.weight", "b.bias"):
        assert name in {problem.key for problem in fsdpckpt.verify("s").problems}
        assert ("copies", name) in {(problem.kind, problem.key) for problem in shown}
    report = fsdpckpt.convert("s", "o.pt", buffers=["b.*"])
    found = torch.load("o.pt")["model"]
    assert identical(found["a.weight"], whole["a.weight"]) and found["b.weight"].shape == (1, 7)
    assert ("b.weight", "b.bias") in [note.keys for note in notes(report, "replicas")]


def plain_optimizer(rank: int, content: dict[str, Any]) -> None:
    """What each rank holds of the states, too: nothing in the files says how they are cut."""
    for entry in content["optimizers"]["state"].values():
        entry.update({k: v.to_local() if isinstance(v, DTensor) else v for k, v in entry.items()})


def dtensor_model(rank: int, content: dict[str, Any]) -> None:
    """A model of DTensors beside an ``exp_avg`` that is what the rank holds."""
    states = content["optimizers"]["state"]
    names = [name for name in content["model"] if name.partition(".")[2] in ("weight", "bias")]
    for entry, name in zip(states.values(), names, strict=False):
        content["model"][name] = entry["exp_avg_sq"]
        entry["exp_avg"] = entry["exp_avg"].to_local()


@pytest.mark.parametrize("change", [plain_optimizer, dtensor_model])
def test_parts_that_nothing_puts_together_are_refused(change: Change) -> None:
    save(Uneven, 3, change=change)
    assert not fsdpckpt.verify("s").whole
    assert refused(FsdpckptError, "", "s", "o.pt").exit_code == 3


def test_a_moment_saved_as_what_a_rank_holds_contradicts_its_parameter() -> None:
    save(Net, 4, change=dtensor_model)
    assert any(problem.kind == "shape" for problem in fsdpckpt.inspect("s").checkpoint.problems)
    refused(SourceCorruptError, "different shapes", "s", "o.pt")


def test_tensors_that_outnumber_the_states_of_their_shape_are_not_told_apart() -> None:
    save(Net, 4, frozen="up")  # a rank's part of up.weight has the shape of one of embed.weight
    refused(SourceCorruptError, "different shapes", "s", "o.pt", buffers=["mask", "up.*"])


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("shape", [(), (6,), (3, 4)])
def test_experts_of_each_rank_are_never_one_ranks(shape: tuple[int, ...], view: bool) -> None:
    """Expert parallelism without DTensors: one name, another tensor on each rank. A view of a larger storage has no
    checksum of its own: its bytes are read.
    """

    def state(rank: int) -> dict[str, torch.Tensor]:
        expert = torch.randn((2, *shape), generator=torch.Generator().manual_seed(rank))[0]
        return {
            "router.weight": torch.ones(2, 2), "experts.0.w": expert if view else expert.clone(),
            "norm.running_mean": torch.zeros(3) + rank, "norm.running_var": torch.ones(3),
            "norm.num_batches_tracked": torch.tensor(rank),
        }  # fmt: skip

    error = refused(NeedsInformationError, "", save_each("s", 2, state), "o.pt", to="full")
    assert [text.partition(":")[0] for text in error.details] == ["model experts.0.w"]
    result = fsdpckpt.verify("s")
    assert [problem.key for problem in result.problems] == ["experts.0.w"]
    assert any("2 buffers differ between ranks" in note for note in result.notes)
    if not view:  # whose bytes no header shows
        (note,) = fsdpckpt.diff("s", "s").notes[:1]
        assert note.endswith("only the lowest rank's copy is compared of experts.0.w")
        with fsdpckpt.open("s") as opened:
            assert opened["router.weight"].numpy().all()
            with pytest.raises(NeedsInformationError, match=r"experts\.0\.w"):
                opened["experts.0.w"].numpy()
    fsdpckpt.convert("s", "o.pt", to="full", buffers=["experts.*"])
    refused(SourceCorruptError, "contradicts itself", "s", "p.pt", to="full", buffers=["none"])
