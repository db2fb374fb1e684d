"""Compare flattened files with what real FSDP1 holds on that rank of that world, and holds after loading them.

``python -m tests.oracle.flat_held JOBS RESULTS`` plays single ranks of any world on PyTorch's "fake" process group;
``torchrun -m tests.oracle.flat_held JOBS RESULTS live`` runs a real world on Gloo. JOBS is a JSON list of ``{"id",
"scenario", "orig", "group", "path", "truth", "ranks", "keys", "world_size"}``, RESULTS becomes ``{id: [problems]}``.

On each rank the scenario's model gets the truth's weights and is wrapped. The model file must be its LOCAL_STATE_DICT,
the optimizer file what ``FSDP.optim_state_dict_to_load`` and ``shard_full_optim_state_dict`` make of the full truth.
Live, both files are also loaded, PyTorch's own way, into a model with other weights, and one more step must lead
to the same full state as the one from the truth.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.oracle.compare import differences, plain
from tests.oracle.fake_group import as_rank
from tests.oracle.flat_generate import ids
from tests.oracle.flat_scenarios import Scenario, scenario
from tests.oracle.flat_train import Run, built, full, local, started, step, wrap
from tests.oracle.jobs import by_rank
from tests.oracle.process import quiet_worker
from tests.oracle.toy import as_fsdp1, clean, sharding_groups

State = dict[str, Any]
Job = dict[str, Any]
LIMIT = 170.0  # seconds for all jobs of one process


def wrapped_as(job: Job) -> Scenario:
    """The scenario of ``job``, in the sharding groups that the job has."""
    return replace(scenario(job["scenario"]), group=job["group"])


def with_weights(entry: Scenario, weights: State, *, orig: bool) -> nn.Module:
    """The wrapped model with these weights: loaded before FSDP sees the model, which takes no communication."""
    model = built(entry, seed=8)
    model.load_state_dict(weights)
    return wrap(entry, model, orig=orig)


def alone(shards: list[Shard], *size: Any, **_: Any) -> State:
    """Stands for a ShardedTensor with what one rank knows of it: making a real one takes the other ranks."""
    return {"size": tuple(size), "shards": [(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in shards]}


def weights_held(model: nn.Module) -> State:
    """This rank's LOCAL_STATE_DICT with ``alone`` for every ShardedTensor."""
    with mock.patch("torch.distributed.fsdp._state_dict_utils.init_from_local_shards", alone):
        return local(model)


def weights_found(content: State) -> State:
    return {
        key: alone(value.local_shards(), *value.size()) if isinstance(value, ShardedTensor) else value
        for key, value in content.items()
    }


def states_held(entry: Scenario, truth: State, run: Run, *, orig: bool) -> State:
    """What this rank's ``optimizer.load_state_dict`` takes, by id."""
    model, optimizer = run
    if entry.name == "channels_last":
        return moments_held(entry, truth, run, orig=orig)
    # FSDP takes states apart in place.
    given = copy.deepcopy(truth["optimizer"])
    with as_fsdp1(model, "full"):
        states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, given)
    if dist.get_backend() == "fake" and dist.get_rank():
        return states  # one rank of a played world shows that PyTorch agrees with itself
    given = copy.deepcopy(truth["optimizer"])
    legacy = FullyShardedDataParallel.shard_full_optim_state_dict(given, model, optim=optimizer)
    problems = differences(states, legacy)
    if problems:
        raise AssertionError(f"PyTorch's two ways to shard do not agree: {problems[:5]}")
    return states


def moments_held(entry: Scenario, truth: State, run: Run, *, orig: bool) -> State:
    """The optimizer's states as FSDP lays out parameters with the values of the states.

    PyTorch flattens the state of a channels_last parameter in row-major order (``_shard_orig_param_state``,
    ``_flatten_tensor_optim_state``), beside a parameter in memory order: what it loads is not what it saved.
    """
    given = truth["optimizer"]
    numbers = {name: number for number, name in enumerate(ids(run))}
    found: State = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        weights = {**truth["model"], **{name: entry_[moment] for name, entry_ in given["state"].items()}}
        model = with_weights(entry, weights, orig=orig)
        for name, parameter in model.named_parameters():
            if parameter.numel():
                found.setdefault(numbers[clean(name)], {})[moment] = parameter.detach().clone()
    step_of = next(iter(given["state"].values()))["step"]
    for states in found.values():
        states["step"] = step_of
    return {"state": found, "param_groups": [{**given["param_groups"][0], "params": sorted(numbers.values())}]}


