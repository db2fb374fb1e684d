"""What the optimizers of other ranks list, as far as they differ, for the units file that all ranks share.

``save_units`` makes no rank wait for another, so ranks leave what differs in the store of the process group: the first
rank that comes says which order is the usual one, and every other rank whose own differs says so. Whoever writes the
file looks again afterwards, so that the last write has what every rank said.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import _get_default_store

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.units import Groups, RankOrder, UnitParam, Units
from fsdpckpt.ir.units_json import decode, encode

_PREFIX = "fsdpckpt/units"


@dataclass(frozen=True, slots=True)
class SharedOrders:
    """The orders of the ranks that write the units file ``target`` together. ``rank``: this rank in the checkpoint."""

    store: Any
    key: str
    rank: int
    target: str

    @classmethod
    def of(cls, units: Units, groups: Sequence[Any], rank: int, target: str) -> SharedOrders | None:
        """None where the ranks have no store that can compare (MPI, or no process group).

        ``groups``: the model's process groups; ranks of other groups may have a model of the same units.
        """
        if not torch.distributed.is_initialized():
            return None
        ranks = torch.distributed.get_process_group_ranks(groups[0]) if len(groups) == 1 else None
        same = replace(units, groups=None, unmanaged=(), parameters=())
        key = f"{_PREFIX}/{_digest([encode(same), ranks, target])}"
        try:
            store = _get_default_store()
            store.compare_set(f"{key}/there", "", "1")
        except RuntimeError:  # this kind of store cannot compare
            return None
        return cls(store, key, rank, target)

    def say(self, units: Units) -> bool:
        """Leave what this rank's optimizer lists; True when a file that is written already may lack it."""
        document = json.dumps(encode(units))
        own = _digest(document)
        if not self.store.check([f"{_PREFIX}/{own}"]):
            self.store.set(f"{_PREFIX}/{own}", document)
        said = self._said()
        if said.get(self.rank, self._compare_set("first", "", own)) == own:
            return False
        while True:
            before = self._get("others")
            after = f"{before}{self.rank} {own}\n"
            if self._compare_set("others", before, after) == after:
                return True

    def units(self) -> dict[int | None, Units]:
        """The units of every rank that differs, and under None those of all others."""
        first, said = self._get("first"), self._said()
        by_digest = {one: self._units(one) for one in {first, *said.values()}}
        return {None: by_digest[first], **{rank: by_digest[one] for rank, one in said.items()}}

    def written(self, data: bytes) -> None:
        """Say that the file has been written, with this content."""
        self.store.set(f"{self.key}/written", _digest(data))

    def require_seen(self) -> bool:
        """Whether the file has been written, and this rank sees that very file.

        Raises SourceUnsupportedError when it does not: rank 0's file lacks this rank's order then.
        """
        for _ in range(20):
            written = self._get("written")
            if not written:
                return False
            try:
                with open(self.target, "rb") as file:
                    if _digest(file.read()) == written:
                        return True
            except OSError:
                pass
            time.sleep(0.1)  # another rank may be writing
        raise SourceUnsupportedError(
            f"the optimizer of rank {self.rank} lists its parameters in an order of its own, and "
            "the units file cannot record it",
            why=f"another rank wrote {self.target}, and this rank does not see that file",
            next_step="call save_units on every rank with a path on a disk that all ranks share",
            file=self.target,
        )

    def _said(self) -> dict[int, str]:
        """The last word of each rank that ever differed from the first."""
        lines = (line.split() for line in self._get("others").splitlines())
        return {int(rank): digest for rank, digest in lines}

    def _units(self, digest: str) -> Units:
        return decode(json.loads(self.store.get(f"{_PREFIX}/{digest}")), source=f"{self.target} (another rank)")

    def _get(self, name: str) -> str:
        key = f"{self.key}/{name}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def _compare_set(self, name: str, expected: str, desired: str) -> str:
        return str(self.store.compare_set(f"{self.key}/{name}", expected, desired).decode())


def _digest(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(data).hexdigest()


def with_orders(by_rank: Mapping[int | None, Units]) -> Units:
    """One ``Units`` of those that the ranks have, which differ in their optimizers and unmanaged parameters.

    None: the ranks that are not among ``by_rank``. Raises SourceUnsupportedError for optimizers that cannot be recorded
    together.
    """
    usual = by_rank[None]
    ranks = range(usual.world_size or 1)
    groups = [by_rank.get(rank, usual).groups for rank in ranks]
    every = [by_rank.get(rank, usual) for rank in ranks]
    known = [one for one in groups if one is not None]
    if len(known) < len(groups) or len({len(one) for one in known}) > 1:
        if all(one == groups[0] for one in groups):
            return every[0]
        raise SourceUnsupportedError(
            "the optimizers of the ranks have different numbers of param groups",
            found=", ".join(f"rank {rank}: {len(one or ())}" for rank, one in list(enumerate(groups))[:8]),
            why="a units file lists the parameters of each group",
            next_step="make the optimizer with the same groups on every rank",
        )
    united: Groups = tuple(
        tuple(dict.fromkeys(name for one in known for name in one[number])) for number in range(len(known[0]))
    )
    orders: dict[Groups, list[int]] = {}
    for rank, one in zip(ranks, known, strict=True):
        if one != united:
            orders.setdefault(one, []).append(rank)
    return replace(
        every[0],
        groups=united,
        unmanaged=_unmanaged(every),
        parameters=tuple(dict.fromkeys(name for one in every for name in one.parameters)),
        orders=tuple(RankOrder(tuple(listed), one) for one, listed in orders.items()),
    )


def _unmanaged(every: Sequence[Units]) -> tuple[UnitParam, ...]:
    """The parameters outside of every unit, which the models of some ranks may have alone."""
    named: dict[str, UnitParam] = {}
    for one in every:
        for param in one.unmanaged:
            if named.setdefault(param.name, param) != param:
                raise SourceUnsupportedError(
                    f"{param.name} is {list(named[param.name].shape)} on one rank and {list(param.shape)} on another",
                    why="a parameter that FSDP does not manage is the same on every rank that has it",
                    next_step="give it another name on each rank",
                )
    return tuple(named.values())
