"""One of several workers that run a list of conversions in one process group: ``python -m ... CASES``.

CASES is a JSON file: ``{"disks": [{path: directory}, ...], "cases": [{"source", "target", "options"}, ...]}``, disks
by rank.
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

    from fsdpckpt.comm.group import Group
    from fsdpckpt.converters.distributed import convert_together
    from fsdpckpt.converters.options import Visibility
    from fsdpckpt.converters.options_json import convert_options
    from fsdpckpt.progress import NoProgress
    from tests.oracle.process import quiet_worker

    quiet_worker(limit=plan.get("limit", 240))
    with Group.start(device="cpu", limit=30) as group:
        for case in plan["cases"]:
            convert_together(
                group,
                case["source"],
                case["target"],
                convert_options(case["options"]),
                NoProgress(),
                visibility=Visibility.SHARED,
                workers_here=group.world_size,
            )


if __name__ == "__main__":
    main(sys.argv[1])
