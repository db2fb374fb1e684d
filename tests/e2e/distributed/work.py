"""One of several workers that run a list of conversions in one process group: ``python -m ... CASES``.

CASES is a JSON file: ``{"disks": [{path: directory}, ...], "cases": [{"source", "target", "options"}, ...]}``, disks
by rank. With ``"reports": path``, rank 0 writes there what each conversion reported. With ``"nodes": true`` each
worker is a node of its own, and keeps the files of the ranks that it will load.
"""

from __future__ import annotations

import json
import os
import sys

from tests.e2e.distributed.disks import bind, own_namespace


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
    from fsdpckpt.options import ConvertOptions, Visibility
    from fsdpckpt.progress import NoProgress
    from tests.oracle.process import quiet_worker

    quiet_worker(limit=plan.get("limit", 240))
    reports = []
    with TorchGroup.start(device="cpu", limit=30) as group:
        for case in plan["cases"]:
            report = convert(
                group,
                case["source"],
                case["target"],
                ConvertOptions(**case["options"]),
                NoProgress(),
                visibility=Visibility.NODE if apart else Visibility.SHARED,
                workers_here=group.world_size,
            )
            reports.append(report.to_json())
    if rank == 0 and "reports" in plan:
        with open(plan["reports"], "w") as file:
            json.dump(reports, file)


if __name__ == "__main__":
    main(sys.argv[1])
