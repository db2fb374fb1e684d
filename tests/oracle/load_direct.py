"""Fill real FSDP models by ``dcp.load`` through ``fsdpckpt.StorageReader`` and compare what every rank then holds.

``torchrun -m tests.oracle.load_direct JOBS RESULTS``: JOBS is a JSON list of ``{"id", "form", "path", "truth", "wrap",
"options"}``, RESULTS becomes ``{id: [what is wrong, on which rank]}``. As in ``tests.oracle.load``, a model with other
weights is filled and compared bit for bit, now and after one more step, with one that PyTorch gave the truth.

form        the state dict that is filled
sharded     what FSDP1's SHARDED_STATE_DICT, or FSDP2's get_state_dict, gives on this rank
full        the same, full: plain tensors on every rank
flattened   FSDP2's, with flatten_optimizer_state_dict
ids         FSDP2's model.state_dict() and optimizer.state_dict()
app         one Stateful that holds both, as PyTorch's own tutorials do
flat        FSDP1's SHARDED_STATE_DICT of the scenario that ``wrap`` names (``tests.oracle.flat_scenarios``)
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from fsdpckpt import StorageReader
from tests.oracle.compare import differences, plain
from tests.oracle.flat_scenarios import scenario
from tests.oracle.flat_train import full, started
from tests.oracle.flat_train import step as train
from tests.oracle.jobs import by_rank, play_jobs
from tests.oracle.load import (
    Loaded,
    content_of,
    fill,
    held_now_and_after_a_step,
    initialised,
    put,
    read_truth,
    with_truth,
)
from tests.oracle.process import quiet_worker


class App(Stateful):
    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.loaded)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        set_state_dict(*self.loaded, model_state_dict=content["model"], optim_state_dict=content["optim"])


def load(form: str, wrap: str, reader: StorageReader) -> Loaded:
    loaded = initialised(wrap)
    if form == "app":
        fill({"app": App(loaded)}, storage_reader=reader)
        return loaded
    fill(content := content_of(loaded, wrap, form), storage_reader=reader)
    put(loaded, wrap, form, content)
    return loaded


def full_now_and_after_a_step(run: Loaded) -> tuple[dict[str, Any], dict[str, Any]]:
    before = plain(full(run))
    train(run, number=77)
    return before, plain(full(run))


def check_flat(job: dict[str, Any]) -> list[str]:
    """The scenario's model filled from flat shards, against the same model with the truth that PyTorch gathered."""
    name, _, kind = job["wrap"].rpartition("-")
    entry, orig = scenario(name), kind == "orig"
    run, reference = (started(entry, orig=orig, seed=seed) for seed in (8, 9))
    for pair in (run, reference):
        train(pair, number=5)
    fill(content := content_of(run, "f1", "sharded"), storage_reader=StorageReader(job["path"], **job["options"]))
    put(run, "f1", "sharded", content)
    truth = read_truth(job["truth"])
    put(reference, "f1", "full", copy.deepcopy(truth))
    found_before, found_after = full_now_and_after_a_step(run)
    before, after = full_now_and_after_a_step(reference)
    return [
        *differences(found_before["model"], plain(truth["model"]), "loaded model: "),
        *differences(found_before["optimizer"]["state"], plain(truth["optimizer"]["state"]), "loaded states: "),
        *differences(found_before, before, "loaded: "),
        *differences(found_after, after, "one step after loading: "),
    ]


def check(job: dict[str, Any]) -> list[str]:
    if job["form"] == "flat":
        return check_flat(job)
    before, after = with_truth(job["truth"], job["wrap"])
    reader = StorageReader(job["path"], **job["options"])
    found_before, found_after = held_now_and_after_a_step(load(job["form"], job["wrap"], reader))
    return [
        *differences(found_before, before, "loaded: "),
        *differences(found_after, after, "one step after loading: "),
    ]


def main() -> None:
    quiet_worker(limit=240)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    play_jobs(*sys.argv[1:], check, by_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
