"""What every rank of a real Gloo group does to compare ``fsdpckpt.comm`` with PyTorch.

``python -m tests.comm.checks OUT`` does it for each of ``WORLD_SIZES``. Each function ``check_...`` is one situation;
it raises on any rank where something is wrong. Rank r of N writes ``OUT/N/rank-r.json``: {situation: error text or ""}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._state_dict_utils import _broadcast_state_dict, _distribute_state_dict, _gather_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.masked import masked_tensor

from fsdpckpt import comm
from fsdpckpt.comm import torch_group
from fsdpckpt.comm.exchanger import Exchanger, SendRecv
from fsdpckpt.comm.launch import GpuVotes
from fsdpckpt.errors import StateDictMismatchError, UsageError, WorkerError
from fsdpckpt.process import FIRST_PORT
from tests.comm.forked_workers import forked_workers
from tests.comm.group_contract import GroupContract
from tests.oracle.compare import require_identical
from tests.writers.meshes import all_three, hsdp, net, over_tp, sharded_model

WORLD_SIZES = (2, 3, 4)
BUDGET = 1 << 14  # four chunks of one page: every tensor of some size crosses in chunks


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits of ``dtype``, the same on every rank, NaNs included."""
    generator = torch.Generator().manual_seed(seed + sum(shape) * 31)
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same(found: Any, expected: Any, where: str = "") -> None:
    """Equal bit for bit, with the same types of containers and values, order of keys and attributes."""
    require_identical(found, expected, where)
    _same_types(found, expected, where)


def _same_types(found: Any, expected: Any, where: str) -> None:
    plain = isinstance(expected, torch.Tensor) and not isinstance(expected, (DTensor, ShardedTensor))
    assert type(found) is (torch.Tensor if plain else type(expected)), f"{where}: {type(found)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: {found!r:.200}"
        assert not isinstance(expected, OrderedDict) or vars(found) == vars(expected), f"{where}: {vars(found)}"
        for key in expected:
            _same_types(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _same_types(one, other, f"{where}[{number}]")


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], *texts: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The body ends with ``error`` on this rank, which says ``texts``, each detail on a line of its own."""
    with pytest.raises(error) as caught:
        yield caught
    said = "\n".join([str(caught.value), *caught.value.details])
    assert all(text in said for text in texts), (texts, said)


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole() -> dict[str, Any]:
    """A full state dict: odd sizes, fewer rows than ranks, no rows, several dtypes, scalars and other values."""
    state: dict[str, Any] = {
        "model": OrderedDict(
            {
                "large": random(1031, 17),
                "odd": random(7, 5, 3, dtype=torch.bfloat16),
                "few": random(1, 6, dtype=torch.float64),
                "none": random(0, 4),
                "transposed": random(11, 9).t(),
                "flags": random(13, dtype=torch.bool),
                "eight": random(9, 3, dtype=torch.float8_e4m3fn),
                "complex": random(5, 2, dtype=torch.complex128),
            }
        ),
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": random(12, 4, seed=3), "nothing": None}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "name": "all", "fused": True}],
        },
        "seen": 2**70,
        "infinite": float("-inf"),
        "rng": b"\x00\xff state",
    }
    state["model"]._metadata = {"": {"version": 2}}  # as torch's own state dicts have
    return state


def whole_for_torch() -> dict[str, Any]:
    """Of ``whole``'s model what PyTorch's own functions carry over Gloo, which knows neither float8 nor complex."""
    model = whole()["model"]
    return {key: model[key] for key in ("large", "odd", "few", "none")}


def sharded_by_torch(state: Any, mesh: DeviceMesh, placements: list[Any]) -> Any:
    """``state`` with every tensor of one or more dimensions distributed by torch."""
    if isinstance(state, dict):
        made = type(state)((key, sharded_by_torch(value, mesh, placements)) for key, value in state.items())
        if isinstance(state, OrderedDict):
            vars(made).update(vars(state))
        return made
    if isinstance(state, torch.Tensor) and state.dim() and state.is_contiguous():
        return distribute_tensor(state, mesh, placements, src_data_rank=None)
    return state


def sharded_tensors() -> dict[str, Any]:
    """FSDP1's ShardedTensors of a small model; the last rank holds no row of some."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        return dict(wrapped.state_dict())


