"""``TorchGroup``: a group over a live process group of torch.

Two planes: ``transport`` moves tensor bytes, over NCCL where the ranks have GPUs. ``control`` moves everything else
(values, counts, requests for headers) between the ranks' CPUs, over Gloo: a small message over NCCL starts a kernel on
each GPU, which spins until the other side has one, too.

An exception of one rank inside a step is raised on every rank as the same ``WorkerError`` (rank, step, cause), within
the limit, whatever the others wait for; see ``fsdpckpt.comm.store_monitor`` for how. A group that failed stays failed.
"""

from __future__ import annotations

import functools
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from fsdpckpt.comm.launch import (
    GpuVotes,
    choose_backend,
    enlarge_buffers_for_shared_gpus,
    gpu_identity,
    has_gpu,
    nccl_refused,
    rank_device,
)
from fsdpckpt.comm.liveness import end_with_launcher, heartbeat
from fsdpckpt.comm.protocol import Group, Solo
from fsdpckpt.comm.store_monitor import StoreMonitor
from fsdpckpt.comm.transport import Transfer, Transport
from fsdpckpt.comm.trees import decode, encode
from fsdpckpt.errors import UsageError, WorkerError
from fsdpckpt.process import RankInfo, pending_requests, rank_from_environment

LIMIT = 15.0
"""Seconds within which a failure of one rank ends all of them."""

START_PATIENCE = 120.0
"""Seconds that one rank may start later than another: importing torch from a busy network disk takes its time."""

MAX_BROADCASTS = 4  # of values at a time: each has all its bytes on the device


