"""``TorchGroup``: a group over a live process group of torch.

An exception of one rank inside a step is raised on every rank as the same ``WorkerError`` (rank, step, cause), within
the limit, whatever the others wait for; see ``fsdpckpt.comm.store_monitor`` for how. A group that failed stays failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from fsdpckpt.comm.exchanger import spread
from fsdpckpt.comm.launch import RankInfo, choose_backend, has_own_gpu, rank_device, rank_from_environment
from fsdpckpt.comm.liveness import end_with_launcher, heartbeat
from fsdpckpt.comm.protocol import Group, Solo
from fsdpckpt.comm.store_monitor import StoreMonitor
from fsdpckpt.comm.transport import Transport
from fsdpckpt.comm.trees import decode, encode
from fsdpckpt.errors import UsageError, WorkerError

LIMIT = 15.0
"""Seconds within which a failure of one rank ends all of them."""

PATIENCE = 120.0
"""Seconds that ranks may start apart: importing torch from a busy network disk takes its time."""


class TorchGroup(Group):
    """The ranks of a process group; ``device``: where data must be to be sent between them.

    Made by ``over`` (a live process group, which stays the caller's) or ``start`` (makes its own).
    """

    backend: str
    device: torch.device
    transport: Transport

    def __init__(
        self, *, device: torch.device, backend: str, transport: Transport, monitor: StoreMonitor, owned: bool = False
    ) -> None:
        self.rank = monitor.rank
        self.world_size = monitor.world_size
        self.device = device
        self.backend = backend
        self.transport = transport
        self._monitor = monitor
        self._owned = owned
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
        store = _own_part(distributed_c10d._get_process_group_store(group), rank)
        monitor = StoreMonitor(store, rank, world_size, limit=limit)
        return cls(device=device, backend=backend, transport=Transport(group, monitor, device), monitor=monitor)

    @classmethod
    def start(
        cls,
        *,
        backend: str = "auto",
        device: str = "auto",
        limit: float = LIMIT,
        patience: float = PATIENCE,
        place: RankInfo | None = None,
    ) -> Group:
        """Meet the other ranks at the rendezvous of the environment (torchrun, srun) or ``place``; ``Solo`` without
        either.

        ``patience``: seconds that one rank may start later than another. Initialises the default process group;
        ``close`` destroys it. Raises WorkerError if a rank does not come.
        """
        place = rank_from_environment() if place is None else place
        if place is None:
            _, kind = choose_backend(backend, device, all_have_gpu=lambda: has_own_gpu(1))
            return Solo(rank_device(kind, None))
        end_with_launcher()
        store = _rendezvous(place, patience)
        store.add("fsdpckpt/own-gpu", int(has_own_gpu(place.local_world_size)))
        with StoreMonitor(
            PrefixStore("fsdpckpt/start", store), place.rank, place.world_size, limit=patience
        ) as monitor:
            monitor.barrier("start", json.dumps([backend, device]))
            every = store.add("fsdpckpt/own-gpu", 0) == place.world_size  # all have voted: all have entered the step
            name, kind = choose_backend(backend, device, all_have_gpu=lambda: every)
            own_device = rank_device(kind, place)
            if kind == "cuda":
                torch.cuda.set_device(own_device)
            part = PrefixStore("fsdpckpt/group", store)
            # Without watching it would wait half an hour for a rank that has ended.
            monitor.run_watched(lambda: _connect(name, own_device, part, place))
        group = cls.over(device=own_device, limit=limit)
        if isinstance(group, TorchGroup):
            group._owned = True
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
            monitor.barrier(f"{path} (end)", place=outer or f"what follows {path}")
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

    def beat(self) -> None:
        self._monitor.beat()

    def watch(self, *, moving: bool) -> None:
        self._monitor.check_peers(alive=moving)

    def heartbeat(self) -> Context[None]:
        if self.world_size == 1:  # the next rank is this one: waiting for a slow source would look like a lost rank
            return nullcontext()
        return heartbeat(lambda moving: self.watch(moving=moving))

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
            return self._spread(value, has_value=True)

    def broadcast_object(self, value: object = None, *, source: int = 0, name: str = "broadcast of a value") -> object:
        if self.world_size == 1:
            return value
        with self.step(name):
            return self._spread(value, has_value=self.rank == source)[source]

    def _spread(self, value: object, *, has_value: bool) -> list[object]:
        encoded = encode(value) if has_value else b""
        sizes = [size for (size,) in self.transport.all_counts([len(encoded)])]
        received = [bytearray(size if rank != self.rank else 0) for rank, size in enumerate(sizes)]

        def read(_: int, offset: int, buffer: torch.Tensor) -> None:
            buffer.copy_(torch.frombuffer(bytearray(encoded[offset : offset + len(buffer)]), dtype=torch.uint8))

        def write(source: int, offset: int, buffer: torch.Tensor) -> None:
            received[source][offset : offset + len(buffer)] = buffer.numpy().tobytes()

        spread(self, sizes=sizes, read=read, write=write, name="values")
        values = [decode(bytes(data)) if data else None for data in received]
        values[self.rank] = value if has_value else None
        return values

    def send_object(self, value: object, *, to: int) -> None:
        data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(self.device)
        count = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        for part in (count, data):
            self.transport.send_recv(send=part, to=to, receive=None, source=None).wait()

    def receive_object(self, *, source: int) -> object:
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.transport.send_recv(send=None, to=None, receive=count, source=source).wait()
        data = torch.empty(int(count), dtype=torch.uint8, device=self.device)
        self.transport.send_recv(send=None, to=None, receive=data, source=source).wait()
        return decode(data.cpu().numpy().tobytes())

    # the end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._monitor.failure is None:
            self._monitor.fail_with(error)
        self.close()

    def all_stopped(self) -> None:
        if self._monitor.failure is not None:
            self._monitor.all_stopped()

    def close(self) -> None:
        """Leave together; destroy the process group that ``start`` made. After a failure only release resources."""
        failed = self._monitor.failure is not None
        if not failed:
            with self.step("close"):
                pass
        self.transport.close()
        self._monitor.close()
        if self._owned and not failed:
            dist.destroy_process_group()


def _connect(backend: str, device: torch.device, store: Store, place: RankInfo) -> None:
    """Initialise the default process group. Thread-safe.

    NCCL connects at once, to this rank's GPU, and not in the first operation: that would be a long call without
    progress.
    """
    if device.type == "cpu":
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
        return
    torch.cuda.set_device(device)  # per thread: a new one begins on the first GPU
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, device_id=device)


def _own_part(store: Store, rank: int) -> Store:
    """A part of ``store`` for one more group over the same process group: the n-th of every rank is the same."""
    count = store.add(f"fsdpckpt/groups/{rank}", 1)
    return PrefixStore(f"fsdpckpt/{count}", store)


def _rendezvous(place: RankInfo, patience: float) -> Store:
    """The store at which the workers meet: torchrun's own if it keeps one, else one that rank 0 serves."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = place.rank == 0 and not by_agent
    try:
        store = TCPStore(
            place.address,
            place.port,
            None,
            serves,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise WorkerError(
            f"worker {place.rank} cannot meet the others at {place.address}:{place.port}",
            why=str(error).splitlines()[0],
            rank=place.rank,
            next_step="check that the address is reachable from every node and the port free",
        ) from error
    return PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
