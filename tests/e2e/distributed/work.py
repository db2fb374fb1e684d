"""One of several workers that run a list of conversions in one process group: ``python -m ... CASES``.

CASES is a JSON file: ``{"disks": [{path: directory}, ...], "cases": [{"source", "target", "options"}, ...]}``, disks
by rank. With ``"reports": path``, rank 0 writes there what each conversion reported. With ``"nodes": true`` each
worker is a node of its own, and keeps the files of the ranks that it will load. With ``"planes": directory``, each rank
writes there what went over its data plane and its control plane, which are two as they are with NCCL.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.e2e.distributed.disks import bind, own_namespace


def record_planes(group: Any) -> dict[str, list[tuple[str, int]]]:
    """The step and the bytes of every message of both planes, filled while ``group`` works."""
    from fsdpckpt.comm.transport import Transport

    messages: dict[str, list[tuple[str, int]]] = {"data": [], "control": []}

    class Recording(Transport):
        plane = ""

        def send_recv(self, *, sends: Any = (), receives: Any = ()) -> Any:
            for tensor, _ in (*sends, *receives):
                messages[self.plane].append((" / ".join(group._steps), tensor.nbytes))
            return super().send_recv(sends=sends, receives=receives)

        def broadcast(self, tensor: Any, source: int) -> Any:
            messages[self.plane].append((" / ".join(group._steps), tensor.nbytes))
            return super().broadcast(tensor, source)

        def all_counts(self, counts: Any) -> Any:
            messages[self.plane].append((" / ".join(group._steps), 8 * len(counts)))
            return super().all_counts(counts)

    made = group.transport
    for plane in messages:
        recording = Recording(made._group, made.monitor, made.device)
        recording.plane = plane
        setattr(group, {"data": "transport", "control": "control"}[plane], recording)
    return messages


def main(path: str) -> None:
    with open(path) as file:
        plan = json.load(file)
    rank = int(os.environ["RANK"])
    if plan["disks"]:
        own_namespace()
        bind(plan["disks"][rank])
    apart = plan.get("nodes", False)
    if apart:
        os.environ["GROUP_RANK"] = str(rank)

    from fsdpckpt.comm.torch_group import TorchGroup
    from fsdpckpt.converters.pipeline import convert
    from fsdpckpt.options import ConvertOptions, OutputScope
    from fsdpckpt.progress import NoProgress
    from tests.oracle.process import quiet_worker

    quiet_worker(limit=plan.get("limit", 240))
    reports = []
    with TorchGroup.start(device="cpu", limit=30) as group:
        planes = record_planes(group) if "planes" in plan else None
        for case in plan["cases"]:
            report = convert(
                group,
                case["source"],
                case["target"],
                ConvertOptions(**case["options"]),
                NoProgress(),
                scope=OutputScope.NODE if apart else OutputScope.SHARED,
                workers_here=group.world_size,
            )
            reports.append(report.to_json())
    if planes is not None:
        with open(os.path.join(plan["planes"], f"{rank}.json"), "w") as file:
            json.dump(planes, file)
    if rank == 0 and "reports" in plan:
        with open(plan["reports"], "w") as file:
            json.dump(reports, file)


if __name__ == "__main__":
    main(sys.argv[1])
