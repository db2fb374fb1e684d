"""The parts of ``scripts/gpu_check``. Ranks are forked from a process that has imported torch and used no GPU."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fsdpckpt
from fsdpckpt import comm
from fsdpckpt.api import convert, save_units
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters import pipeline
from fsdpckpt.options import ConvertOptions, OutputScope
from fsdpckpt.progress import NoProgress
from tests.comm.forked_workers import forked_workers
from tests.e2e.distributed.disks import bind, can_bind, own_namespace
from tests.e2e.distributed.lost import Lost, make, play_all, unkept

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
LIMIT = 15.0  # seconds after the loss of a rank
LOST = [
    Lost(step, trouble, rank, 3)
    for step, rank in (("read and plan", 1), ("exchange", 2), ("publish", 1))
    for trouble in ("kill", "stop", "cut off")
]
SIZES = [(13, 7), (1, 5), (2,), (64, 33, 3), (257,), (512, 1024)]
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.complex64),
]


class StageSeconds(NoProgress):
    """Measures how long each stage takes. ``seconds``: by the stage's name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._begun = "", 0.0

    def begin(self, stage: str, total_bytes: int) -> None:
        self._stage, self._begun = stage, time.perf_counter()

    def end(self) -> None:
        self.seconds[self._stage] = time.perf_counter() - self._begun


class Row(NamedTuple):
    part: str
    what: str
    found: str
    right: bool


