"""Real flattened checkpoints of every scenario at one world size: ``torchrun -m tests.oracle.flat_generate DIRECTORY``.

``DIRECTORY/<scenario>-<orig|flat>/``:

flat/         per-rank files: the optimizer's own state dict, the model's LOCAL_STATE_DICT (where FSDP can give one)
raw/          only the optimizer files
mix/          DTensor model files beside the optimizer's own state dicts and extra state, as verl saves
sharded/      DTensor model files and DTensor optimizer files by name
dcp_local/    the LOCAL_STATE_DICT through ``dcp.save``, of some scenarios and on three ranks
truth.pt      ``{"model", "optimizer"}``, full, by name, from the live model
units.json    what ``fsdpckpt.save_units`` writes, here and in flat/
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdpckpt import save_units
from tests.oracle.compare import differences, plain
from tests.oracle.flat_scenarios import Scenario, variants
from tests.oracle.flat_train import Run, full, local, trained
from tests.oracle.generate import Files
from tests.oracle.process import quiet_worker
from tests.oracle.toy import clean, sharded1

LIMIT = 170.0  # seconds for all scenarios of one world size


class Place(Files):
    """The directory of one scenario and this rank's files in it."""

    def copy(self, section: str, source: str, form: str) -> None:
        """``form`` has the same ``section`` as ``source``."""
        shutil.copyfile(self.of_rank(source, section), self.of_rank(form, section))


def ids(run: Run) -> list[str]:
    """The names of the optimizer's ids: original names, or keys of flat parameters."""
    names = {parameter: clean(name) for name, parameter in run[0].named_parameters()}
    return [names[parameter] for group in run[1].param_groups for parameter in group["params"]]


def make(place: Place, entry: Scenario, *, orig: bool) -> None:
    run = trained(entry, orig=orig)
    model, optimizer = run
    gathered = full(run)
    truth = plain(gathered)
    truth["model"] = OrderedDict(truth["model"])
    truth["model"]._metadata = gathered["model"]._metadata  # what ``Module.load_state_dict`` looks at
    states = optimizer.state_dict()
    weights = {} if entry.group is not None else {"model": local(model)}  # HYBRID_SHARD has no LOCAL form
    place.ranks("flat", optim=states, **weights)
    place.copy("optim", "flat", "raw")
    if entry.dcp and place.world == 3:
        place.dcp("dcp_local", weights)
    place.one_file("truth.pt", truth)
    save_units(*run, place.path("units.json"))
    dist.barrier()  # until every rank has added its own order
    if place.rank == 0:
        shutil.copyfile(place.path("units.json"), place.path("flat", "units.json"))
    if entry.mix and (place.world < 4 or place.world == entry.mix_world(orig=orig)):
        mix(place, entry, states, orig=orig)


def mix(place: Place, entry: Scenario, states: dict[str, Any], *, orig: bool) -> None:
    """The same training again over a device mesh, which FSDP needs to save DTensors."""
    model, optimizer = trained(entry, orig=orig, mesh=True)
    problems = differences(optimizer.state_dict(), states)
    if problems:
        raise AssertionError(f"training over a mesh gave other states: {problems[:5]}")
    weights, named = sharded1(model, optimizer)
    place.ranks("sharded", model=weights, optim=named)
    extra = {"rng": {"cpu": torch.get_rng_state()}, "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]}}
    place.copy("model", "sharded", "mix")
    place.copy("optim", "flat", "mix")
    place.ranks("mix", extra_state=extra)


def main() -> None:
    directory, *wanted = sys.argv[1:]
    quiet_worker(limit=LIMIT)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    for entry, orig in variants(dist.get_world_size()):
        name = f"{entry.name}-{'orig' if orig else 'flat'}"
        if wanted and name not in wanted:
            continue
        try:
            make(Place(os.path.join(directory, name)), entry, orig=orig)
        except Exception:  # noqa: BLE001 - said again with the scenario's name
            raise AssertionError(f"{name}:\n{traceback.format_exc()}") from None
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