class TorchGroup(Group):
    """The ranks of a process group; ``device``: where tensors must be to be sent between them.

    ``control``: ``transport`` itself if that is Gloo's. Made by ``over`` (a live process group, which stays the
    caller's) or ``start`` (makes its own).
    """

    backend: str
    device: torch.device
    transport: Transport
    control: Transport

    def __init__(
        self, *, device: torch.device, backend: str, transport: Transport, control: Transport, monitor: StoreMonitor
    ) -> None:
        self.rank = monitor.rank
        self.world_size = monitor.world_size
        self.device = device
        self.backend = backend
        self.transport = transport
        self.control = control
        self._monitor = monitor
        self._made: list[dist.ProcessGroup] = []  # what ``start`` or ``over`` made, and ``close`` destroys
        self._steps: list[str] = []

    @classmethod
    def over(
        cls, process_group: dist.ProcessGroup | None = None, *, device: torch.device | None = None, limit: float = LIMIT
    ) -> Group:
        """The ranks of a live process group (default: the default one; ``Solo`` if none was initialised).

        Every rank of it calls this, in the same order if there are several. ``device``: by default the current GPU if
        the group has NCCL, else the CPU.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise UsageError("a process group was given, and torch.distributed is not initialised")
            return Solo(torch.device("cpu") if device is None else device)
        group = distributed_c10d._get_default_group() if process_group is None else process_group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise UsageError("this process is not in the process group", found=f"rank {dist.get_rank()} of the default")
        nccl = "nccl" in str(dist.get_backend_config(group))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        backend = "nccl" if nccl and device.type == "cuda" else "gloo"
        store = _fresh_prefix(distributed_c10d._get_process_group_store(group), rank)
        monitor = StoreMonitor(store, rank, world_size, limit=limit)
        transport = Transport(group, monitor, device)
        made: list[dist.ProcessGroup] = []
        if device.type == "cpu":
            control = transport
        elif _has_gloo(group):
            control = Transport(group, monitor, _CPU)
        else:
            beside = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
            made.append(beside)
            control = Transport(beside, monitor, _CPU)
        joined = cls(device=device, backend=backend, transport=transport, control=control, monitor=monitor)
        joined._made = made
        return joined

    @classmethod
    def start(
        cls, *, backend: str = "auto", device: str = "auto", limit: float = LIMIT, patience: float = START_PATIENCE
    ) -> Group:
        """Meet the other ranks at the rendezvous of the environment (torchrun, srun); ``Solo`` without one.

        ``patience``: seconds that one rank may start later than another. Makes a process group: the default one, or a
        new one beside it if there is one already. ``close`` destroys it. Raises WorkerError if a rank does not come.
        """
        info = rank_from_environment()
        if info is None:
            _, kind = choose_backend(backend, device, votes=lambda: GpuVotes(own=has_gpu(), any=has_gpu()))
            return Solo(rank_device(kind, None))
        end_with_launcher()
        if dist.is_initialized():  # its ranks may be numbered in a different order
            info = replace(info, rank=dist.get_rank(), world_size=dist.get_world_size())
        store = _fresh_prefix(_rendezvous(info, patience), info.rank)
        store.add("has-gpu", int(has_gpu()))
        store.add("own-gpu", int(has_gpu() and store.add(f"gpu/{gpu_identity(info)}", 1) == 1))
        part = PrefixStore("monitor", store)
        monitor = StoreMonitor(part, info.rank, info.world_size, limit=limit, patience=patience)
        try:
            monitor.barrier("start", json.dumps([backend, device]))
            # All have voted: all have entered the step.
            counted = GpuVotes(
                own=store.add("own-gpu", 0) == info.world_size, any=store.add("has-gpu", 0) == info.world_size
            )
            name, kind = choose_backend(backend, device, votes=lambda: counted)
            own_device = rank_device(kind, info)
            if kind == "cuda":
                torch.cuda.set_device(own_device)
                if not counted.own:
                    enlarge_buffers_for_shared_gpus()
            # Without watching it would wait half an hour for a rank that has ended.
            process_group = monitor.run_watched(lambda: _connect(name, own_device, PrefixStore("group", store), info))
            monitor.allow_silence(0.0)
        except BaseException:
            monitor.close()
            raise
        transport = Transport(process_group, monitor, own_device)
        control = transport if own_device.type == "cpu" else Transport(process_group, monitor, _CPU)
        group = cls(device=own_device, backend=name, transport=transport, control=control, monitor=monitor)
        group._made = [process_group]
        return group

    # steps

    @contextmanager
    def step(self, name: str, *, agree: str = "") -> Iterator[None]:
        monitor = self._monitor
        self._steps.append(name)
        path = " / ".join(self._steps)
        try:
            monitor.barrier(path, agree)
            yield
            outer = " / ".join(self._steps[:-1])
            monitor.barrier(f"{path} (end)", report_as=outer or f"after {path}")
        except WorkerError as error:
            if monitor.failure is None:  # not one of the monitor's own, which every rank knows already
                raise monitor.fail_with(error) from error
            raise
        except Exception as error:  # the rank boundary: one of the program's two broad excepts
            raise monitor.fail_with(error) from error
        except BaseException as error:
            monitor.fail_with(error)
            raise
        finally:
            self._steps.pop()

    def watch(self, *, moving: bool) -> None:
        self._monitor.check_peers(progress=moving or bool(pending_requests))

    def heartbeat(self) -> Context[None]:
        return heartbeat(lambda progress: self.watch(moving=progress))

    @contextmanager
    def silent_for(self, seconds: float) -> Iterator[None]:
        before = self._monitor.allow_silence(seconds)
        try:
            yield
        finally:
            self._monitor.allow_silence(before)

    # values

    def all_gather_objects(self, value: object, *, name: str = "exchange of values") -> list[object]:
        if self.world_size == 1:
            return [value]
        with self.step(name):
            return self._broadcast_each(value)

    def broadcast_object(self, value: object = None, *, source: int = 0, name: str = "broadcast of a value") -> object:
        if self.world_size == 1:
            return super().broadcast_object(value, source=source)
        with self.step(name):
            return self._broadcast_each(value, source)[source]

    def _broadcast_each(self, value: object, only: int | None = None) -> list[object]:
        """The values of all ranks, by rank; ``only``: the one rank that has a value."""
        data = _to_tensor(value) if only in {None, self.rank} else torch.empty(0, dtype=torch.uint8)
        rows = self.control.all_counts([len(data), *([] if only is None else [only])])
        if only is not None:
            self.check_rank("source", [source for _, source in rows])
        sizes = [row[0] for row in rows]
        values: list[object] = [None] * self.world_size
        in_flight: deque[tuple[int, torch.Tensor, Transfer]] = deque()

        def complete() -> None:
            source, received, transfer = in_flight.popleft()
            transfer.wait()
            values[source] = value if source == self.rank else _from_tensor(received)

        for source in (rank for rank, size in enumerate(sizes) if size):
            if len(in_flight) == MAX_BROADCASTS:
                complete()
            tensor = data if source == self.rank else _empty(sizes[source])
            in_flight.append((source, tensor, self.control.broadcast(tensor, source)))
        while in_flight:
            complete()
        return values

    def send_object(self, value: object, *, to: int) -> None:
        self.check_rank("to", [to])
        data = _to_tensor(value)
        count = torch.tensor([len(data)], dtype=torch.int64)
        for tensor in (count, data):
            self.control.send_recv(sends=[(tensor, to)]).wait()

    def receive_object(self, *, source: int) -> object:
        self.check_rank("source", [source])
        count = torch.zeros(1, dtype=torch.int64)
        self.control.send_recv(receives=[(count, source)]).wait()
        data = _empty(int(count))
        self.control.send_recv(receives=[(data, source)]).wait()
        return _from_tensor(data)

    # the end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._monitor.failure is None:
            self._monitor.fail_with(error)
        self.close()

    def all_stopped(self) -> None:
        if self._monitor.failure is not None:
            self._monitor.all_stopped()

    def close(self) -> None:
        """Leave together; destroy the process groups that this one made. After a failure only release resources."""
        failed = self._monitor.failure is not None
        if not failed:
            with self.step("close"):
                pass
        self.transport.close()
        if self.control is not self.transport:
            self.control.close()
        self._monitor.close()
        for process_group in self._made if not failed else ():
            dist.destroy_process_group(process_group)


_CPU = torch.device("cpu")


def _to_tensor(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)


def _from_tensor(data: torch.Tensor) -> object:
    return decode(data.numpy().tobytes())


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends the CPU's tensors with Gloo, as one of ``cpu:gloo,cuda:nccl`` does."""
    return "cpu:gloo" in str(dist.get_backend_config(group))