def check_gather_gives_every_rank_what_torch_gathers(group: comm.Group) -> None:
    state = sharded_by_torch({**whole(), "model": whole_for_torch()}, mesh_1d(), [Shard(0)])
    expected = _gather_state_dict({key: state[key] for key in ("model", "optimizer")})
    found = comm.gather(group, state, budget=BUDGET)
    same({key: found[key] for key in expected}, expected)
    state = sharded_by_torch(whole(), mesh_1d(), [Shard(0)])
    same(comm.gather(group, state, budget=BUDGET), whole())


def check_gather_to_one_rank_leaves_the_others_empty(group: comm.Group) -> None:
    state = sharded_by_torch(whole(), mesh_1d(), [Shard(0)])
    last = group.world_size - 1
    found = comm.gather(group, state, to=last, cpu_offload=True, budget=BUDGET)
    same(found, whole() if group.rank == last else {})


def check_gather_follows_every_placement_of_a_two_dimensional_mesh(group: comm.Group) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
        for shape in ((7, 5), (1, 3), (13, 2, 3)):
            full = random(*shape, seed=len(shape))
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            same(tensor.full_tensor(), full)
            same(comm.gather(group, {"x": tensor}, budget=BUDGET)["x"], full, f"{placements} {shape}")
            same(comm.gather(group, {"x": tensor}, to=2).get("x"), full if group.rank == 2 else None, "to 2")
            same(comm.shard(group, {"x": full}, mesh=mesh, placements=placements)["x"], tensor, f"{placements} {shape}")


def check_gather_understands_fsdp2_over_tensor_parallelism(group: comm.Group) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 8)
    expected = random(8, 6, seed=9)
    model.weight = torch.nn.Parameter(distribute_tensor(expected, mesh["tp"], [Shard(0)], src_data_rank=None))
    bias = distribute_tensor(model.bias.detach(), mesh["tp"], [Replicate()], src_data_rank=None)
    model.bias = torch.nn.Parameter(bias)
    fully_shard(model, mesh=mesh["dp"])
    weight = model.state_dict()["weight"]
    assert isinstance(weight.placements[0], _StridedShard)
    same(comm.gather(group, {"w": weight})["w"], expected)
    given = {"w": expected} if group.rank == 0 else None
    same(comm.scatter(group, given, like={"w": torch.empty_like(weight)})["w"], weight)


def check_uneven_shards_of_every_mesh_are_gathered_and_filled(group: comm.Group) -> None:
    """As FSDP2 and tensor parallelism hold them, also where torch's own offsets are wrong (7 and 9 rows)."""
    size = group.world_size
    cases = [make(*sizes) for make in (hsdp, over_tp) for sizes in ((1, size), (size, 1))]
    for case in cases if size < 4 else [hsdp(2, 2), over_tp(2, 2), all_three(2, 1, 2)]:
        for odd in (3, 5):
            full = {name: value.detach() for name, value in net(1, odd).state_dict().items()}
            state = dict(sharded_model(case, partial(net, 1, odd)).state_dict())
            same(comm.gather(group, state), full, f"{case} {odd}")
            for fill in (comm.shard, comm.scatter):
                like = {name: torch.zeros_like(value) for name, value in state.items()}
                same(fill(group, full, like=like), state, f"{case} {odd} {fill.__name__}")


def check_a_mesh_of_ranks_in_another_order_is_cut_by_the_process_group(group: comm.Group) -> None:
    """As ``fully_shard`` and ``full_tensor`` do; torch sorts the ranks of a group, and not those of the mesh."""
    mesh = DeviceMesh("cpu", [*reversed(range(group.world_size))])
    full = {name: value.detach() for name, value in net(1, 5).state_dict().items()}
    model = net(1, 5)
    fully_shard(model, mesh=mesh)
    state = dict(model.state_dict())
    for name, value in state.items():
        same(value.full_tensor() if isinstance(value, DTensor) else value, full[name], name)
    same(comm.gather(group, state), full)
    for fill in (comm.shard, comm.scatter):
        like = {name: torch.zeros_like(value) for name, value in state.items()}
        same(fill(group, full, like=like), state, fill.__name__)


def check_gather_takes_each_box_once_where_meshes_are_parts_of_the_group(group: comm.Group) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    full = random(5, 3)
    tensor = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    same(comm.gather(group, {"x": tensor})["x"], full)


