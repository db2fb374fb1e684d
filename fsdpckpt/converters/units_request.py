"""What the options say of units, and the other sources of names that units are held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from fsdpckpt.errors import SourceUnrecognisedError
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import loads
from fsdpckpt.planner.flat_match import FlatMatch
from fsdpckpt.planner.unit_build import with_settings
from fsdpckpt.planner.unit_names import NameList, model_names, optimizer_names
from fsdpckpt.storage.sources import Sources

__all__ = ["FoundUnits", "UnitsRequest", "against", "load_units", "overridden", "reference_names"]

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class UnitsRequest:
    """What the options say of units; None (and empty) where they say nothing.

    ``file``: a units file. ``globs``: module paths of units, ``("none",)`` for the root alone. ``shard_size``: ranks in
    one sharding group. ``reference``: a checkpoint with names and shapes. ``parameters``: names in the order of
    ``model.parameters()``.
    """

    file: str | None = None
    globs: tuple[str, ...] = ()
    use_orig_params: bool | None = None
    strategy: Strategy | None = None
    param_dtype: DType | None = None
    shard_size: int | None = None
    reference: str | None = None
    parameters: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FoundUnits:
    """Units, how they were found and proved in words, and for a source what each of its keys is.

    ``unsettled``: settings that a source's bytes do not show, because they make no difference to them.
    """

    units: Units
    match: FlatMatch | None
    how: tuple[str, ...]
    unsettled: tuple[str, ...] = ()


def load_units(path: str, sources: Sources) -> Units:
    """The units in the units file at ``path``. Raises SourceError."""
    file = sources.open(path)
    return loads(file.read(0, file.nbytes), source=path)


def overridden(units: Units, request: UnitsRequest) -> Units:
    """``units`` with the settings that the options name."""
    return with_settings(
        units,
        use_orig_params=request.use_orig_params,
        strategy=request.strategy,
        param_dtype=request.param_dtype,
        shard_size=request.shard_size,
    )


def reference_names(path: str, sources: Sources) -> NameList:
    """The names and shapes of the checkpoint at ``path``. Raises SourceUnrecognisedError when it has none."""
    from fsdpckpt.readers.detect import open_checkpoint

    checkpoint = open_checkpoint(path, sources=sources, locate=False)
    names = model_names(checkpoint, path) or optimizer_names(checkpoint, f"the optimizer of {path}")
    if names is None:
        raise SourceUnrecognisedError(
            f"{path} has no names and shapes: it is no reference",
            file=path,
            expected="a full or sharded model state dict",
            found=f"a checkpoint that is {checkpoint.layout}",
            next_step="--reference PATH of a full or sharded checkpoint of the same model",
        )
    return replace(names, foreign=True)


def against(units: Units, request: UnitsRequest, sources: Sources) -> list[str]:
    """What ``--parameters`` and ``--reference`` contradict in ``units``; nothing when they agree or are not given."""
    wrong: list[str] = []
    if request.parameters is not None:
        for number, (given, own) in enumerate(zip_longest(request.parameters, units.parameters)):
            if given != own:
                wrong.append(f"parameter {number} is {own} by the units, {given} by --parameters")
    if request.reference is not None:
        wrong.extend(_reference(units, reference_names(request.reference, sources)))
    return wrong


def _reference(units: Units, names: NameList) -> list[str]:
    held = {param.name: param for param in names.params}
    tied = dict(names.shared)
    wrong: list[str] = []
    for name, param in units.params().items():
        found = held.get(tied.get(name, name))
        if found is None:
            wrong.append(f"{name} is in the units, not in {names.label}")
        elif found.shape != param.shape:
            wrong.append(f"{name}: {list(param.shape)} by the units, {list(found.shape)} in {names.label}")
    if not wrong and names.ordered:
        known = [param.name for param in names.params if param.name in set(units.parameters)]
        own = [name for name in units.parameters if name in set(known)]
        pairs = [(a, b) for a, b in zip(own, known, strict=True) if a != b]
        wrong.extend(f"{a} stands where {names.label} has {b}" for a, b in pairs[:_SHOWN])
    return wrong
