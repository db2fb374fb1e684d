"""Converts checkpoints of random FSDP models in every direction, and compares the results with PyTorch bit for bit.

    .venv/bin/python scripts/fuzz_fsdp.py 0 200        the FSDP1 models of seeds 0 to 199
    .venv/bin/python scripts/fuzz_fsdp.py 74 75 --keep DIR
    .venv/bin/python scripts/fuzz_fsdp.py 0 200 --meshes        FSDP2 models on meshes

A seed decides everything: modules, names, shapes, dtypes, shared, frozen and ignored parameters, wrapping, strategy,
optimizer and world sizes. Its full state dict becomes flattened files of N ranks, which must be what FSDP1 holds on
each rank (``tests.oracle.flat_held``). From there it goes to M ranks, to shards and back to full. With ``--meshes`` the
files are those of FSDP2 on a mesh with replicas, tensor parallelism or both; they go to other sizes of that mesh, to
another mesh, to DCP, to flat parameters and back to full. A finding is printed; exit code 1 means that there are
findings.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.flat.live.save import save_units
from tests.oracle import flat_held
from tests.oracle.compare import differences
from tests.oracle.fake import rank_file
from tests.oracle.fake_group import as_rank
from tests.oracle.flat_scenarios import Scenario
from tests.oracle.flat_train import built, wrap
from tests.writers.meshes import MeshCase, all_three, hsdp, over_tp

NAMES = ("layers", "0", "1", "weight", "bias", "state", "params", "param_groups", "step", "model", "module", "norm")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
MAX_RANKS_COMPARED = 4
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
)


class Tree:
    """A random module tree: the paths of its modules, its parameters, its buffers and which modules are units."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.modules, self.units = [""], [""] if rng.random() < 0.85 else []
        self.params: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.buffers: dict[str, tuple[int, ...]] = {}
        self.frozen: set[str] = set()
        self._grow("", self.units and "", rng.choice(DTYPES), depth=0, frozen=False)
        if not self.params:
            self.params["only"] = ((3, 5), torch.float32)
        free = [name for name in self.params if name.count(".")]
        self.shared = (
            {f"{free[0].split('.')[0]}.tied": free[0]} if free and rng.random() < 0.15 and self.units == [""] else {}
        )

    def _grow(self, path: str, unit: Any, dtype: torch.dtype, *, depth: int, frozen: bool) -> None:
        rng = self.rng
        names = rng.sample(NAMES, k=rng.randint(1, 5))
        for name in names:
            full = f"{path}.{name}" if path else name
            kind = rng.random()
            if depth < 3 and kind < 0.4:
                self.modules.append(full)
                inner, frozen_below = dtype, frozen
                if rng.random() < 0.5 and (unit == "" or unit or depth == 0):
                    self.units.append(full)
                    if rng.random() < 0.2:
                        inner = rng.choice(DTYPES)
                    frozen_below = rng.random() < 0.15
                self._grow(full, unit, inner, depth=depth + 1, frozen=frozen_below)
            elif kind < 0.9:
                shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
                self.params[full] = (shape, dtype)
                if frozen:
                    self.frozen.add(full)
            elif name not in ("weight", "bias"):  # which are taken for parameters
                self.buffers[full] = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 2)))

    def build(self) -> nn.Module:
        root = nn.Module()
        for path in self.modules[1:]:
            parent, _, name = path.rpartition(".")
            root.get_submodule(parent).register_module(name, nn.Module())
        for path, (shape, dtype) in self.params.items():
            parent, _, name = path.rpartition(".")
            root.get_submodule(parent).register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        for path, shape in self.buffers.items():
            parent, _, name = path.rpartition(".")
            root.get_submodule(parent).register_buffer(name, torch.empty(shape))
        for later, first in self.shared.items():
            parent, _, name = later.rpartition(".")
            root.get_submodule(parent).register_parameter(name, root.get_parameter(first))
        return root


def scenario_of(rng: random.Random) -> tuple[Scenario, bool]:
    tree = Tree(rng)
    units = tuple(unit for unit in tree.units if any(name.startswith(f"{unit}.") or not unit for name in tree.params))
    units = units or ("",)
    orig = rng.random() < 0.5
    ignored: tuple[str, ...] = ()
    if rng.random() < 0.1 and "" in units and not tree.shared and len(tree.params) > 3:
        ignored = (rng.choice(list(tree.params)),)
    strategy = rng.choice(STRATEGIES)
    return Scenario(
        "random",
        tree.build,
        units,
        optimizer_of(rng, orig=orig),
        (orig,),
        ignored,
        (lambda name: name in tree.frozen) if tree.frozen else None,
        strategy,
        rng.choice((None, None, torch.bfloat16)),
        rng.choice((1, 2, 3)) if strategy is ShardingStrategy.HYBRID_SHARD else None,
    ), orig