def check_a_group_of_replicas_alone_is_filled(group: comm.Group) -> None:
    """Ranks 0 and 2 hold one shard, ranks 1 and 3 the other: what all ranks of a group need is not the whole tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = comm.TorchGroup.over(mesh["replicate"].get_group(), limit=20)
    full = {"odd": random(5, 3), "pair": random(2), "few": random(1, 4), "whole": random(7)}  # a shard of few is empty
    expected = {key: distribute_tensor(full[key], mesh, [Replicate(), Shard(0)], src_data_rank=None) for key in full}
    expected["whole"] = full["whole"]
    for source in (0, 1):
        for fill in (comm.shard, partial(comm.scatter, source=source)):
            like = {key: torch.zeros_like(value) for key, value in expected.items()}
            same(fill(replicas, full, like=like), expected, f"from {source}")


def check_gather_gives_what_sharded_tensor_gather_gives(group: comm.Group) -> None:
    state = sharded_tensors()
    expected = _gather_state_dict(state)
    same(comm.gather(group, state), dict(expected))
    for key, value in state.items():
        out = torch.empty(value.size()) if group.rank == 0 else None
        value.gather(0, out)
        found = comm.gather(group, {key: value}, to=0)
        same(found, {key: out} if group.rank == 0 else {})


def check_gather_takes_sharded_tensors_of_any_cut(group: comm.Group) -> None:
    full = random(10, 6)
    n = group.world_size
    edges = [0, 5] + [5 + i for i in range(1, n - 1)] + [10]  # rows, in uneven chunks; rank 1 may have none
    low, high = edges[group.rank], edges[group.rank + 1]
    tensor = init_from_local_shards(
        [LocalShard.from_tensor_and_offsets(full[low:high].clone(), [low, 0], group.rank)], 10, 6
    )
    same(comm.gather(group, {"x": tensor})["x"], full)


def check_a_hole_between_the_shards_is_an_error_on_every_rank(group: comm.Group) -> None:
    tensor = distribute_tensor(random(8, 2), mesh_1d(), [Shard(0)], src_data_rank=None)
    others = DeviceMesh("cpu", [*range(1, group.world_size)])
    if group.rank == 0:  # says that it holds nothing
        tensor = DTensor.from_local(
            tensor.to_local()[:0], others, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    with refused(StateDictMismatchError, "incomplete", "x"):
        comm.gather(group, {"x": tensor})


def check_every_difference_between_the_ranks_is_listed_on_every_rank(group: comm.Group) -> None:
    state: dict[str, Any] = {"a": torch.ones(2), "b": 1, "0": 2}
    if group.rank == 1:
        state = {"a": 3, 0: 2, "b": 1}
    listed = ("a: Tensor in rank 0, int in rank 1", "'0': only in rank 0", "\n0: only in rank 1")
    with refused(StateDictMismatchError, *listed):
        comm.gather(group, state)
    same(comm.gather(group, {"b": group.rank}), {"b": group.rank})  # the group goes on


def check_shard_cuts_as_torch_distributes(group: comm.Group) -> None:
    mesh = mesh_1d()
    full = whole_for_torch()
    expected = sharded_by_torch(dict(full), mesh, [Shard(0)])
    same(comm.shard(group, full, mesh=mesh, placements=[Shard(0)]), expected)
    local = {key: torch.empty_like(value) for key, value in expected.items()}
    _distribute_state_dict(full, local, torch.device("cpu"))
    same(comm.shard(group, full, like={key: torch.empty_like(value) for key, value in expected.items()}), local)
    same(comm.shard(group, full, like={key: value.to("meta") for key, value in expected.items()}), expected)


def check_scatter_gives_each_rank_what_torch_broadcasts(group: comm.Group) -> None:
    mesh = mesh_1d()
    full = whole_for_torch()
    full |= {"step": torch.tensor(3.5), "name": "x", "plain": random(6, 3, seed=8)}
    expected = {
        **sharded_by_torch({k: v for k, v in full.items() if k != "plain"}, mesh, [Shard(0)]),
        "plain": full["plain"],
    }

    def empty() -> dict[str, Any]:
        return {k: torch.empty_like(v) if isinstance(v, torch.Tensor) else v for k, v in expected.items()}

    by_torch = empty()
    _broadcast_state_dict(full if group.rank == 0 else {}, by_torch, torch.device("cpu"))
    like = empty()
    found = comm.scatter(group, full if group.rank == 0 else None, like=like, budget=BUDGET)
    same(found, by_torch)
    same(found, expected)
    assert all(found[key] is like[key] for key in like if isinstance(like[key], torch.Tensor)), "not in place"
    given = full if group.rank == 0 else None
    cut = lambda key, _: None if key == "plain" else [Shard(0)]  # noqa: E731
    same(comm.scatter(group, given, mesh=mesh, budget=BUDGET, placements=cut), expected)


def check_scatter_from_another_rank_along_another_dimension(group: comm.Group) -> None:
    source = group.world_size - 1
    full = {"x": random(3, 1009), "nested": [{"y": random(2, 7, dtype=torch.float16)}]}
    given, mesh, cut = full if group.rank == source else None, mesh_1d(), [Shard(1)]
    found = comm.scatter(group, given, source=source, mesh=mesh, placements=cut, budget=BUDGET)
    for one, whole_one in ((found["x"], full["x"]), (found["nested"][0]["y"], full["nested"][0]["y"])):
        same(one, distribute_tensor(whole_one, mesh, cut, src_data_rank=None))


def check_scatter_fills_sharded_tensors(group: comm.Group) -> None:
    like = sharded_tensors()
    full = {key: random(*value.size(), seed=4) for key, value in like.items()}
    found = comm.scatter(group, full if group.rank == 0 else None, like=like)
    same(comm.gather(group, found), full)


def check_scatter_refuses_what_does_not_fit_with_every_difference(group: comm.Group) -> None:
    full = {"a": random(4, 3), "b": random(5), "c": random(2), "d": random(2)}
    like = {"a": torch.empty(4, 2), "b": torch.empty(5, dtype=torch.float64), "d": torch.empty(2), "e": torch.empty(1)}
    if group.rank == 1:
        like["d"] = torch.empty(3)
    listed = ("a: [4, 3]", "b: [5]", "c: nothing asks", "e: not in", "d: [2] torch.float32, wanted [3]", "(rank 1)")
    with refused(StateDictMismatchError, *listed):
        comm.scatter(group, full if group.rank == 0 else None, like=like)


def check_a_tensor_that_cannot_be_sent_is_an_error_on_every_rank(group: comm.Group) -> None:
    """Also if only one rank has it: the others must not wait for that rank."""
    x = random(4, 2)
    dtensor = distribute_tensor(x, mesh_1d(), [Shard(0)], src_data_rank=None)
    lazy = torch.zeros(3, dtype=torch.complex64).conj()
    plain = lazy.resolve_conj()
    last = group.rank == group.world_size - 1
    local = dtensor.to_local()
    masked = DTensor(masked_tensor(local, torch.ones_like(local).bool()), dtensor._spec, requires_grad=False)
    meta, sparse = x.to("meta"), x.to_sparse()
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("a DTensor where a whole", lambda: comm.shard(group, {"x": dtensor if last else x}, like={"x": x})),
        ("a DTensor where a whole", lambda: comm.scatter(group, {"x": dtensor}, like={"x": x})),
        ("a tensor on the meta device", lambda: comm.scatter(group, {"x": x if group.rank else meta})),
        ("a tensor on the meta device", lambda: comm.shard(group, {"x": meta if last else x}, like={"x": x})),
        ("a tensor of layout", lambda: comm.gather(group, {"x": sparse if last else x})),
        ("a tensor of the subclass", lambda: comm.gather(group, {"x": masked if last else dtensor})),
        ("a tensor of the subclass", lambda: comm.scatter(group, {"x": x}, like={"x": masked if last else dtensor})),
        ("a tensor of layout", lambda: comm.scatter(group, {"x": x}, like={"x": sparse if last else x})),
        ("an expanded", lambda: comm.scatter(group, {"x": x}, like={"x": x if group.rank else x[:1].expand(4, 2)})),
        ("a conjugated", lambda: comm.scatter(group, {"x": lazy}, like={"x": lazy if last else plain})),
    ]
    for text, call in cases:
        with refused(StateDictMismatchError, f"\nx: {text}"):
            call()


def check_ranks_that_name_different_ranks_get_an_error_not_their_own_values(group: comm.Group) -> None:
    state = {"x": distribute_tensor(random(4, 2), mesh_1d(), [Shard(0)], src_data_rank=None), "rank": group.rank}
    calls: list[Callable[[comm.Group], Any]] = [
        lambda apart: comm.gather(apart, state, to=apart.rank),
        lambda apart: comm.gather(apart, {"rank": apart.rank}, to=apart.rank or None),
        lambda apart: comm.broadcast(apart, {"rank": apart.rank}, source=apart.rank),
        lambda apart: apart.broadcast_object(apart.rank, source=apart.rank),
    ]
    for call in calls:
        with refused((UsageError, WorkerError), "the ranks pass different ranks as", " in rank 0, 1 in rank 1"):
            call(comm.TorchGroup.over(dist.new_group(), limit=20))


def check_a_source_without_a_state_dict_is_an_error_on_every_rank(group: comm.Group) -> None:
    """It is most likely another rank that has it."""
    with refused(WorkerError, "rank 0 is the source and has no state dict"):
        comm.broadcast(comm.TorchGroup.over(dist.new_group(), limit=20), {"x": 1} if group.rank == 1 else None)


class Moments(NamedTuple):
    """As optimizers keep them."""

    first: Any
    second: Any


def check_tensors_in_dict_and_tuple_subclasses_are_gathered_and_cut(group: comm.Group) -> None:
    def state(tensor: Any) -> dict[str, Any]:
        states = defaultdict(dict, {0: {"moments": Moments(tensor, [tensor]), "plain": Moments(1, None)}})
        return {"optimizer": defaultdict(None, state=states), "plain": UserDict(a=1)}

    full = random(5, 3)
    cut = distribute_tensor(full, mesh_1d(), [Shard(0)], src_data_rank=None)
    gathered = comm.gather(group, state(cut))
    same(gathered, state(full))
    assert gathered["optimizer"].default_factory is None
    assert gathered["optimizer"]["state"].default_factory is dict
    same(comm.shard(group, state(full), mesh=mesh_1d(), placements=[Shard(0)]), state(cut))
    like = state(torch.zeros_like(cut))
    filled = comm.shard(group, state(full), like=like)
    same(filled, state(cut))
    assert filled["optimizer"]["state"][0]["moments"].first is like["optimizer"]["state"][0]["moments"].first
    same(comm.offload_to_cpu(state(cut)), state(cut))
    assert comm.offload_to_cpu(state(full))["optimizer"]["state"][0]["moments"].first is not full


def check_tensors_in_other_containers_are_refused_on_every_rank(group: comm.Group) -> None:
    """Left where they are, they would stay shards, or this rank's own."""
    last = group.rank == group.world_size - 1
    full = random(5, 3)
    cut = distribute_tensor(full, mesh_1d(), [Shard(0)], src_data_rank=None)
    for make in (lambda x: UserDict(a=[x]), lambda x: deque([x]), lambda x: torch.return_types.max((x, x))):
        calls: list[Callable[[], Any]] = [
            lambda make=make: comm.gather(group, {"a": {"b": make(cut) if last else 1}}),
            lambda make=make: comm.shard(group, {"a": {"b": make(full) if last else 1}}, like={}),
            lambda make=make: comm.scatter(group, {"a": 1}, like={"a": {"b": make(cut)} if last else 1}),
        ]
        for call in calls:
            with refused(StateDictMismatchError, "a.b: a ", "with tensors in it cannot be taken apart"):
                call()