class Check:
    """``rows``: what was found so far, each printed at once if ``aloud``. ``device``: cuda or cpu."""

    def __init__(self, directory: Path, device: str, megabytes: int, *, aloud: bool) -> None:
        self.directory, self.device, self.megabytes = directory, device, megabytes
        self.rows: list[Row] = []
        self.not_run = ["several GPUs, and several machines"]
        if device == "cpu":
            self.not_run.insert(0, "any GPU, NCCL and pinned memory: Gloo and host memory took their place")
        self.part = ""
        self.aloud = aloud

    def row(self, what: str, found: str, *, right: bool = True) -> None:
        self.rows.append(Row(self.part, what, found, right))
        if self.aloud:
            print(f"{self.part:8} {what}: {'' if right else 'WRONG: '}{found}", flush=True)

    def ranks(self, count: int, body: Callable[[int], None], *, limit: float = 90) -> bool:
        """``body(rank)`` on ``count`` nodes of one GPU; whether all ended well."""

        def node(rank: int) -> int:
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
            os.environ |= {"NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
            body(rank)
            return 0

        return forked_workers(count, node, limit=limit) == [0] * count

    def fresh(self, name: str) -> Path:
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def source(self) -> Path:
        """A checkpoint of ``megabytes`` of random data in eight rank files."""
        source = self.directory / "source"
        if not source.exists():
            source.mkdir(parents=True)
            count = max(self.megabytes // 16, 1)
            generator = torch.Generator().manual_seed(3)
            model = {f"layers.{n}.weight": torch.randn(2048, 2048, generator=generator) for n in range(count)}
            torch.save(model, source / "full.pt")
            convert(source / "full.pt", source / "ranks", to="sharded", container="torch", world_size=8, buffers="none")
            (source / "full.pt").unlink()
        return source / "ranks"


def about(check: Check) -> str | None:
    """The device and torch; None where there is no GPU. Asked in a process of its own: a GPU that was used forbids
    forking.
    """
    out = check.fresh("about") / "said"

    def ask(_: int) -> int:
        if check.device == "cuda":
            if not (torch.cuda.is_available() and dist.is_nccl_available()):
                return 2
            version = ".".join(map(str, torch.cuda.nccl.version()))
            out.write_text(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {version}")
        else:
            out.write_text(f"no GPU, torch {torch.__version__}, Gloo")
        return 0

    return out.read_text() if forked_workers(1, ask, limit=60) == [0] else None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


# gather, scatter, shard, broadcast


def comm_against_torch(check: Check) -> None:
    for ranks in (3, 4):
        out = check.fresh("comm")
        well = check.ranks(ranks, lambda rank, out=out: _compare_comm(check.device, out / f"{rank}.json"))
        counts = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
        compared, wrong = sum(count[0] for count in counts), sum(count[1] for count in counts)
        found = f"{compared} tensors compared, {wrong} differ" + ("" if well else "; a rank failed")
        check.row(f"{ranks} ranks against PyTorch", found, right=well and compared > 0 and not wrong)


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def _compare_comm(device: str, out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    generator = torch.Generator().manual_seed(1)
    whole = {f"{dtype}.{shape}": _random(shape, dtype, generator).to(device) for dtype in DTYPES for shape in SIZES}
    whole["scalar"] = torch.tensor(3.5, device=device)
    sharded = {
        name: distribute_tensor(value, mesh, [Shard(len(name) % value.dim())])
        if value.dim() and value.dtype is not torch.float8_e4m3fn
        else value
        for name, value in whole.items()
    }
    compared: list[bool] = []
    with comm.TorchGroup.over() as group:
        for to in (None, 0, ranks - 1):
            gathered = comm.gather(group, sharded, to=to)
            if to in (None, rank):
                compared += [same(gathered[name], value) for name, value in whole.items()]
        given = whole if rank == 0 else None
        parts = [comm.scatter(group, given, mesh=mesh, placements=[Shard(0)])]
        parts.append(comm.shard(group, whole, mesh=mesh, placements=[Shard(0)]))
        for part in parts:
            for name, value in whole.items():
                found: Any = part[name]
                own = value
                if isinstance(found, DTensor):
                    chunks = torch.chunk(value, ranks)
                    own, found = chunks[rank] if rank < len(chunks) else value[:0], found.to_local()
                compared.append(same(found, own))
        sent = comm.broadcast(group, given)
        compared += [same(sent[name], value) for name, value in whole.items()]
    out.write_text(json.dumps([len(compared), compared.count(False)]))
    dist.barrier()
    dist.destroy_process_group()


# several workers of one machine on one GPU


def sharing(check: Check) -> None:
    """NCCL's own refusal is our error with the way out, or NCCL allows it; by default such workers use Gloo."""
    out = check.fresh("sharing")
    for backend in ("nccl", "auto") if check.device == "cuda" else ("auto",):

        def body(rank: int, backend: str = backend) -> int:
            for variable in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
                os.environ.pop(variable, None)
            said = out / f"{backend}-{rank}"
            try:
                with comm.TorchGroup.start(backend=backend, device="auto") as group:
                    given = {"x": torch.arange(1000.0)} if rank == 0 else None
                    found = comm.broadcast(group, given)["x"]
                    right = torch.equal(found.cpu(), torch.arange(1000.0))
                    said.write_text(f"{group.backend}, {'the same values' if right else 'OTHER VALUES'}")
            except fsdpckpt.FsdpckptError as error:
                said.write_text(" ".join(str(error).split()))
            return 0

        forked_workers(2, body, limit=60)
        texts = [path.read_text() for path in sorted(out.glob(f"{backend}-*"))]
        refused = all("NCCL refused" in text and "gloo" in text for text in texts)
        works = all(text.endswith("the same values") for text in texts)
        right = len(texts) == 2 and (works or (refused and backend == "nccl"))
        check.row(f"2 workers on one device, --backend {backend}", texts[0] if texts else "nothing said", right=right)


# training


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


class _Net(nn.Module):
    def __init__(self, width: int = 67) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, 101)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.embed(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, times: int = 2) -> None:
    for number in range(times):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        ids = torch.randint(0, 101, (4, 9), generator=generator).to(device)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def training(check: Check) -> None:
    """What FSDP saves is converted to one file, and compared with the full state dict that FSDP itself gathers."""
    out = check.fresh("train")
    well = check.ranks(4, lambda _: _train(check.device, out), limit=150)
    check.row(
        "FSDP2 and FSDP1 (both use_orig_params) trained and saved by 4 ranks", "done" if well else "failed", right=well
    )
    for source, truth in (("fsdp2_dcp", "fsdp2"), ("fsdp2_ranks", "fsdp2"), ("orig", "orig"), ("flat", "flat")):
        convert(out / source, out / f"{source}.full.pt", key_type="name", overwrite=True)
        found = torch.load(out / f"{source}.full.pt", weights_only=True)
        compared = _compare(found, torch.load(out / f"{truth}.truth.pt", weights_only=True))
        right = len(compared) > 0 and all(compared)
        check.row(f"{source} -> full", f"{len(compared)} values, {compared.count(False)} differ", right=right)
    convert(out / "orig", out / "orig3", to="flattened", world_size=3)
    equal = fsdpckpt.diff(out / "orig", out / "orig3").same
    check.row("flat shards of 4 ranks -> of 3", "no difference" if equal else "they differ", right=equal)


def _compare(found: dict[str, Any], truth: dict[str, Any]) -> list[bool]:
    pairs = [(found["model"].get(name), value) for name, value in truth["model"].items()]
    for name, states in truth["optimizer"]["state"].items():
        own = found["optimizer"]["state"].get(name, {})
        pairs += [(own.get(state), value) for state, value in states.items()]
    return [one is not None and _same_value(one, other) for one, other in pairs]


def _same_value(one: Any, other: Any) -> bool:
    """Steps are whole numbers, of which frameworks make tensors of other dtypes, with a dimension or without."""
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if one.numel() == other.numel() == 1:
        return bool(one.double().reshape(()) == other.double().reshape(()))
    return same(one, other)


def _train(device: str, out: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(0)
    model = _Net().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, optimizer, device)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(out / "fsdp2_dcp"))
    (out / "fsdp2_ranks").mkdir(exist_ok=True)
    torch.save(model.state_dict(), out / "fsdp2_ranks" / f"model_world_size_{ranks}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), out / "fsdp2_ranks" / f"optim_world_size_{ranks}_rank_{rank}.pt")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, whole_states = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"model": whole, "optimizer": whole_states}, out / "fsdp2.truth.pt")
    for name in ("orig", "flat"):
        torch.manual_seed(1)
        sharded = FullyShardedDataParallel(
            _Net().to(device),
            auto_wrap_policy=ModuleWrapPolicy({_Block}),
            use_orig_params=name == "orig",
            device_id=torch.device(device, 0) if device == "cuda" else torch.device("cpu"),
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        _step(sharded, optimizer, device)
        folder = out / name
        folder.mkdir(exist_ok=True)
        save_units(sharded, optimizer, folder / "units.json")
        FullyShardedDataParallel.set_state_dict_type(
            sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )
        torch.save(sharded.state_dict(), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), folder / f"optim_world_size_{ranks}_rank_{rank}.pt")
        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
            full, full_states = (
                sharded.state_dict(),
                FullyShardedDataParallel.full_optim_state_dict(sharded, optimizer, rank0_only=False),
            )
        states = {
            key: {state: _on_cpu(value) for state, value in each.items()} for key, each in full_states["state"].items()
        }
        if name == "orig":  # on CPUs torch 2.13 returns exp_avg_sq in the place of exp_avg
            for state in ("exp_avg", "exp_avg_sq"):
                _put_together(sharded, optimizer, states, state)
        if rank == 0:
            values = {key: value.cpu() for key, value in full.items()}
            torch.save({"model": values, "optimizer": {"state": states}}, out / f"{name}.truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def _put_together(model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any], state: str) -> None:
    """Replace ``state`` in ``states`` by the ranks' slices of each parameter, one after the other."""
    for name, parameter in model.named_parameters():
        own = optimizer.state[parameter].get(state) if parameter in optimizer.state else None
        slices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(slices, None if own is None else own.cpu())
        key = name.replace("_fsdp_wrapped_module.", "")
        whole = torch.cat([each.reshape(-1) for each in slices if each is not None])
        states[key][state] = whole.reshape(states[key][state].shape)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if torch.is_tensor(value) else value


# nodes with disks of their own


def nodes(check: Check) -> None:
    if not can_bind():
        check.not_run.append("nodes and losses: this machine allows no mount namespaces")
        return
    source, out = check.source(), check.fresh("nodes")
    view = out / "view"
    view.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        for rank in range(4) if path.suffix == ".json" else [number % 4]:
            (out / str(rank)).mkdir(exist_ok=True)
            os.link(path, out / str(rank) / path.name)
    cases: dict[str, dict[str, Any]] = {
        "DCP of 3": {"to": "sharded", "world_size": 3},
        "one file": {"to": "full", "container": "torch"},
        "rank files of 6": {"to": "sharded", "container": "torch", "world_size": 6},
    }
    for what, options in cases.items():
        name = what.replace(" ", "-") + (".pt" if what == "one file" else "")
        backends = ("nccl", "gloo") if check.device == "cuda" else ("gloo",)
        begun, stages = time.perf_counter(), StageSeconds()
        given = ConvertOptions(**options)
        pipeline.convert(Solo(), str(source), str(out / f"alone-{name}"), given, stages)
        seconds = {"one process": (time.perf_counter() - begun, stages.seconds["read"])}
        right = True
        for backend in backends:
            target, timed = out / f"{backend}-{name}", out / f"{backend}-{name}.seconds"

            def node(
                rank: int,
                target: Path = target,
                timed: Path = timed,
                backend: str = backend,
                given: ConvertOptions = given,
            ) -> None:
                own_namespace()
                bind({str(view): str(out / str(rank))})
                device = check.device if backend == "nccl" else "cpu"
                with comm.TorchGroup.start(backend=backend, device=device) as group:
                    begun, stages = time.perf_counter(), StageSeconds()
                    pipeline.convert(
                        group,
                        str(view),
                        str(target),
                        given,
                        stages,
                        scope=OutputScope.SHARED,
                        workers_here=4,
                    )
                    if rank == 0:
                        timed.write_text(json.dumps([time.perf_counter() - begun, stages.seconds["read"]]))

            well = check.ranks(4, node)
            right = right and well and _equal(out / f"alone-{name}", target)
            if timed.exists():
                seconds[f"4 nodes, {backend}"] = tuple(json.loads(timed.read_text()))
        found = "the same bytes; " if right else "other bytes, or a rank failed; "
        found += ", ".join(f"{key} {whole:.1f} s ({reading:.2f})" for key, (whole, reading) in seconds.items())
        check.row(f"to {what}", found, right=right)
        for path in [*out.glob(f"*-{name}*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _equal(one: Path, other: Path) -> bool:
    """Whether two files, or directories but for their ``fsdpckpt.json``, have the same bytes."""
    if one.is_file():
        return other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or names != sorted(path.name for path in other.iterdir()):
        return False
    return not any(filecmp.cmpfiles(one, other, [name for name in names if name != "fsdpckpt.json"], shallow=False)[1:])


def losses(check: Check) -> None:
    if not can_bind():
        return
    out = check.fresh("lost")
    make(out / "base")

    def ended(lost: Lost, played: dict[str, Any]) -> None:
        wrong = unkept(lost, played, LIMIT)
        others = [seconds for rank, seconds in enumerate(played["seconds"]) if rank != lost.rank]
        check.row(lost.name, f"others ended after {others} s" + "".join(f"; {each}" for each in wrong), right=not wrong)

    play_all(LOST, out, limit=LIMIT, at_once=3 if check.device == "cpu" else 5, device=check.device, ended=ended)


# rates


def rates(check: Check) -> None:
    """The rows of ``scripts/bench_gpu``, with 2 and with 4 ranks on this GPU.

    A conversion is also compared with what torch moves with its own settings, in processes that never see ours.
    """
    from bench_gpu_worker import Bench

    for ranks in (2, 4):
        source, out = check.source(), check.fresh("rates")

        def measure(rank: int, source: Path = source, out: Path = out, ranks: int = ranks) -> None:
            backend = "nccl" if check.device == "cuda" else "gloo"
            with comm.TorchGroup.start(backend=backend, device=check.device) as group:
                bench = Bench(group, check.megabytes << 20, 3)
                if ranks == 2:
                    bench.staging()
                bench.exchanges()
                bench.conversion(str(source), str(out / "out"))
                if rank == 0:
                    (out / "rows.json").write_text(json.dumps(bench.rows))

        well = check.ranks(ranks, lambda rank, out=out: _bare_exchange(check, rank, out / "bare"))
        bare = float((out / "bare").read_text()) if well else 0.0
        check.row(f"{ranks} ranks: torch alone, with its own settings", f"{bare:.2f} GiB/s", right=well)
        well = check.ranks(ranks, measure)
        rows = json.loads((out / "rows.json").read_text()) if (out / "rows.json").exists() else []
        for row in rows:
            found = f"{row['value']:.2f} {row['unit']}"
            if row.get("ratio") is not None:
                found += f" of {row['against']:.2f}: {row['ratio']:.2f}"
            elif bare:
                found += f", {row['value'] / bare:.2f} of torch alone"
            check.row(f"{ranks} ranks: {row['what']}", found)
        check.row(f"{ranks} ranks measured", "all" if well else "a rank failed", right=well)


def _bare_exchange(check: Check, rank: int, out: Path) -> None:
    """The median rate of three exchanges of equal parts between all ranks, after one to warm up."""
    from bench_gpu_worker import bare_exchange

    if check.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if check.device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    each = max((check.megabytes << 20) // ranks // ranks, 1)
    sent = torch.empty(each * ranks, dtype=torch.uint8, device=check.device)
    received = torch.empty_like(sent)
    seconds = []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        bare_exchange(sent, received)
        if check.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        out.write_text(str(each * ranks * (ranks - 1) / GIB / statistics.median(seconds[1:])))
    dist.destroy_process_group()


def loading(check: Check) -> None:
    """``open(SRC)[name].to(device)`` and ``StorageReader``, against ``pread`` into pinned memory and one copy."""
    source, out = check.source(), check.fresh("loading")
    full = out / "full.pt"
    convert(source, full, to="full", container="torch")

    def measure(_: int) -> None:
        import torch.distributed.checkpoint as dcp

        rows: list[tuple[str, float, bool]] = []
        truth = torch.load(full, weights_only=True)
        truth = truth.get("model", truth)
        nbytes = sum(value.nbytes for value in truth.values())
        opened = fsdpckpt.open(full)
        names = list(truth)

        def settle() -> None:
            if check.device == "cuda":
                torch.cuda.synchronize()

        def plain() -> dict[str, torch.Tensor]:
            """Whole file through one block of pinned memory, without any checksum."""
            block = torch.empty(8 << 20, dtype=torch.uint8, pin_memory=check.device == "cuda")
            into = torch.empty(len(block), dtype=torch.uint8, device=check.device)
            with open(full, "rb", buffering=0) as file:
                while count := file.readinto(block.numpy()):
                    into[:count].copy_(block[:count], non_blocking=True)
                    settle()
            return {}

        def lazily() -> dict[str, torch.Tensor]:
            return {name: opened[name].to(check.device) for name in names}

        def by_storage_reader() -> dict[str, torch.Tensor]:
            state = {name: torch.empty_like(value, device=check.device) for name, value in truth.items()}
            dcp.load({"model": state}, storage_reader=fsdpckpt.StorageReader(full), no_dist=True)
            return state

        for what, call in (("pread", plain), ("open", lazily), ("StorageReader", by_storage_reader)):
            taken, right = [], True
            for _ in range(4):
                begun = time.perf_counter()
                found = call()
                settle()
                taken.append(time.perf_counter() - begun)
                right = right and all(same(value, truth[name]) for name, value in found.items())
            rows.append((what, nbytes / GIB / statistics.median(taken[1:]), right))
        (out / "rows.json").write_text(json.dumps(rows))

    well = check.ranks(1, measure)
    rows = json.loads((out / "rows.json").read_text()) if well else []
    if not well:
        check.row("tensors read to the device", "failed", right=False)
    for what, rate, right in rows:
        found = f"{rate:.2f} GiB/s" + ("" if what == "pread" else f", {rate / rows[0][1]:.2f} of pread and one copy")
        check.row(f"{what} to {check.device}", found + ("" if right else "; values differ"), right=right)


# one process on a disk in memory


def threads(check: Check) -> None:
    """Seconds and CPU seconds of whole processes, start-up included, in turn with ``cp -r`` of the same directory; then
    what the copying alone takes, without start-up, reading and planning.
    """
    out = check.fresh("threads")
    source = out / "dcp"
    convert(check.source(), source, to="sharded", container="dcp", world_size=8, buffers="none")
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    program = [sys.executable, "-m", "fsdpckpt", "convert", "--quiet", str(source)]
    jobs = {"one file": ("full.pt", {"to": "full"}), "DCP of 8": ("dcp8", {"to": "sharded", "world_size": 8})}
    counts = [number for number in (1, 2, 8, 16) if number <= (os.cpu_count() or 1)]
    commands = {"cp -r": ["cp", "-r", str(source), str(out / "copy")]}
    for job, (name, options) in jobs.items():
        flags = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", str(value))]
        for number in counts:
            commands[f"to {job}, {number} threads"] = [*program, str(out / name), *flags, "--threads", str(number)]
    taken: dict[str, list[tuple[float, float]]] = {what: [] for what in commands}
    for _ in range(3):
        for what, command in commands.items():
            _remove(out, "copy", *(name for name, _ in jobs.values()))
            taken[what].append(_whole_process(command))
    started = statistics.median(_whole_process([*program[:3], "--version"])[0] for _ in range(3))
    check.row("start-up of fsdpckpt, which each of its rows includes", f"{started:.2f} s")
    copied = statistics.median(seconds for seconds, _ in taken["cp -r"])
    for what, runs in taken.items():
        seconds, used = (statistics.median(values) for values in zip(*runs, strict=True))
        found = f"{nbytes / GIB / seconds:.2f} GiB/s, {used / (nbytes / GIB):.2f} CPU seconds a GiB"
        check.row(what, found + f", {copied / seconds:.2f} x as fast as cp -r")
    eight = max(number for number in counts if number <= 8)
    for job, (name, options) in jobs.items():
        given = ConvertOptions(**options, threads=eight)
        alone = []
        for _ in range(3):
            _remove(out, "copy", name)
            stages = StageSeconds()
            pipeline.convert(Solo(), str(source), str(out / name), given, stages)
            alone.append(stages.seconds["copy"])
        seconds = statistics.median(alone)
        found = f"{nbytes / GIB / seconds:.2f} GiB/s, {copied / seconds:.2f} x as fast as cp -r"
        check.row(f"to {job}, {eight} threads, copying alone", found)


def _remove(folder: Path, *names: str) -> None:
    for path in (folder / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _whole_process(command: Sequence[str]) -> tuple[float, float]:
    """Its seconds and its CPU seconds.

    Raises:
        ChildProcessError: if it fails.
    """
    begun = time.perf_counter()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ChildProcessError(f"{' '.join(command)}: exit code {process.returncode}")
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime


PARTS: dict[str, Callable[[Check], None]] = {
    "comm": comm_against_torch,
    "sharing": sharing,
    "train": training,
    "nodes": nodes,
    "lost": losses,
    "rates": rates,
    "loading": loading,
    "threads": threads,
}