def optimizer_of(rng: random.Random, *, orig: bool) -> Callable[[nn.Module], Optimizer]:
    kind = rng.choice(("adamw", "adamw", "amsgrad", "momentum", "sgd"))
    grouped = orig and rng.random() < 0.3
    trained_only = rng.random() < 0.3

    def make(model: nn.Module) -> Optimizer:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad or not trained_only]
        if grouped:
            few = [p for n, p in named if "bias" in n]
            many = [p for n, p in named if "bias" not in n]
            groups = [{"params": g, "weight_decay": d} for g, d in ((many, 0.1), (few, 0.0)) if g]
        else:
            groups = [{"params": [p for _, p in named]}] if named else [{"params": list(model.parameters())}]
        if kind == "adamw":
            return AdamW(groups, lr=1e-2, foreach=False)
        if kind == "amsgrad":
            return AdamW(groups, lr=1e-2, amsgrad=True, foreach=False)
        return SGD(groups, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0, foreach=False)

    return make


def truth_of(entry: Scenario, seed: int) -> dict[str, Any]:
    """A full state dict by name, with random states of every parameter that is trained."""
    model = built(entry, seed)
    optimizer = entry.optimizer(model)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()
    names = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter, name)
    numbers = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    content = optimizer.state_dict()
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {numbers[number]: states for number, states in content["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[number] for number in group["params"]]}
                for group in content["param_groups"]
            ],
        },
    }