def by_name(content: State, names: list[str]) -> State:
    def name(key: Any) -> Any:
        return names[key] if isinstance(key, int) else clean(key)

    groups = [{**group, "params": sorted(map(name, group["params"]))} for group in content["param_groups"]]
    return {"state": {name(key): states for key, states in content["state"].items()}, "param_groups": groups}


def read(job: Job, section: str, rank: int) -> State:
    path = os.path.join(job["path"], f"{section}_world_size_{job['world_size']}_rank_{rank}.pt")
    group = sharding_groups(job["group"])[0] if job["group"] is not None else dist.group.WORLD
    with load_with_process_group(group):
        # ShardedTensor is on no allow-list of torch.load.
        return torch.load(path, weights_only=False)


def check_files(job: Job, rank: int, run: Run, states: State, *, live: bool) -> Iterator[str]:
    model, found = run[0], read(job, "model", rank)
    if live and job["group"] is None:
        yield from differences(found, local(model), "model: ")
    else:
        yield from differences(weights_found(found), weights_held(model), "model: ")
    contents = read(job, "optim", rank), states
    if job["keys"] == "name":
        contents = by_name(contents[0], ids(run)), by_name(states, ids(run))
    yield from differences(*contents, "optim: ")


def check_load(job: Job, rank: int, reference: Run, states: State) -> Iterator[str]:
    """Load the files with PyTorch's own calls; step; compare with the run that has the truth."""
    orig = job["orig"]
    reference[1].load_state_dict(states)
    model, optimizer = loaded = started(wrapped_as(job), orig=orig, seed=8)
    with as_fsdp1(model, "local"):
        # With original parameters FSDP registers no flat parameter that would take its entry; each slice has its own.
        keys = model.load_state_dict(read(job, "model", rank), strict=not orig)
    yield from (f"not loaded: {key}" for key in keys.missing_keys)
    yield from (f"not loaded: {key}" for key in keys.unexpected_keys if not key.endswith("_flat_param"))
    optimizer.load_state_dict(read(job, "optim", rank))
    for run in (reference, loaded):
        for held in run[1].state.values():
            if "step" in held:  # one object for all parameters of a unit, in what PyTorch makes of a full state dict
                held["step"] = held["step"].clone()
    yield from differences(plain(full(loaded)), plain(full(reference)), "loaded: ")
    for run in (reference, loaded):
        step(run, number=77)
    yield from differences(plain(full(loaded)), plain(full(reference)), "one step after loading: ")


@functools.lru_cache(maxsize=4)
def truth_in(path: str) -> State:
    """A full checkpoint, read once for all ranks that one process plays: reading takes longer than comparing."""
    return torch.load(path, weights_only=True)


def check(job: Job, rank: int, *, live: bool) -> Iterator[str]:
    truth = truth_in(job["truth"])
    try:
        entry, orig = wrapped_as(job), job["orig"]
        model = with_weights(entry, truth["model"], orig=orig)
        run = model, entry.optimizer(model)
        states = states_held(entry, truth, run, orig=orig)
        yield from check_files(job, rank, run, states, live=live)
        if live and job.get("load", False):
            yield from check_load(job, rank, run, states)
    except Exception:  # noqa: BLE001 - reported as what is wrong with this rank
        yield traceback.format_exc()


def played(job: Job) -> Iterator[str]:
    for rank in job["ranks"]:
        with as_rank(rank, job["world_size"]):
            yield from (f"rank {rank}: {problem}" for problem in list(check(job, rank, live=False))[:20])


def main() -> None:
    jobs_file, results_file, *live = sys.argv[1:]
    quiet_worker(limit=LIMIT)
    with open(jobs_file) as file:
        jobs = json.load(file)
    if live:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    results: dict[str, list[str]] = {}
    for job in jobs:
        results[job["id"]] = by_rank(list(check(job, dist.get_rank(), live=True))) if live else list(played(job))
        if not live or dist.get_rank() == 0:  # after every job, so that a hang later still tells how far it came
            with open(results_file, "w") as file:
                json.dump(results, file)
    if live:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads do not always outlive the groups of the last model: "terminate called" on 4 ranks


if __name__ == "__main__":
    main()
