"""Everything works in one process that has no process group; and nothing offline pays for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from fsdpckpt import comm
from fsdpckpt.errors import StateDictMismatchError, UsageError
from tests.comm.checks import random, same, whole
from tests.oracle.compare import identical


@pytest.fixture
def alone() -> comm.Group:
    return comm.TorchGroup.over()


def test_every_operation_gives_the_state_dict_back(alone: comm.Group) -> None:
    state = whole()
    like = comm.empty_on_cpu(state)
    for found in (
        comm.gather(alone, state),
        comm.gather(alone, state, to=0, cpu_offload=True),
        comm.broadcast(alone, state),
        comm.scatter(alone, state, like=like),
        comm.shard(alone, state, like=like),
    ):
        same(found, whole())


def test_exchange_with_itself_goes_through_bounded_chunks(alone: comm.Group) -> None:
    source = random(50_001, dtype=torch.uint8)
    found = torch.empty_like(source)
    sizes = []

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        buffer[:] = source[offset : offset + len(buffer)]

    def write(_: int, offset: int, buffer: torch.Tensor) -> None:
        sizes.append(len(buffer))
        found[offset : offset + len(buffer)] = buffer

    size = {0: len(source)}
    comm.exchange(alone, sends=size, receives=size, read=read, write=write, budget=1 << 14)
    assert identical(found, source)
    assert max(sizes) == 4096


def test_copies_go_into_memory_made_once(alone: comm.Group) -> None:
    state = whole()
    place = comm.empty_on_cpu(state, share=True)
    shared = place["model"]["large"]  # type: ignore[index]
    assert shared.is_shared()
    found = comm.copy_state_dict(state, place)
    same(found, state)
    assert found["model"]["large"] is shared  # type: ignore[index]
    same(comm.offload_to_cpu(state), state)


def test_plain_tensors_are_filled_in_place_and_those_whose_dotted_keys_are_equal_told_apart(alone: comm.Group) -> None:
    def make(first: float) -> dict[str, object]:
        tensors = [torch.full((2,), first + number) for number in range(4)]
        return {"a.b": tensors[0], "a": {"b": tensors[1]}, "states": {0: tensors[2], "0": tensors[3]}}

    state = make(1.0)
    for fill in (comm.shard, comm.scatter):
        like = make(9.0)
        found = fill(alone, state, like=like)
        same(found, state)
        same(like, state)
        assert found["a.b"] is like["a.b"]
    target = make(9.0)
    same(comm.copy_state_dict(state, target), state)
    same(target, state)
    same(comm.offload_to_cpu(state), state)
    other = {**make(9.0), "a.b": 5}
    with pytest.raises(StateDictMismatchError):
        comm.copy_state_dict(state, other)


class Scaled(torch.Tensor):
    """As torchao's: the elements are computed from another tensor."""

    halves: torch.Tensor

    @staticmethod
    def __new__(cls, halves: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, halves.shape)  # type: ignore[attr-defined]
        made.halves = halves
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda tensor: tensor.halves * 2, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def test_a_tensor_of_a_subclass_is_refused_before_anything_is_copied(alone: comm.Group) -> None:
    plain, odd = random(4), Scaled(torch.ones(4))
    state, like = {"a": plain, "w": odd}, {"a": torch.zeros(4), "w": torch.zeros(4)}
    calls: list[Callable[[], object]] = [
        lambda: comm.shard(alone, state, like=like),
        lambda: comm.broadcast(alone, state),
        lambda: comm.scatter(alone, {"a": plain, "w": plain}, like=state),
        lambda: comm.offload_to_cpu(state),
        lambda: comm.copy_state_dict(state, like),
    ]
    for call in calls:
        with pytest.raises(StateDictMismatchError) as raised:
            call()
        assert f"w: a tensor of the subclass {__name__}.Scaled" in str(raised.value)
        same(like, {"a": torch.zeros(4), "w": torch.zeros(4)})
    assert comm.gather(alone, state)["w"] is odd  # it stays this rank's own
    same(comm.broadcast(alone, {"w": torch.nn.Parameter(plain)}), {"w": plain})


class Driver:
    """Stands in for CUDA's runtime: notes what is locked, or refuses."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        self.locked.append(address)
        return self.result

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        self.locked.remove(address)
        return 0


def test_shared_memory_is_locked_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    place = comm.empty_on_cpu({"w": random(3)}, pin=True, share=True)
    view = place.pop("w")[1:]  # type: ignore[index]
    assert len(driver.locked) == 1, "a view keeps the memory"
    del view
    assert driver.locked == []


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(2))
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: 1 / (result - 2))
    with pytest.raises(ZeroDivisionError):
        comm.empty_on_cpu({"w": random(3)}, pin=True, share=True)


def test_two_state_dicts_that_differ_are_told_apart_in_every_way() -> None:
    one: dict[str, Any] = {"a": random(2, 3), "b": random(4), "c": 1, "state": {0: 1}, "d": [1], "e": random(2)}
    two: dict[str, Any] = {"a": random(3, 2), "b": random(4).double(), "c": "1", "state": {"0": 1}, "d": (1,)}
    with pytest.raises(StateDictMismatchError) as raised:
        comm.check_similar(one, two)
    text = "\n".join(raised.value.details)
    parts = "a: Tensor [2, 3]|b: Tensor [4] float32|c: int|state.0: only|state.'0': only|d: list|e: only"
    for part in parts.split("|"):
        assert part in text, text
    assert raised.value.exit_code == UsageError.exit_code
    comm.check_similar(one, {key: one[key] for key in reversed(one)})
    with pytest.raises(StateDictMismatchError):
        comm.copy_state_dict(one, two)


def test_offline_parts_import_no_torch_and_no_communication() -> None:
    code = (
        "import sys, fsdpckpt, fsdpckpt.cli.app, fsdpckpt.converters.pipeline, fsdpckpt.verify.integrity\n"
        "assert 'torch' not in sys.modules\n"
        "torch_free = {'protocol', 'solo', 'liveness'}\n"
        "comm = {name.split('.')[2] for name in sys.modules if name.startswith('fsdpckpt.comm.')}\n"
        "assert comm <= torch_free, comm\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
