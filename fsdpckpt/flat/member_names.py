"""Finds which parameter or flat parameter each member of a flattened checkpoint's optimizer is.

By name where the optimizer has names. Ids count what the param groups list, in their order; of several optimizers of
one model each is found by the lengths of its slices (``division``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from fsdpckpt.flat.division import Lengths, Listed, UndividedError, divide
from fsdpckpt.flat.laid_out import LaidOutUnits
from fsdpckpt.flat.slices import lengths_by_key
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer, ParamGroup, ParamKey
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.text import plural


class MemberNames:
    """``contradictions`` fills the other attributes.

    ``keys``: each optimizer key to an original name or a unit's key. ``named_groups``: the names in each param group,
    where the units did not say them. ``undivided``: why nothing says which of several optimizers holds which parameter.
    ``proved``: what was compared, for messages.
    """

    def __init__(self, checkpoint: Checkpoint, laid_out: LaidOutUnits) -> None:
        self.laid_out = laid_out
        self.units = laid_out.units
        self.beside = checkpoint.beside  # the other optimizers of the model
        self.keys: dict[ParamKey, str] = {}
        self.named_groups: tuple[tuple[str, ...], ...] | None = None
        self.undivided: str | None = None
        self.proved: list[str] = []

    def contradictions(self, optim: Optimizer) -> Iterator[str]:
        """What of ``optim`` contradicts the units."""
        if optim.key_type == "name":
            yield from self._by_name(optim)
        elif optim.groups is None:
            yield from self._ungrouped(optim)
        else:
            yield from self._by_id(optim)

    def _by_name(self, optim: Optimizer) -> Iterator[str]:
        with_flat_params = [*self.laid_out.by_key, *(param.name for param in self.units.unmanaged)]
        possible = dict.fromkeys(self.laid_out.params if self.units.use_orig_params else with_flat_params)
        listed = optim.grouped_keys()
        for key in dict.fromkeys([*optim.state, *listed]):
            if clean(str(key)) in possible:
                self.keys[key] = clean(str(key))
            elif key in listed:
                yield f"optim: the groups list {key}, which the units do not have"

    def _ungrouped(self, optim: Optimizer) -> Iterator[str]:
        order = self.units.id_order()
        self.keys.update({key: order[key] for key in optim.state if isinstance(key, int) and key < len(order)})
        yield from (
            f"optim {key}: the units have {plural(len(order), 'parameter')}"
            for key in optim.state
            if key not in self.keys
        )

    def _by_id(self, optim: Optimizer) -> Iterator[str]:
        ids = optim.in_groups()
        named = all(group.names() for group in optim.groups or ())
        known = named or self.units.of_one_optimizer or self._lists_all(optim)
        shares = self.beside and not known
        sizes = list(map(len, ids))
        names = self._share(optim) if shares else self._groups(sizes, optim.groups or ())
        if isinstance(names, str):
            yield names
            return
        for number, (listed, members) in enumerate(zip(ids, names, strict=True)):
            if self._lacks_unmanaged(listed, members):
                self.keys.update((key, self.units.id_order()[key]) for key in listed if isinstance(key, int))
                continue
            if len(listed) != len(members):
                yield f"param group {number} lists {plural(len(listed), 'parameter')}, the units have {len(members)}"
                return
            self.keys.update(zip(listed, members, strict=True))
        yield from self._compare_param_names(optim)

    def _lacks_unmanaged(self, listed: Sequence[ParamKey], members: Sequence[str]) -> bool:
        """Whether a group lists all of ``members``, by id, except unmanaged parameters that have no entry."""
        order = self.units.id_order()
        ids = [key for key in listed if isinstance(key, int) and key < len(order)]
        absent = set(members) - {order[key] for key in ids}
        return len(ids) == len(listed) < len(members) and absent <= {param.name for param in self.units.unmanaged}

    def _groups(self, lengths: Sequence[int], groups: Sequence[ParamGroup]) -> Sequence[Sequence[str]] | str:
        """The keys of each param group, or why they are not known."""
        if self.units.groups is not None:
            if len(self.units.groups) != len(lengths):
                return f"the optimizer has {len(lengths)} param groups, the units have {len(self.units.groups)}"
            return self.units.groups
        listed = [group.names() for group in groups]
        if all(listed):
            named = tuple(tuple(map(clean, names)) for names in listed)
            unknown = next((name for name in chain(*named) if name not in self.units.rows_of), None)
            if unknown is not None:  # a flat parameter that such units do not have, or the name of another model
                return f"a param group lists {unknown}, which no optimizer of these units holds"
            self.named_groups = named
            return named
        if len(lengths) > 1:
            return (
                f"the optimizer has {len(lengths)} param groups, and the units do not say which parameters are in which"
            )
        order = self.units.optimizer_keys()
        trained = tuple(key for key in order if self.laid_out.requires_grad(key))
        return [order if lengths[0] == len(order) else trained]

    def _lists_all(self, optim: Optimizer) -> bool:
        """Whether ``optim`` lists as many parameters as the model has: the others are then of other models."""
        order = self.units.optimizer_keys()
        return len(optim.grouped_keys()) in (len(order), sum(map(self.laid_out.requires_grad, order)))

    def _share(self, optim: Optimizer) -> Sequence[Sequence[str]] | str:
        """The keys of each param group of ``optim``, one of several optimizers of the model, or why they are not
        known.
        """
        every = (optim, *self.beside)
        lists = [self._listed(each) for each in every]
        recorded = [number for number, listed in enumerate(lists) if listed and self._are_recorded(listed)]
        if recorded == [0]:
            return self.units.groups or ()
        left = dict.fromkeys(self.units.optimizer_keys())
        for number, (each, listed) in enumerate(zip(every, lists, strict=True)):
            if recorded == [number]:
                named = list(chain(*(self.units.groups or ())))
            else:
                named = [] if listed else [clean(str(name)) for name in _listed_names(each)]
            for name in named:
                left.pop(name, None)
        by_id = [listed for number, listed in enumerate(lists) if recorded != [number]]
        lengths = {key: tuple(self.laid_out.lengths(key).tolist()) for key in left}
        frozen = frozenset(key for key in left if not self.laid_out.requires_grad(key))
        try:
            found = divide(lengths, list(chain(*by_id)), frozen)
        except UndividedError as error:
            self.undivided = str(error)
            return f"the units do not say which optimizer holds which parameter: {error}"
        self.named_groups = found.names[: len(lists[0])]
        how = "in the order of the model" if found.by_order else "which differ from all others"
        self.proved.append(
            f"{len(every)} optimizers share {plural(len(lengths), 'parameter')}: each was found by the lengths of its "
            f"slices, {how}"
        )
        return self.named_groups

    def _listed(self, optim: Optimizer) -> list[Listed]:
        """The lengths of what each param group of ``optim`` lists; none if it gives names."""
        if optim.key_type == "name" or all(group.names() for group in optim.groups or ()):
            return []
        rows = lengths_by_key(optim, self.laid_out.world_size)
        lengths = {key: _by_rank(rows.get(key)) for key in optim.grouped_keys()}
        return [list(map(lengths.__getitem__, keys)) for keys in optim.in_groups()]

    def _are_recorded(self, lists: Sequence[Listed]) -> bool:
        """Whether the groups of the units may be these."""
        groups = self.units.groups
        if groups is None or [len(group) for group in groups] != [len(listed) for listed in lists]:
            return False
        pairs = zip(chain(*groups), chain(*lists), strict=True)
        return all(lengths in (None, tuple(self.laid_out.lengths(key).tolist())) for key, lengths in pairs)

    def _compare_param_names(self, optim: Optimizer) -> Iterator[str]:
        names = {*self.laid_out.by_key, *self.laid_out.params}
        compared = 0
        for group, keys in zip(optim.groups or (), optim.in_groups(), strict=False):
            for key, name in zip(keys, group.names(), strict=False):
                compared += 1
                if clean(name) not in names:
                    yield f"param_names: {clean(name)} is not among the units' parameters"
                elif self.keys[key] != clean(name):
                    yield f"optim {key} is {clean(name)} in param_names, {self.keys[key]} in the units"
        if compared:
            self.proved.append(f"{compared} param_names of the groups agree with the units")


def _listed_names(optim: Optimizer) -> Sequence[ParamKey]:
    """The names that the groups of ``optim`` give, else its keys."""
    return [name for group in optim.groups or () for name in group.names()] or optim.grouped_keys()


def _by_rank(lengths: Int64Array | None) -> Lengths | None:
    return None if lengths is None else tuple(lengths.tolist())