def check_placements_that_do_not_fit_are_an_error_on_every_rank(group: comm.Group) -> None:
    flat, grid = mesh_1d(), init_device_mesh("cpu", (group.world_size, 1))
    cases: list[tuple[DeviceMesh, Any, str]] = [
        (flat, [Shard(0), Replicate()], "[Shard(dim=0), Replicate()], and the mesh has 1 dimension"),
        (grid, [Shard(0)], "[Shard(dim=0)], and the mesh has 2 dimensions"),
        (flat, [], "[], and the mesh has 1 dimension"),
        (flat, Shard(0), "Shard(dim=0), and the mesh has 1 dimension"),
        (flat, [0], "[0], and the mesh has 1 dimension"),
        (flat, [Shard(2)], "shards a dimension that a tensor of 2 dimensions does not have"),
        (flat, [Shard(-3)], "shards a dimension that a tensor of 2 dimensions does not have"),
        (flat, [Partial()], "holds no values"),
    ]
    last = group.rank == group.world_size - 1
    for mesh, wrong, text in cases:
        right = [Shard(0)] * mesh.ndim
        for fill in (comm.shard, comm.scatter):
            with refused(StateDictMismatchError, "\nx: ", text):
                fill(group, {"x": random(4, 2)}, mesh=mesh, placements=wrong if last else right)
    apart = comm.TorchGroup.over(dist.new_group(), limit=20)
    with refused(WorkerError, "ZeroDivisionError"):
        comm.shard(apart, {"x": random(4)}, mesh=flat, placements=lambda *_: [Shard(0 // int(not last))])


def check_a_copy_between_different_layouts_is_refused(group: comm.Group) -> None:
    """Of the same global shape, and here and there even of the same local shape."""
    mesh, backwards = mesh_1d(), DeviceMesh("cpu", list(reversed(range(group.world_size))))
    source = distribute_tensor(random(group.world_size, 2), mesh, [Shard(0)], src_data_rank=None)
    for other, placement in ((mesh, Replicate()), (backwards, Shard(0))):
        target = distribute_tensor(torch.zeros(source.shape), other, [placement], src_data_rank=None)
        with refused(StateDictMismatchError, "w: DTensor", "placed"):
            comm.copy_state_dict({"w": source}, {"w": target})
    same(comm.copy_state_dict({"w": source}, {"w": torch.zeros_like(source)}), {"w": source})
    same(comm.offload_to_cpu({"w": source}), {"w": source})
    sharded = sharded_tensors()
    same(comm.offload_to_cpu(sharded), sharded)


def check_broadcast_carries_every_kind_of_value(group: comm.Group) -> None:
    expected = whole() | {
        "size": torch.Size([3, 4]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "set": {1, "a"},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).tolist(),
        "complex": 1 - 2j,
        "keys": {(1, "a"): 0, True: 1},
    }
    for source in {0, group.world_size - 1}:
        found = comm.broadcast(group, expected if group.rank == source else None, source=source, budget=BUDGET)
        same(found, expected)


def check_an_object_that_could_run_code_is_refused_by_name(group: comm.Group) -> None:
    apart = comm.TorchGroup.over(dist.new_group())  # it fails, and stays so
    with refused(WorkerError, "builtin_function_or_method") as caught:
        comm.broadcast(apart, {"hook": {"f": print}} if group.rank == 0 else None)
    assert (caught.value.rank, caught.value.cause_exit_code) == (0, UsageError.exit_code)
    assert caught.value.step.startswith("scatter"), caught.value.step


def check_exchange_moves_any_amount_between_any_pair(group: comm.Group) -> None:
    n, rank = group.world_size, group.rank

    def data(source: int, target: int) -> torch.Tensor:
        return random((source * 7 + target * 13) % 5 * 33331, dtype=torch.uint8, seed=source * 100 + target)

    def write(peer: int, offset: int, buffer: torch.Tensor) -> None:
        found[peer][offset : offset + len(buffer)] = buffer

    out = {peer: data(rank, peer) for peer in range(n)}
    found = {peer: torch.zeros(len(data(peer, rank)), dtype=torch.uint8) for peer in range(n)}
    largest = 0

    def read(peer: int, offset: int, buffer: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, len(buffer))
        buffer.copy_(out[peer][offset : offset + len(buffer)])

    comm.exchange(
        group,
        sends={peer: len(tensor) for peer, tensor in out.items()},
        receives={peer: len(tensor) for peer, tensor in found.items()},
        read=read,
        write=write,
        budget=BUDGET,
    )
    same(found, {peer: data(peer, rank) for peer in range(n)})
    assert largest <= BUDGET // 4


def check_send_recvs_of_any_size_cross_while_there_is_room_for_two_rounds(
    group: comm.Group, peers_at_once: int = 1
) -> None:
    """Read by another thread, received where they are wanted."""
    rank, rounds = group.rank, 13

    def data(source: int, target: int, number: int) -> torch.Tensor:
        of_several_chunks = number < 6
        count = (source * 5 + target * 11 + number * 7) % 4 * (3001 if of_several_chunks else 99)
        return random(count, dtype=torch.uint8, seed=source * 1000 + target * 100 + number)

    exchanger = Exchanger(group, budget=BUDGET, largest=9003, in_place=True, peers_at_once=peers_at_once)
    at_once = exchanger.pairs_at_once()
    assert max(map(len, at_once), default=1) == min(peers_at_once, max(group.world_size - 1, 1))
    pairs = [pair for pairs in at_once for pair in pairs]
    found = [{source: torch.zeros_like(data(source, rank, number)) for _, source in pairs} for number in range(rounds)]
    threads: set[str] = set()
    room, claimed, on_received = threading.Semaphore(2), [0], []

    def has_room(number: int) -> bool:
        claimed[0] += claimed[0] == number and room.acquire(blocking=False)
        return claimed[0] > number

    def wait(number: int) -> None:
        while not has_room(number):
            assert len(on_received) >= number - 1, "it waits for room that only what is under way can give"
            time.sleep(0.001)

    def read(number: int, peer: int, offset: int, buffer: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        buffer.copy_(data(rank, peer, number)[offset : offset + len(buffer)])

    def receive_into(number: int, peer: int, offset: int, count: int) -> torch.Tensor:
        assert len(on_received) + 2 > number, "a round began without room"
        return found[number][peer][offset : offset + count]

    def done(number: int) -> None:
        on_received.append(number)
        threading.Timer(0.003 * rank, room.release).start()

    def send_recvs() -> Iterator[SendRecv]:
        for number in range(rounds):
            for index, some in enumerate(at_once):
                yield SendRecv(
                    {to: len(data(rank, to, number)) for to, _ in some},
                    {source: len(found[number][source]) for _, source in some},
                    partial(read, number),
                    receive_into=partial(receive_into, number),
                    has_room=None if index else partial(has_room, number),
                    wait_for_room=None if index else partial(wait, number),
                    on_received=partial(done, number) if index == len(at_once) - 1 else None,
                )

    with group.step("send_recvs"):
        exchanger.run(send_recvs(), watch=lambda: group.watch(moving=False))
    assert on_received == list(range(rounds))
    assert threads == {"fsdpckpt-read"}
    for number, each in enumerate(found):
        same(each, {source: data(source, rank, number) for _, source in pairs}, f"round {number}")


def check_send_recvs_with_several_ranks_at_once_cross_too(group: comm.Group) -> None:
    """With 3 ranks and more: all of them at once, or the last alone."""
    check_send_recvs_of_any_size_cross_while_there_is_room_for_two_rounds(group, 2)


def check_what_a_reading_thread_raises_fails_the_step_on_all(group: comm.Group) -> None:
    apart = comm.TorchGroup.over(dist.new_group())

    def read(peer: int, offset: int, buffer: torch.Tensor) -> None:
        if apart.rank == 1 and offset:
            raise UsageError("this disk is gone")

    with refused(WorkerError, "this disk is gone") as caught, apart.step("copy"):
        exchanger = Exchanger(apart, budget=BUDGET, largest=1 << 20)
        send_recvs = (
            SendRecv({to: 99_999}, {source: 99_999}, read, write=lambda *_: None)
            for ((to, source),) in exchanger.pairs_at_once()
        )
        exchanger.run(send_recvs, watch=lambda: apart.watch(moving=False))
    assert (caught.value.rank, caught.value.cause_exit_code) == (1, UsageError.exit_code)


def check_plans_that_differ_are_an_error_before_a_byte_moves(group: comm.Group) -> None:
    apart, written = comm.TorchGroup.over(dist.new_group()), list[Any]()
    sends = {0: 5} if group.rank == 1 else {}
    with refused(WorkerError, "5 bytes") as caught:
        comm.exchange(apart, sends=sends, receives={}, read=lambda *_: None, write=lambda *each: written.append(each))
    assert caught.value.rank == 0 and not written


def check_ranks_that_bring_different_digests_to_a_step_fail_there(group: comm.Group) -> None:
    apart = comm.TorchGroup.over(dist.new_group())
    for step, brought in (("plan", "one" if group.rank else "another"), ("later", "")):  # a group that failed stays so
        with refused(WorkerError, "its input to this step differs") as caught, apart.step(step, agree=brought):
            raise AssertionError("entered")
        assert caught.value.step == "plan", caught.value


def check_groups_over_parts_of_the_world_work_beside_each_other(group: comm.Group) -> None:
    half = max(group.world_size // 2, 1)
    parts = [dist.new_group(list(range(half))), dist.new_group(list(range(half, group.world_size)))]
    mine = comm.TorchGroup.over(parts[0] if group.rank < half else parts[1])
    ranks = mine.all_gather_objects(group.rank)
    assert ranks == (list(range(half)) if group.rank < half else list(range(half, group.world_size))), ranks
    given = {"x": random(3, seed=group.rank)} if mine.rank == 0 else None
    same(comm.broadcast(mine, given)["x"], random(3, seed=ranks[0]))


def work(out: str) -> int:
    """One rank: every situation in turn, then its results."""
    dist.init_process_group("gloo")
    results: dict[str, str] = {}
    group = comm.TorchGroup.over(limit=20)
    for name in situations(group.world_size):
        try:
            globals()[name](group)
            results[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported as what is wrong with this situation
            results[name] = traceback.format_exc()
        with open(os.path.join(out, f"rank-{group.rank}.json"), "w") as file:
            json.dump(results, file)
        with group.step("next"):
            pass
    group.close()
    return 0  # and end at once: some situations leave a process group in chunks


def work_under_srun(rank: int, out: str) -> int:
    """As one of two tasks of a SLURM step; writes what the group says."""
    job = str(int(os.environ["MASTER_PORT"]) - FIRST_PORT)  # a free port, by way of the job number
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    os.environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    os.environ |= {"SLURM_STEP_NODELIST": "localhost"}
    with comm.TorchGroup.start(patience=30) as group:
        ranks = group.all_gather_objects(group.rank)
    with open(os.path.join(out, f"srun-{rank}.json"), "w") as file:
        json.dump({"ranks": ranks, "backend": group.backend}, file)
    return 0


def work_in_a_row(rank: int, out: str) -> int:
    """Several runs in one process, then two beside a process group of its own; writes what each group says."""
    seen = []

    def choose(*_: str, votes: Callable[[], GpuVotes]) -> tuple[str, str]:
        seen.append([votes().own, votes().any])
        return "gloo", "cpu"

    torch_group.has_gpu, torch_group.choose_backend = lambda: True, choose  # type: ignore[assignment]
    gathered = []
    for number in range(5):
        shared = number == 2
        torch_group.gpu_identity = lambda info, shared=shared: f"GPU {0 if shared else info.rank}"
        if number == 3:
            dist.init_process_group("gloo")
        if number != 4:
            with comm.TorchGroup.start(limit=5, patience=15) as group:
                gathered.append(group.all_gather_objects([rank, number]))
            continue
        with refused(WorkerError) as caught, comm.TorchGroup.start(limit=5, patience=15) as group, group.step("fails"):
            raise OSError("the disk is gone")
        gathered.append([caught.value.step])
    total = torch.tensor([rank])
    dist.all_reduce(total)  # its own group still works
    with open(os.path.join(out, f"row-{rank}.json"), "w") as file:
        json.dump({"votes": seen, "gathered": gathered, "total": int(total)}, file)
    return 0


class _OverAPartOfTheWorld(GroupContract):
    def make(self) -> comm.Group:
        return comm.TorchGroup.over(dist.new_group(), limit=20)


def _check(test: str) -> Callable[[comm.Group], None]:
    return lambda _: getattr(_OverAPartOfTheWorld(), test)()


for _test in (name for name in dir(GroupContract) if name.startswith("test_")):
    globals()[f"check_{_test.removeprefix('test_')}"] = _check(_test)

SITUATIONS = tuple(name for name in globals() if name.startswith("check_"))
GRIDS = (
    "check_gather_follows_every_placement_of_a_two_dimensional_mesh",
    "check_gather_understands_fsdp2_over_tensor_parallelism",
    "check_gather_takes_each_box_once_where_meshes_are_parts_of_the_group",
    "check_a_group_of_replicas_alone_is_filled",
)
ON_FOUR = (
    *GRIDS,
    "check_uneven_shards_of_every_mesh_are_gathered_and_filled",
    "check_groups_over_parts_of_the_world_work_beside_each_other",
)


def situations(world_size: int) -> tuple[str, ...]:
    """Grids of 2 x 2 and parts of a world take 4 ranks; everything else is tried by 2 and by 3."""
    return ON_FOUR if world_size == 4 else tuple(name for name in SITUATIONS if name not in GRIDS)


def main(out: str) -> int:
    forked_workers(2, lambda rank: work_under_srun(rank, out), limit=60)
    forked_workers(2, lambda rank: work_in_a_row(rank, out), limit=60)
    for world_size in WORLD_SIZES:
        directory = os.path.join(out, str(world_size))
        os.makedirs(directory)
        forked_workers(world_size, lambda _, to=directory: work(to), limit=90)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