def _connect(backend: str, device: torch.device, store: Store, info: RankInfo) -> dist.ProcessGroup:
    """A new process group of all ranks. Thread-safe.

    If there is a default group already, it is the caller's, or that of an earlier run that failed: messages may be in
    flight in it, so that the new one is made beside it. NCCL connects at once, to this rank's GPU, and not in the first
    operation: that would be a long call without progress.
    """
    if device.type == "cpu":
        if dist.is_initialized():
            beside: dist.ProcessGroup = dist.new_group(backend=backend)
            return beside
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size)
        return distributed_c10d._get_default_group()
    torch.cuda.set_device(device)  # per thread: a new one begins on the first GPU
    both = f"cpu:gloo,cuda:{backend}"
    try:
        if dist.is_initialized():
            group: dist.ProcessGroup = dist.new_group(backend=both)
        else:
            dist.init_process_group(both, store=store, rank=info.rank, world_size=info.world_size, device_id=device)
            group = distributed_c10d._get_default_group()
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # what process groups raise; its subclasses differ between versions
        raise nccl_refused(error) or error from error
    return group


def _fresh_prefix(store: Store, rank: int) -> Store:
    """A part of ``store`` for one more group of the same ranks: the n-th of every rank is the same."""
    count = store.add(f"fsdpckpt/groups/{rank}", 1)
    return PrefixStore(f"fsdpckpt/{count}", store)


def _rendezvous(info: RankInfo, patience: float) -> Store:
    """The store at which the workers meet: torchrun's own if it keeps one, else one that rank 0 serves."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _connect_store(info.address, info.port, info.rank == 0 and not by_agent, patience)
    except RuntimeError as error:
        raise WorkerError(
            f"worker {info.rank} cannot meet the others at {info.address}:{info.port}",
            why=str(error).splitlines()[0],
            rank=info.rank,
            next_step="check that the address is reachable from every node and the port free",
            retryable=True,  # a port that was taken, or a node that came late
        ) from error
    return PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@functools.cache  # stays for the next run: if rank 0 served a new store, the others could connect to the old one
def _connect_store(address: str, port: int, serves: bool, patience: float) -> Store:  # noqa: FBT001
    timeout = timedelta(seconds=patience)
    return TCPStore(address, port, None, serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
