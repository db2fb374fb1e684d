"""Where workers write: one staging directory that all or some of them see, or one on each node.

A *place* is one staging directory, made and committed by its *leader*. Workers that do not see it write nothing: what
they see of the source they send to those that do.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.replaceable import require_replaceable
from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import UsageError
from fsdpckpt.execute.journal import Finished
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.options import Visibility
from fsdpckpt.plan.partition import Segment, cut, target_node
from fsdpckpt.plan.plan import Plan
from fsdpckpt.storage.staging import Staging

__all__ = ["Places", "lead", "node_label", "share_out"]

_RANK_FILE = re.compile(r"(?:.*_rank_?(\d+)\.(?:pt|bin)|(?:.*/)?__(\d+)_\d+\.distcp)")
_SIGN = "sign"


@dataclass(frozen=True, slots=True)
class Places:
    """``place[worker]``: whose output it writes, None for one that writes none. ``leaders[place]``.

    ``paths[place]``: where its target files go, and the path of a target that is one file. ``nodes[worker]``.
    ``there[place]``: DST itself is there already, and to be compared with what would be written.
    """

    nodes: tuple[int, ...]
    leaders: tuple[int, ...]
    place: tuple[int | None, ...]
    paths: tuple[tuple[str, str], ...]
    there: tuple[bool, ...]

    @property
    def roots(self) -> tuple[str, ...]:
        """``roots[place]``: the staging directory, where the journals are."""
        return tuple(os.path.dirname(directory) for directory, _ in self.paths)

    def workers(self, place: int) -> list[int]:
        return [worker for worker, own in enumerate(self.place) if own == place]

    def locate(self, rank: int, path: str) -> str:
        """Where worker ``rank`` finds the target file ``path`` ("" is the one of a target that is a file)."""
        place = self.place[rank]
        directory, file = self.paths[0 if place is None else place]
        return os.path.join(directory, path) if path else file


def node_label(environment: Mapping[str, str] | None = None) -> str:
    """Which node this worker runs on, as torchrun or srun counts them; empty when neither says."""
    variables = os.environ if environment is None else environment
    return variables.get("GROUP_RANK") or variables.get("SLURM_NODEID") or ""


def lead(
    group: Group,
    target: str,
    visibility: Visibility,
    staging: list[Staging],
    *,
    directory: bool,
    overwrite: bool,
    resume: bool,
) -> Places:
    """Make the staging directories, and find out who sees which. All ranks. A leader's own is added to ``staging``.

    ``resume``: one that an interrupted run left with a journal stays as it is, and where DST is there none is made.
    ``directory``: whether the target is one. Raises UsageError when a node's workers do not see their leader's.
    """
    labels = [str(label) for label in group.all_gather_objects(node_label(), name="nodes")]
    order = list(dict.fromkeys(labels))
    nodes = tuple(order.index(label) for label in labels)
    by_place = nodes if visibility is Visibility.NODE else (0,) * group.world_size
    leaders = tuple(by_place.index(place) for place in range(max(by_place) + 1))
    told = ("", "", "")
    there = False
    with group.step("make staging"):
        if group.rank in leaders:
            real = os.path.realpath(target)
            there = resume and not overwrite and os.path.lexists(real)
            if there:
                told = (real, real, _state(real))
            else:
                if overwrite:
                    require_replaceable(target)
                staging.append(Staging(target, directory=directory, overwrite=overwrite, resume=resume))
                told = (staging[0].path, staging[0].locate(""), uuid.uuid4().hex)
                with open(os.path.join(staging[0].root, _SIGN), "w", encoding="utf-8") as file:
                    file.write(told[2])
    existing = cast("list[bool]", group.all_gather_objects(there, name="where DST is there"))
    found = cast("list[tuple[str, str, str]]", group.all_gather_objects(told, name="staging"))
    own = found[leaders[by_place[group.rank]]]
    sees = cast(
        "list[bool]",
        group.all_gather_objects(_sees(own, there=existing[leaders[by_place[group.rank]]]), name="who sees staging"),
    )
    with group.step("staging is seen"):
        if staging:
            os.unlink(os.path.join(staging[0].root, _SIGN))
        blind = [worker for worker, seen in enumerate(sees) if not seen]
        if blind and visibility is Visibility.NODE and group.rank == 0:
            raise UsageError(
                f"workers of one node do not see the same {target}",
                details=[f"worker {worker} does not see that of worker {leaders[nodes[worker]]}" for worker in blind],
                next_step="give a DST on a disk that all workers of a node share",
            )
    place = tuple(place if seen else None for place, seen in zip(by_place, sees, strict=True))
    paths = tuple((found[leader][0], found[leader][1]) for leader in leaders)
    return Places(nodes, leaders, place, paths, tuple(existing[leader] for leader in leaders))


def _state(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _sees(told: tuple[str, str, str], *, there: bool) -> bool:
    try:
        if there:
            return _state(told[0]) == told[2]
        with open(os.path.join(os.path.dirname(told[0]), _SIGN), encoding="utf-8") as file:
            return file.read() == told[2]
    except OSError:
        return False


def share_out(
    plan: Plan, spec: TargetSpec, places: Places, found: Mapping[int, Finished] | None = None
) -> list[Segment]:
    """Who writes which bytes of which file, at which place. ``found``: by place what an interrupted run has written.

    With one place all goes there. With one a node, the files of target rank r go to the node of worker
    ``r * workers // ranks``, which will load them; files of no rank (metadata) to every node that has files of some;
    and a full checkpoint, which nobody loads by ranks, to the first node.
    """
    files: dict[int, list[int]] = {place: [] for place in range(len(places.leaders))}
    ranks = [_rank_of(file.path) for file in plan.files]
    world_size = spec.world_size or max((rank + 1 for rank in ranks if rank is not None), default=1)
    nodes = dict(enumerate(places.nodes))
    for number, rank in enumerate(ranks):
        if rank is not None and len(files) > 1 and spec.layout is not Layout.FULL:
            files[target_node(rank, world_size, nodes)].append(number)
    common = [
        number for number, rank in enumerate(ranks) if rank is None or spec.layout is Layout.FULL or len(files) == 1
    ]
    for place, own in files.items():
        if own or place == 0:
            own[:] = sorted({*own, *common})
    done = {place: finished.claims() for place, finished in (found or {}).items()}
    return [
        segment
        for place, own in files.items()
        for segment in cut(plan, own, places.workers(place), place=place, done=done.get(place))
    ]


def _rank_of(path: str) -> int | None:
    found = _RANK_FILE.fullmatch(path)
    return int(found[1] or found[2]) if found else None
