"""One worker of ``scripts/bench_gpu``, under torchrun: SOURCE RESULT DEVICE MEGABYTES RUNS."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdpckpt import comm
from fsdpckpt.comm.transport import TransferBuffers
from fsdpckpt.converters import pipeline, shared_sources
from fsdpckpt.execute.send_recv import DEVICE_BYTES
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.files import SourceFile
from fsdpckpt.options import ConvertOptions, OutputScope, VerifyLevel
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage.sources import Sources

GIB = 1 << 30
CHUNK = 4 << 20  # bytes: of a staging buffer with the default --max-memory
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
SLACK = 8 << 20  # bytes of the device: small counts and flags, which the allocator rounds up


class Bench:
    """``rows``: what is measured, as ``scripts/bench_gpu`` prints it."""

    def __init__(self, group: comm.Group, nbytes: int, runs: int) -> None:
        self.group = group
        self.device = group.device
        self.nbytes = nbytes
        self.runs = runs
        self.rows: list[dict[str, Any]] = []

    def rate(
        self,
        what: str,
        nbytes: int,
        call: Callable[[], None],
        against: Callable[[], None] | None = None,
        *,
        before: Callable[[], None] | None = None,
    ) -> None:
        """GiB/s of ``call`` and of ``against``, which each move ``nbytes``. Both run once to warm up.

        ``before`` is called before each, and not measured.
        """
        calls = [call] if against is None else [call, against]
        for each in calls:
            self._seconds(each, before)
        runs = [[nbytes / GIB / self._seconds(each, before) for each in calls] for _ in range(self.runs)]
        row: dict[str, Any] = {"what": what, "value": statistics.median(run[0] for run in runs), "unit": "GiB/s"}
        if against is not None:
            row["against"] = statistics.median(run[1] for run in runs)
            row["ratio"] = statistics.median(run[0] / run[1] for run in runs)
        self.rows.append(row)

    def _seconds(self, call: Callable[[], None], before: Callable[[], None] | None) -> float:
        if before is not None:
            before()
        self._settle()
        dist.barrier()
        begun = time.perf_counter()
        call()
        self._settle()
        dist.barrier()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # copies between host and device

    def staging(self) -> None:
        """The copies that an exchange makes, one buffer after the other, against one plain copy of pinned memory."""
        buffers = TransferBuffers(self.device, count=4, size=CHUNK, to_send=4)
        count = max(self.nbytes // 4 // CHUNK, 4)
        size = count * CHUNK
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        device = torch.empty(size, dtype=torch.uint8, device=self.device)

        def to_device() -> None:
            for number in range(count):
                buffers.fill(number % 4, 0, CHUNK, nothing)
            buffers.wait_for_copies()

        def to_host() -> None:
            for number in range(count):
                buffers.empty(number % 4, 0, CHUNK, nothing)

        what = "against cudaMemcpy" if self.device.type == "cuda" else "(nothing is copied), against a copy"
        self.rate(f"staging, host to device {what}", size, to_device, lambda: _copy(device, host, TO_DEVICE))
        self.rate(f"staging, device to host {what}", size, to_host, lambda: _copy(host, device, TO_HOST))

    # between the workers

    def exchanges(self) -> None:
        """All-to-all of equal parts through host memory and on the device, compared with torch's own."""
        world_size = self.group.world_size
        each = self.nbytes // world_size // world_size
        counts = dict.fromkeys((peer for peer in range(world_size) if peer != self.group.rank), each)
        out = torch.empty(each * world_size, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(out)

        def through(*, on_device: bool) -> None:
            comm.exchange(self.group, sends=counts, receives=counts, read=nothing, write=nothing, on_device=on_device)

        moved = each * world_size * (world_size - 1)
        bare = "all_to_all_single" if self.device.type == "cuda" else "isend and irecv"
        self.rate(
            f"exchange from host to host, against {bare}",
            moved,
            lambda: through(on_device=False),
            lambda: bare_exchange(out, into),
        )
        if self.device.type == "cuda":
            self.rate(
                f"exchange on the device, against {bare}",
                moved,
                lambda: through(on_device=True),
                lambda: bare_exchange(out, into),
            )

    def state_dicts(self) -> None:
        """Gather to one rank, and scatter from it."""
        mesh = init_device_mesh(self.device.type, (self.group.world_size,))
        rows = max(self.nbytes // 4 // 8 // 4096, 1)
        whole = {f"w{number}": torch.randn(rows, 4096, device=self.device) for number in range(8)}
        shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
        nbytes = rows * 4096 * 4 * 8
        gathered = comm.gather(self.group, shards, to=0)
        if self.group.rank == 0 and not all(torch.equal(gathered[name], whole[name]) for name in whole):
            raise SystemExit("gather changed values: no figure is worth anything")
        scattered = comm.scatter(self.group, whole if self.group.rank == 0 else None, mesh=mesh, placements=[Shard(0)])
        for name, shard in shards.items():
            found = scattered[name]
            if not (isinstance(found, DTensor) and torch.equal(found.to_local(), shard.to_local())):
                raise SystemExit("scatter changed values: no figure is worth anything")
        del gathered, scattered
        self.rate("gather to rank 0", nbytes, lambda: void(comm.gather(self.group, shards, to=0)))
        self.rate(
            "scatter from rank 0",
            nbytes,
            lambda: void(
                comm.scatter(self.group, whole if self.group.rank == 0 else None, mesh=mesh, placements=[Shard(0)])
            ),
        )

    # a conversion

    def conversion(self, source: str, target: str) -> None:
        """A conversion in which every byte is sent: no worker sees what it writes. With the device memory."""
        content_identity = shared_sources.content_identity
        numbers = [int(found[1]) for name in os.listdir(source) if (found := re.search(r"_rank_(\d+)\.", name))]
        world_size, ranks = self.group.world_size, max(numbers) + 1

        def others_only(file: SourceFile, sources: Sources) -> bytes:
            """Worker w writes the ranks from w * ranks / world size on, and sees all others."""
            return b"" if self._writes(file.path, ranks) else content_identity(file, sources)

        shared_sources.content_identity = others_only
        options = ConvertOptions(
            to=Layout.SHARDED, container=Container.TORCH, world_size=ranks, verify=VerifyLevel.NONE
        )

        def without_target() -> None:
            if self.group.rank == 0:
                shutil.rmtree(target, ignore_errors=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what the run before has freed may still wait for its streams

        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

        def convert() -> None:
            pipeline.convert(
                self.group, source, target, options, NoProgress(), scope=OutputScope.SHARED, workers_here=world_size
            )

        nbytes = sum(os.path.getsize(os.path.join(source, name)) for name in os.listdir(source))
        self.rate("conversion, every byte exchanged", nbytes, convert, before=without_target)
        shared_sources.content_identity = content_identity
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device) - before
            row = {
                "what": "device memory of a worker in torch, against its bound",
                "value": used / (1 << 20),
                "unit": "MiB",
            }
            bound = DEVICE_BYTES + SLACK
            self.rows.append(row | {"against": bound / (1 << 20), "ratio": used / bound})

    def _writes(self, path: str, ranks: int) -> bool:
        found = re.search(r"_rank_(\d+)\.", path)
        return found is not None and int(found[1]) * self.group.world_size // ranks == self.group.rank


def void(_: object) -> None:
    """Discards a result."""


def nothing(*_: object) -> None:
    """Reads and writes nothing."""


def bare_exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Equal parts between all ranks, by torch alone. On a GPU they are only queued."""
    if sent.device.type == "cuda":
        dist.all_to_all_single(received, sent)
        return
    # Gloo has no all-to-all.
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts, places = sent.chunk(ranks), received.chunk(ranks)
    peers = [peer for peer in range(ranks) if peer != rank]
    works = [dist.irecv(places[peer], peer) for peer in peers] + [dist.isend(parts[peer], peer) for peer in peers]
    for work in works:
        if work is not None:
            work.wait()


def _copy(target: torch.Tensor, source: torch.Tensor, kind: int) -> None:
    """``cudaMemcpy`` itself, from the runtime that torch has loaded; without a GPU a copy by torch."""
    if target.device.type == source.device.type == "cpu":
        target.copy_(source)
        return
    code = _runtime().cudaMemcpy(
        ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(len(source)), kind
    )
    if code:
        raise SystemExit(f"cudaMemcpy failed with {code}")


def _runtime() -> ctypes.CDLL:
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            if "libcudart" in line:
                return ctypes.CDLL(line.split()[-1])
    raise SystemExit("this torch has loaded no libcudart to compare with")


def main() -> None:
    source, result, kind, megabytes, runs = sys.argv[1:]
    backend = "nccl" if kind == "cuda" else "gloo"
    with comm.TorchGroup.start(backend=backend, device=kind) as group:
        bench = Bench(group, int(megabytes) << 20, int(runs))
        bench.staging()
        bench.state_dicts()
        if group.world_size > 1:
            bench.exchanges()
            bench.conversion(source, os.path.join(os.path.dirname(result), "out"))
        names = torch.cuda.get_device_name(group.device) if kind == "cuda" else "no GPU"
        devices = group.all_gather_objects(names, name="devices")
        about = {"torch": torch.__version__, "backend": backend, "workers": group.world_size}
        if group.rank == 0:
            counted = {name: devices.count(name) for name in devices}
            about["devices"] = ", ".join(f"{count} x {name}" for name, count in counted.items())
            with open(result, "w", encoding="utf-8") as file:
                json.dump({"about": about, "rows": bench.rows}, file)
    sys.stdout.flush()
    os._exit(0)  # torch's threads can abort an orderly end, now and then


if __name__ == "__main__":
    main()