def comparable(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Without what flat parameters do not keep: the order of the states, and of the names in a group."""
    groups = [{**group, "params": sorted(group["params"])} for group in optimizer["param_groups"]]
    return {"state": dict(sorted(optimizer["state"].items())), "param_groups": groups}


class Play:
    """One seed: its conversions in ``directory``, and what is wrong with their results in ``found``."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng, self.directory = random.Random(seed), directory
        self.entry, self.orig = scenario_of(self.rng)
        self.group = self.entry.group or 1
        self.truth, self.truth_file = truth_of(self.entry, seed), directory / "truth.pt"
        torch.save(self.truth, self.truth_file)
        self.found: list[str] = []

    def convert(self, source: Path, name: str, *, may_refuse: bool = False, **options: Any) -> Path | None:
        """The target, or None if it was refused. ``may_refuse``: that is no finding then."""
        target = self.directory / name
        try:
            fsdpckpt.convert(source, target, **options)
        except FsdpckptError as error:
            if not may_refuse or isinstance(error, InternalError):
                self.found.append(f"{source.name} to {name}: {type(error).__name__}: {error}")
            return None
        return target

    def is_full(self, source: Path | None, name: str, **options: Any) -> None:
        full = self.convert(source, name, to="full", key_type="name", **options) if source is not None else None
        if full is None:
            return
        found = torch.load(full, weights_only=True)
        wrong = differences(dict(found["model"]), dict(self.truth["model"]), "model")
        wrong += differences(comparable(found["optimizer"]), comparable(self.truth["optimizer"]), "optimizer")
        self.found.extend(f"{name}: {problem}" for problem in wrong[:5])

    def is_flat(self, path: Path | None, world: int) -> None:
        """Whether the files are what FSDP1 holds on some of ``world`` ranks."""
        if path is None:
            return
        ranks = sorted(self.rng.sample(range(world), k=min(world, MAX_RANKS_COMPARED)))
        job = {"scenario": "random", "orig": self.orig, "group": self.entry.group, "path": str(path), "keys": "id"}
        job |= {"truth": str(self.truth_file), "ranks": ranks, "world_size": world}
        with mock.patch.object(flat_held, "scenario", lambda _: self.entry):
            self.found.extend(f"{path.name}: {problem}" for problem in flat_held.played(job))

    def is_sharded(self, path: Path | None, world: int, keys: str) -> None:
        """Whether the DTensors are those of FSDP2 on some of ``world`` ranks: the model's, and moments cut like it."""
        for rank in sorted(self.rng.sample(range(world), k=min(world, MAX_RANKS_COMPARED))) if path else ():
            with as_rank(rank, world):
                found = {section: rank_file(path, section, world, rank) for section in ("model", "optim")}
                wrong = differences(dict(found["model"]), self._by_fsdp2(self.truth["model"]), "model")
                states = self.truth["optimizer"]["state"]
                for moment in {name for entry in states.values() for name, leaf in entry.items() if leaf.ndim}:
                    held = self._by_fsdp2({name: entry[moment] for name, entry in states.items()})
                    for name, entry in found["optim"]["state"].items() if keys == "name" else ():
                        wrong += differences(entry[moment], held[name], f"{name} {moment}")
            self.found.extend(f"{path.name} rank {rank}: {problem}" for problem in wrong[:5])

    def _by_fsdp2(self, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        model = built(self.entry)
        model.load_state_dict(weights, strict=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ignored = {model.get_parameter(name) for name in self.entry.ignored}
        for unit in (*reversed([unit for unit in self.entry.units if unit]), ""):
            fully_shard(model.get_submodule(unit), mesh=mesh, ignored_params=ignored)
        return dict(model.state_dict())

    def run(self) -> list[str]:
        n, m = (self.group * self.rng.randint(1, 9 // self.group) for _ in range(2))
        units = self.directory / "units.json"
        with as_rank(0, n):
            model = wrap(self.entry, built(self.entry), orig=self.orig)
            save_units(model, self.entry.optimizer(model), units)
        wanted: dict[str, Any] = {"to": "flattened", "world_size": n, "key_type": "id"}
        flat = self.convert(self.truth_file, "flat", **wanted, units=units)
        if flat is not None:
            self.is_flat(flat, n)
            self.is_full(flat, "full.pt")
            entries = fsdpckpt.diff(self.truth_file, flat).entries
            self.found.extend(f"diff: {entry}" for entry in entries if entry.sigil != "=")
            problems = fsdpckpt.verify(flat).problems
            self.found.extend(f"verify: {problem}" for problem in problems if problem.fatal or problem.kind != "state")
            self._reshard(flat, n, m)
            self._shard(flat, wanted | {"units": units}, n)
            self._infer(flat)
        about = f"orig={self.orig} n={n} m={m} group={self.entry.group} {self.entry.strategy.name}"
        return [f"{about} units={self.entry.units}", *self.found] if self.found else []

    def _reshard(self, flat: Path, n: int, m: int) -> None:
        settings: dict[str, Any] = {"to": "flattened", "key_type": "id"}
        if self.group > 1:  # one group does not show how more ranks are grouped
            settings |= {"strategy": "hybrid-shard", "shard_size": self.group}
        elif self.entry.strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD):
            settings |= {"strategy": "no-shard"}  # one rank does not show it
        there = self.convert(flat, "reshard", world_size=m, **settings)
        self.is_flat(there, m)
        if there is not None:
            self.is_flat(self.convert(there, "back", world_size=n, **settings), n)

    def _infer(self, flat: Path) -> None:
        """Without a units file the units are inferred, or the conversion is refused; what is written must be right."""
        bare = shutil.copytree(flat, self.directory / "bare")
        (bare / "fsdpckpt.json").unlink()
        globs = tuple(unit for unit in self.entry.units if unit) or ("none",)
        hints: dict[str, Any] = {"reference": self.truth_file}
        names = self.directory / "names.txt"
        names.write_text("\n".join(name for name, _ in built(self.entry).named_parameters()))
        self.is_full(bare, "inferred.pt", may_refuse=True, **hints)
        self.is_full(bare, "with-unit.pt", may_refuse=True, **hints, unit=globs)
        more = {"parameters": names, "unit": globs, "use_orig_params": self.orig}
        self.is_full(bare, "with-parameters.pt", may_refuse=True, **hints, **more)
        self.is_full(bare, "parameters-alone.pt", may_refuse=True, parameters=names)

    def _shard(self, flat: Path, wanted: dict[str, Any], n: int) -> None:
        for container, keys in (("dcp", "name"), ("torch", self.rng.choice(("name", "id")))):
            ranks = self.rng.randint(1, 5)
            sharded = self.convert(flat, container, to="sharded", container=container, world_size=ranks, key_type=keys)
            if container == "torch" and "" in self.entry.units:
                self.is_sharded(sharded, ranks, keys)
            self.is_full(sharded, f"{container}.pt", **({"units": wanted["units"]} if keys == "id" else {}))
            if sharded is not None:
                self.is_flat(self.convert(sharded, f"{container}-flat", **wanted), n)


class MeshPlay(Play):
    """One seed of FSDP2 on a mesh. ``cut``: the dimension along which tensor parallelism cuts a parameter."""

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(seed, directory)
        self.entry = replace(self.entry, ignored=())
        self.trained = [name for group in self.truth["optimizer"]["param_groups"] for name in group["params"]]
        self.tp = self.rng.choice((1, 1, 2, 2, 3))
        model = built(self.entry)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        later = {name for name, _ in model.named_parameters(remove_duplicate=False)} - shapes.keys()
        self.cut = {
            name: self.rng.choice([None, *(dim for dim, size in enumerate(shape) if size % self.tp == 0)])
            for name, shape in shapes.items()
            if self.tp > 1 and not later and self.rng.random() < 0.8
        }
        self.tp = self.tp if self.cut else 1
        self.replicas = self.rng.random() < 0.5

    def mesh(self) -> MeshCase:
        """A random size of the mesh, of which tensor parallelism has the same number of ranks."""
        replicas, shards = self.rng.randint(1, 3), self.rng.randint(1, 4)
        if self.tp > 1:
            return all_three(replicas, shards, self.tp) if self.replicas else over_tp(shards, self.tp)
        return hsdp(replicas, shards) if self.replicas else MeshCase({"dp_shard": shards}, ("dp_shard",))

    def held(self, case: MeshCase) -> dict[str, Any]:
        """This rank's state dicts."""
        optimizer = self.truth["optimizer"]
        states = {name: dict(entry) for name, entry in optimizer["state"].items()}
        for moment in {name for entry in states.values() for name, leaf in entry.items() if leaf.ndim}:
            shards = self._sharded(case, {name: entry[moment] for name, entry in states.items()})
            for name, entry in states.items():
                entry[moment] = shards[name]
        optim = {"state": states, "param_groups": optimizer["param_groups"]}
        return {"model": self._sharded(case, self.truth["model"]), "optim": optim}

    def _sharded(self, case: MeshCase, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", tuple(case.shape.values()), mesh_dim_names=tuple(case.shape))
        model = built(self.entry)
        model.load_state_dict(weights, strict=False)
        for name, dim in self.cut.items():
            parent, _, own = name.rpartition(".")
            module, parameter = model.get_submodule(parent), model.get_parameter(name)
            placement = Replicate() if dim is None else Shard(dim)
            cut = distribute_tensor(parameter.detach(), mesh["tp"], [placement], src_data_rank=None)
            module.register_parameter(own, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        for unit in (*reversed([unit for unit in self.entry.units if unit]), ""):
            fully_shard(model.get_submodule(unit), mesh=mesh[case.fsdp])
        return dict(model.state_dict())

    def is_held(self, path: Path | None, case: MeshCase) -> None:
        """Whether the files are what FSDP2 holds on some ranks of the mesh."""
        world = case.world_size
        for rank in sorted(self.rng.sample(range(world), k=min(world, MAX_RANKS_COMPARED))) if path else ():
            with as_rank(rank, world):
                found = {section: rank_file(path, section, world, rank) for section in ("model", "optim")}
                wrong = differences(found, self.held(case))
            self.found.extend(f"{path.name} on {case} rank {rank}: {problem}" for problem in wrong[:5])

    def run(self) -> list[str]:
        source, other, changed = self.mesh(), self.mesh(), self.rng.randint(1, 5)
        ranks = self.directory / "ranks"
        ranks.mkdir()
        for rank in range(source.world_size):
            with as_rank(rank, source.world_size):
                for section, content in self.held(source).items():
                    name = f"{section}_world_size_{source.world_size}_rank_{rank}.pt"
                    torch.save(content, ranks / name)
        self.is_full(ranks, "full.pt")
        problems = fsdpckpt.verify(ranks).problems
        self.found.extend(f"verify: {problem}" for problem in problems if problem.fatal or problem.kind != "state")
        on = {"to": "sharded", "container": "torch"}
        resized = self.convert(ranks, "resized", **on, mesh=str(other.mesh))
        self.is_held(resized, other)
        self.is_full(resized, "resized.pt")
        self.is_held(self.convert(self.truth_file, "like", **on, like=ranks), source)
        dcp = self.convert(ranks, "dcp", to="sharded", container="dcp", world_size=changed * self.tp)
        self.is_full(dcp, "dcp.pt")
        if dcp is not None:
            self.is_held(self.convert(dcp, "from-dcp", **on, like=ranks, mesh=str(other.mesh)), other)
        rows = self.convert(ranks, "rows", **on, mesh=str(changed))
        self.is_full(rows, "rows.pt")
        if rows is not None:
            self.is_held(self.convert(rows, "from-rows", **on, like=ranks), source)
        wrapping = {"unit": ("none",), "use_orig_params": True, "key_type": "id"}
        flat = self.convert(ranks, "flat", may_refuse=True, to="flattened", world_size=changed, **wrapping)
        self.is_full(flat, "flat.pt")
        return [f"{source} to {other} and {changed} ranks, cut={self.cut}", *self.found] if self.found else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--keep", type=Path, help="keep the files of each seed in this directory")
    parser.add_argument("--meshes", action="store_true", help="FSDP2 on meshes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    count = 0
    for seed in range(arguments.first, arguments.end):
        directory = arguments.keep / str(seed) if arguments.keep else Path(tempfile.mkdtemp())
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            found = (MeshPlay if arguments.meshes else Play)(seed, directory).run()
        except Exception:  # noqa: BLE001 - any exception is a finding
            found = [traceback.format_exc()]
        count += bool(found)
        for line in found:
            print(f"seed {seed}: {line}", flush=True)
        if arguments.keep is None:
            shutil.rmtree(directory)
    print(f"{arguments.end - arguments.first} seeds, {count} with findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
