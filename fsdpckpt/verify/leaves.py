"""Gives every leaf of a checkpoint an address, and finds the addresses of one side that are those of the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.ir.optimizer import Optimizer, OwnValue, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, leaf_tensors, walk
from fsdpckpt.producers.recognition import flavor_named

Path: TypeAlias = tuple[Key, ...]


class Address(NamedTuple):
    """Where a leaf is. ``rank``: for the extras of one rank. ``place``: how many keys of ``path`` lead to the named
    section that it is in.
    """

    section: Section
    path: Path
    rank: int | None = None
    place: int = 0

    @property
    def inner(self) -> Path:
        """The keys within the section."""
        return self.path[self.place :]

    def below(self, place: Path) -> Address:
        """That of the same leaf in the named section at ``place``."""
        return self._replace(path=(*place, *self.path), place=len(place))


Leaves: TypeAlias = dict[Address, Value]


def leaves_of(
    checkpoint: Checkpoint,
    renamed: Mapping[ParamKey, ParamKey],
    positions: Mapping[ParamKey, int],
    flavors: Iterable[str] = (),
) -> Leaves:
    """Every leaf by its address.

    ``renamed``: optimizer keys to replace. ``positions``: how to sort the keys that a param group lists. ``flavors``:
    those of both sides, which say what the files of ranks are called.
    """
    leaves: Leaves = {}
    if checkpoint.model is not None:
        for name, leaf in checkpoint.model.params.items():
            if isinstance(leaf, (dict, list, tuple)) and any(True for _ in leaf_tensors(leaf)):
                leaves.update((Address(Section.MODEL, (name, *path)), inner) for path, inner in _walk(leaf))
            else:
                leaves[Address(Section.MODEL, (name,))] = leaf
    if checkpoint.optim is not None:
        for path, value in _optimizer_leaves(checkpoint.optim, renamed, positions):
            leaves[Address(Section.OPTIM, path)] = value
    common = _names_of_rank_files(checkpoint, flavors)
    for path, value in _walk(checkpoint.extra):
        leaves[Address(Section.EXTRA, (common.get(path[0], path[0]), *path[1:]))] = value
    for rank, extra in enumerate(checkpoint.rank_extra):
        for path, value in _walk(extra):
            leaves[Address(Section.EXTRA, path, rank)] = value
    return leaves


def _names_of_rank_files(checkpoint: Checkpoint, flavors: Iterable[str]) -> dict[Key, Key]:
    """The name that the files of all ranks have in common, by that of the only one in a run of one rank: this is
    ``random_states`` for ``random_states_0``.
    """
    names: dict[Key, Key] = {}
    known = [flavor for name in flavors if (flavor := flavor_named(name)) is not None]
    for kind in (kind for flavor in known for kind in flavor.rank_files):
        only = kind.name.format(rank=0).rpartition(".")[0]
        name = kind.name.partition("{rank}")[0].rstrip("_-")
        if only in checkpoint.extra and name not in checkpoint.extra:
            names[only] = name
    return names


def _walk(value: Value) -> Iterator[tuple[Path, Value]]:
    """The leaves of ``value``; none if it is empty itself."""
    if value:
        yield from walk(value)


def _optimizer_leaves(
    optim: Optimizer, renamed: Mapping[ParamKey, ParamKey], positions: Mapping[ParamKey, int]
) -> Iterator[tuple[Path, Value]]:
    """The leaves of ``optim`` by their paths in its state dict."""
    for param, entry in optim.items():
        name = renamed.get(param, param)
        if isinstance(entry, OwnValue):
            yield from walk(entry.value, ("state", name))
        elif not entry:
            yield ("state", name), {}
        else:
            for state, value in entry.items():  # an optimizer may nest values in a state
                yield from walk(value, ("state", name, state))
    for index, group in enumerate(optim.param_groups or []):
        for key, value in group.items():
            if key == "params" and isinstance(value, (list, tuple)):
                params = [renamed.get(item, item) if isinstance(item, (int, str)) else item for item in value]
                if positions:
                    params.sort(key=lambda item: positions.get(item, 0) if isinstance(item, (int, str)) else 0)
                exact = isinstance(value, tuple) and not positions  # a list and a tuple are two things
                yield ("param_groups", index, key), tuple(params) if exact else params
            elif _has_dict_or_tensor(value):  # DCP stores these separately, and keys of dicts become text there
                yield from walk(value, ("param_groups", index, key))
            else:  # a tuple of betas is easiest to read whole
                yield ("param_groups", index, key), value
    yield from _walk(optim.extra)


def _has_dict_or_tensor(value: Value) -> bool:
    return isinstance(value, (dict, Tensor)) or (
        isinstance(value, (list, tuple)) and any(map(_has_dict_or_tensor, value))
    )


def dotted(address: Address) -> str:
    """The key, as users see it."""
    path, rank = address.path, address.rank
    if address.section is Section.OPTIM and not address.place and path[0] == "state":
        path = path[1:]
    return ".".join(map(str, path if rank is None else (f"rank{rank}", *path)))


def match_addresses(leaves_a: Leaves, leaves_b: Leaves) -> dict[Address, Address]:
    """B's address for each of A's that B has too.

    Some containers store keys as text, or a path as one key. So addresses that only one side has match if their dotted
    keys are equal.
    """
    matched = {address: address for address in leaves_a if address in leaves_b}
    only_in_b: dict[tuple[Section, str, int | None], list[Address]] = {}
    for address in leaves_b:
        if address not in matched:
            only_in_b.setdefault((address.section, dotted(address), address.rank), []).append(address)
    for address in leaves_a:
        candidates = only_in_b.get((address.section, dotted(address), address.rank))
        if candidates and address not in matched:
            matched[address] = candidates.pop(0)
    return matched


def parameter_of(address: Address, known: Mapping[ParamKey, str]) -> tuple[str | None, str | None]:
    """The parameter or buffer that an address is about, and the state of it; None for what is about none.

    ``known``: the names of ids.
    """
    if address.section is Section.MODEL:
        return ".".join(map(str, address.path)), None
    inner = address.inner
    if address.section is Section.EXTRA or len(inner) < 2 or inner[0] != "state":
        return None, None
    key, states = inner[1], inner[2:]
    name = known.get(key, str(key)) if not address.place and isinstance(key, (int, str)) else str(key)
    return name, ".".join(map(str, states)) or None


def setting_of(address: Address) -> str | None:
    """The setting of a param group that an address is about, such as ``lr``; None for what is about none."""
    inner = address.inner
    in_groups = address.section is Section.OPTIM and len(inner) == 3 and inner[0] == "param_groups"
    return str(inner[2]) if in_groups else None
