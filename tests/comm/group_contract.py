"""What every ``fsdpckpt.comm.Group`` promises: a base class of tests, inherited by the tests of each kind of group.

In a group of several ranks every rank runs each test at the same time, as ``tests.comm.checks`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch

from fsdpckpt.comm import Group, broadcast, exchange, gather, scatter
from fsdpckpt.comm.protocol import original_error
from fsdpckpt.errors import SourceCorruptError, UsageError, WorkerError


class GroupContract(ABC):
    """Subclasses say how a group is made."""

    @abstractmethod
    def make(self) -> Group:
        """A new group of this process, or of all ranks that run this test. Collective."""

    def test_a_rank_is_one_of_the_group(self) -> None:
        with self.make() as group:
            assert 0 <= group.rank < group.world_size
            assert (group.backend is None) == (group.transport is None)

    def test_every_rank_gets_every_value_by_rank(self) -> None:
        with self.make() as group:
            own = {"rank": group.rank, "bytes": b"\x00\xff", "path": ("a", 1)}
            values = group.all_gather_objects(own, name="values")
            assert values == [{**own, "rank": rank} for rank in range(group.world_size)]
            assert values[group.rank] is own

    def test_every_rank_gets_the_value_of_the_source(self) -> None:
        with self.make() as group:
            last = group.world_size - 1
            assert group.broadcast_object([group.rank, "x"], source=last, name="value") == [last, "x"]

    def test_a_rank_outside_of_the_group_is_refused(self) -> None:
        calls: list[Callable[[Group, int], object]] = [
            lambda group, rank: gather(group, {"x": torch.ones(2)}, to=rank),
            lambda group, rank: scatter(group, {"x": torch.ones(2)}, source=rank),
            lambda group, rank: broadcast(group, {"x": 1}, source=rank),
            lambda group, rank: group.broadcast_object(1, source=rank),
            lambda group, rank: exchange(group, sends={rank: 1}, receives={}, read=print, write=print),
        ]
        for call in calls:
            for rank in (-1, 9):
                group = self.make()
                with pytest.raises((UsageError, WorkerError)) as caught:
                    call(group, rank)
                error = original_error(caught.value) if isinstance(caught.value, WorkerError) else caught.value
                assert isinstance(error, UsageError), error
                assert error.found == str(rank)
                assert error.expected in {f"0 to {group.world_size - 1}", "0: this process is alone"}
                group.all_stopped()
                group.close()

    def test_steps_nest_and_run_their_bodies_once(self) -> None:
        bodies = []
        with self.make() as group, group.step("outer", agree="the same"):
            for number in range(3):
                with group.step(f"inner {number}"):
                    bodies.append(number)
        assert bodies == [0, 1, 2]

    def test_an_error_in_a_step_reaches_every_rank_as_what_it_is(self) -> None:
        group = self.make()
        with pytest.raises((SourceCorruptError, WorkerError)) as caught, group.step("read"):
            if group.rank == group.world_size - 1:
                raise SourceCorruptError("damaged", file="model.pt", details=["two", "lines"])
        error = original_error(caught.value) if isinstance(caught.value, WorkerError) else caught.value
        assert isinstance(error, SourceCorruptError), error
        assert (error.what, error.file, error.exit_code) == ("damaged", "model.pt", 3)
        assert list(error.details)[:2] == ["two", "lines"]
        group.all_stopped()
        group.close()

    def test_reports_of_progress_change_nothing(self) -> None:
        with self.make() as group, group.step("long"):
            with group.heartbeat(), group.silent_for(3):
                group.beat()
            group.watch(moving=True)
            group.watch(moving=False)
        group.all_stopped()  # nothing failed: returns at once

    def test_an_error_under_a_heartbeat_stays_itself(self) -> None:
        with self.make() as group, pytest.raises(KeyError), group.heartbeat():
            raise KeyError("x")

    def test_a_value_goes_from_one_rank_to_another(self) -> None:
        with self.make() as group:
            for rank in range(1, group.world_size):
                if group.rank == 0:
                    group.send_object({"question": rank}, to=rank)
                    assert group.receive_object(source=rank) == {"question": rank, "answer": b"x" * 70_000}
                elif group.rank == rank:
                    question = group.receive_object(source=0)
                    assert question == {"question": rank}
                    group.send_object({"question": rank, "answer": b"x" * 70_000}, to=0)
