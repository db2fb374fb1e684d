"""The contract of ``Group``, by a lone process without a process group and by one with a process group of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fsdpckpt.comm import Group, Solo, TorchGroup
from fsdpckpt.errors import InternalError
from tests.comm.group_contract import GroupContract


class TestSolo(GroupContract):
    def make(self) -> Group:
        return Solo()

    def test_an_error_in_a_step_passes_unchanged(self) -> None:
        error = ZeroDivisionError("x")
        with pytest.raises(ZeroDivisionError) as caught, Solo().step("anything"):
            raise error
        assert caught.value is error

    def test_there_is_nobody_to_talk_to(self) -> None:
        with pytest.raises(InternalError):
            Solo().send_object(1, to=1)
        with pytest.raises(InternalError):
            Solo().receive_object(source=1)

    def test_it_imports_no_torch(self) -> None:
        code = (
            "import sys; from fsdpckpt.comm import Solo, Group\n"
            "with Solo() as group, group.step('x'): assert group.all_gather_objects(1) == [1]\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestTorchGroupOfOneRank(GroupContract):
    @pytest.fixture(autouse=True)
    def process_group(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def make(self) -> Group:
        group = TorchGroup.over()
        assert isinstance(group, TorchGroup)
        return group


def test_without_a_process_group_a_process_is_alone() -> None:
    assert isinstance(TorchGroup.over(), Solo)
