"""Writes FSDP1's flattened checkpoints: ``{model,optim,extra_state}_world_size_{N}_rank_{r}.pt``, one of each for every
rank.

On rank r the model file holds what ``LOCAL_STATE_DICT`` returns there, the optimizer file the dict that
``optimizer.load_state_dict`` takes there: what ``FSDP.optim_state_dict_to_load`` returns. With HYBRID_SHARD rank r
holds shard r % ``shard_size``, and its flat parameters state the shards of r's own group; PyTorch itself cannot save a
``LOCAL_STATE_DICT`` outside the first group, and this is the same form there. Named sections are in the file of the
extras, at their places: those with units as such dicts, others whole.
"""

from __future__ import annotations

import posixpath
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fsdpckpt.errors import InternalError
from fsdpckpt.flat.flatten.keys import flat_keys, wrapped_metadata
from fsdpckpt.flat.flatten.pickle import FlatParameter, FlatPickle, FlatShard, FlatView, in_memory_order
from fsdpckpt.flat.flatten.states import FlatOptimizer
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, ModelState, NamedSection, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.sections import alone, state_dict_of
from fsdpckpt.ir.targets import Target, TargetData, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units, first_misplaced, state_dict_order
from fsdpckpt.layouts.flattened import PlacedUnit, place_units
from fsdpckpt.writers import WriteSpec
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank
from fsdpckpt.writers.torch_ranks import require_memory


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """``spec.world_size`` files for each section of ``checkpoint`` (whole tensors, optimizers keyed by name).

    ``spec.units``, and those of named sections, describe the target, and match the checkpoint
    (``flat.units.request.contradictions``). Raises SourceUnsupportedError for what no flat parameter can hold,
    NeedsInformationError for missing optimizer states.
    """
    world_size = spec.ranks()
    casts, notes = spec.dtypes.casts(checkpoint)
    ranks = range(world_size)
    files: list[TargetFile] = []
    data = TargetData()

    def file_of(rank: int, section: Section, value: Any) -> TargetFile:
        file = TargetFile(spec.section_paths[section].file.format(rank=rank, world_size=world_size), data)
        writer = FlatPickle(rank=rank, world_size=world_size, casts=casts)
        writer.value(value)
        writer.write(file, stem=posixpath.splitext(posixpath.basename(file.path))[0])
        if not rank:
            require_memory(len(file.blob), world_size)
        return file

    def sections_of(view: Checkpoint, units: Units | None, keys: KeyType) -> Iterator[tuple[Section, _FlatSection]]:
        """The model and the optimizer of ``view`` as every rank gets them."""
        if units is None:
            raise InternalError("flat parameters without units that describe them")
        placed = place_units(units, world_size)
        if view.model is not None:
            yield Section.MODEL, FlatModel(view.model, units=units, placed=placed, casts=casts)
        if view.optim is not None:
            optim = FlatOptimizer(view, view.optim, units, placed, keys=flat_keys(view, units, keys), casts=casts)
            notes.extend(optim.notes())
            yield Section.OPTIM, optim

    if checkpoint.model is not None or checkpoint.optim is not None:
        for section, content in sections_of(checkpoint, spec.units, spec.key_type):
            files += [file_of(rank, section, content.value(rank)) for rank in ranks]
    flat: dict[NamedSection, _FlatSection] = {}
    for named in checkpoint.named:
        if named.units is not None:
            of_named = dict(sections_of(alone(checkpoint, named), named.units, named.written_keys or "id"))
            flat[named] = of_named[named.section]

    def of_rank(rank: int, named: NamedSection) -> Any:
        return flat[named].value(rank) if named in flat else state_dict_of(named)

    extras = [extras_of_rank(checkpoint, rank, partial(of_rank, rank)) for rank in ranks]
    if any(extras):
        files += [file_of(rank, Section.EXTRA, extra) for rank, extra in enumerate(extras)]
        notes += extra_notes(checkpoint, world_size)
    return Target(files, notes=notes)


class _FlatSection(Protocol):
    """A section in flat parameters; ``value`` returns the state dict of one rank."""

    def value(self, rank: int) -> Any: ...


class FlatModel:
    """The parts of the model's state dict that are the same on all ranks; ``value`` returns one rank's state dict."""

    def __init__(
        self, model: ModelState, *, units: Units, placed: Sequence[PlacedUnit], casts: Mapping[Tensor, DType]
    ) -> None:
        self._units = units
        self._metadata = wrapped_metadata(model.metadata, units)
        self._casts = casts
        self._first = dict(units.shared)
        self._params = units.params()
        self._leaves = model.params
        self._cut = [unit for unit in placed if unit.sharded]
        self._tensors = {unit.unit.key: self._unit_tensors(unit) for unit in self._cut}
        self._keys = self._ordered()

    def value(self, rank: int) -> OrderedDict[str, Any]:
        """The state dict of ``rank``."""
        flat_values: dict[str, Any] = {}
        for placed in self._cut:
            flat_values.update(self._of_unit(placed, rank))
        state_dict: OrderedDict[str, Any] = OrderedDict()
        for key in self._keys:
            cut = flat_values.get(self._first.get(key, key))
            param = self._params.get(self._first.get(key, key))
            state_dict[key] = in_memory_order(param, self._leaves[key], self._casts) if cut is None else cut
        if self._metadata is not None:
            vars(state_dict)["_metadata"] = self._metadata
        return state_dict

    def _of_unit(self, placed: PlacedUnit, rank: int) -> dict[str, Any]:
        """The flat parameter, and with ``use_orig_params=True`` the slice of every parameter in it."""
        unit, tensors = placed.unit, self._tensors[placed.unit.key]
        dtype = self._casts.get(tensors[0], tensors[0].dtype)
        parts = [part for part in placed.parts(rank) if part.param is not None or part.filler]
        numel = sum(part.count for part in parts)
        shard = FlatShard(unit.params, tensors, parts, dtype, numel) if numel else None
        values: dict[str, Any] = {unit.key: FlatParameter(placed, shard, dtype)}
        if self._units.use_orig_params:
            nothing = FlatView(None, 0, 0, dtype)
            values.update(dict.fromkeys(unit.names, nothing))
            offset = 0
            for part in parts:
                if part.param is not None:
                    values[unit.params[part.param].name] = FlatView(shard, offset, part.count, dtype)
                offset += part.count
        return values

    def _unit_tensors(self, placed: PlacedUnit) -> list[Tensor]:
        leaves = [self._leaves[param.name] for param in placed.unit.params]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _ordered(self) -> list[str]:
        cut = {unit.unit.key for unit in self._cut}
        in_units = {param.name for unit in self._cut for param in unit.unit.params}
        flat = {unit.key for unit in self._units.units}
        keys = []
        for key in state_dict_order(self._names(), self._units):
            if key in flat:
                if key in cut:
                    keys.append(key)
            elif self._units.use_orig_params or self._first.get(key, key) not in in_units:
                keys.append(key)
        return keys

    def _names(self) -> list[str]:
        """The names of the source, in ``model.parameters()`` order if the source has another one (safetensors sorts
        them).
        """
        names = list(self._leaves)
        # A parameter that units share has its place in its unit; ``parameters`` lists it where its first name is.
        shared = {first for _, first in self._units.shared}
        listed = [name for name in names if name in self._params and name not in shared]
        position = {name: index for index, name in enumerate(names)}
        in_order = [name for name in self._units.parameters if name not in shared]
        if listed == in_order and not any(first_misplaced(unit.names, position) for unit in self._units.units):
            return names
        return list(dict.fromkeys([*self._units.parameters, *names]))
