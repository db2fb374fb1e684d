"""What the options say of units, and the other sources of names that units are held against."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceMissingError, SourceUnrecognisedError
from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.units.build import with_settings
from fsdpckpt.flat.units.globs import expand, owner
from fsdpckpt.flat.units.names import NameList, model_names, optimizer_names
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import MOST_BYTES, UNITS_FILE, loads
from fsdpckpt.storage.sources import Sources

__all__ = [
    "ORDER",
    "FoundUnits",
    "UnitsRequest",
    "against",
    "load_units",
    "overridden",
    "reference_names",
    "require_agreement",
    "require_order",
    "settings_given",
]


ORDER = "parameters"
"""In ``FoundUnits.unsettled``: the order of ``model.parameters()`` is known inside of each unit only."""


@dataclass(frozen=True, slots=True)
class UnitsRequest:
    """What the options say of units; None (and empty) where they say nothing.

    ``file``: a units file. ``globs``: module paths of units, ``("none",)`` for the root alone. ``shard_size``: ranks in
    one sharding group. ``reference``: a checkpoint with names and shapes. ``parameters``: names in the order of
    ``model.parameters()``. ``buffers``: globs of model keys that are none, ``("none",)`` when all are.
    """

    file: str | None = None
    globs: tuple[str, ...] = ()
    use_orig_params: bool | None = None
    strategy: Strategy | None = None
    param_dtype: DType | None = None
    shard_size: int | None = None
    reference: str | None = None
    parameters: tuple[str, ...] | None = None
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FoundUnits:
    """Units, how they were found and proved in words, and for a source what each of its keys is.

    ``unsettled``: settings that a source's bytes do not show, because they make no difference to them, and ``ORDER``.
    """

    units: Units
    match: FlatMatch | None
    how: tuple[str, ...]
    unsettled: tuple[str, ...] = ()


def require_order(found: FoundUnits, source: str) -> None:
    """Raises NeedsInformationError unless ``found`` has the order of ``model.parameters()``, which units record."""
    if ORDER in found.unsettled:
        raise NeedsInformationError(
            f"the order of the parameters of {source} is known inside of each unit only",
            why="the names come from the optimizer, which lists them flat parameter by flat parameter, or as its user "
            "did; ids count in the order of model.parameters()",
            next_step="add --parameters FILE (the names of model.named_parameters(), one a line), --reference PATH of "
            "a checkpoint of this model, or --units FILE",
        )


def load_units(path: str, sources: Sources) -> Units:
    """The units in the units file at ``path``. Raises SourceError."""
    entry = sources.stat(path) if path else None
    if entry is None or entry.directory:
        raise _no_file(path, directory=entry is not None)
    file = sources.open(path)
    return loads(file.read(0, min(file.nbytes, MOST_BYTES + 1)), source=path)


def _no_file(path: str, *, directory: bool) -> SourceMissingError:
    inside = os.path.join(path, UNITS_FILE)
    there = path if directory else os.path.dirname(path) or "."
    return SourceMissingError(
        f"--units {path} is a directory" if directory else f"--units {path or repr(path)} does not exist",
        file=path,
        expected="the file that save_units or `fsdpckpt units` wrote",
        next_step=f"--units {shlex.quote(inside)}"
        if directory and os.path.isfile(inside)
        else f"ls {shlex.quote(there if os.path.isdir(there) else '.')}  # shows what is there",
    )


def settings_given(request: UnitsRequest) -> list[str]:
    """The options that name settings, as they were typed."""
    flag = {True: "--use-orig-params", False: "--no-use-orig-params", None: ""}[request.use_orig_params]
    given = [
        flag,
        f"--strategy {request.strategy.value}" if request.strategy is not None else "",
        f"--param-dtype {request.param_dtype.name}" if request.param_dtype is not None else "",
        f"--shard-size {request.shard_size}" if request.shard_size is not None else "",
    ]
    return [option for option in given if option]


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


def require_agreement(units: Units, request: UnitsRequest, sources: Sources, said: str) -> None:
    """Raises SourceCorruptError when other options contradict ``units``; ``said`` is what they contradict then."""
    wrong = against(units, request, sources)
    if not wrong:
        return
    held = {"--unit": request.globs, "--parameters": request.parameters, "--reference": request.reference}
    given = [option for option, value in held.items() if value]
    raise SourceCorruptError(
        f"{' and '.join(given)} {'contradicts' if len(given) == 1 else 'contradict'} {said}",
        details=wrong,
        why="what was given describes another model, another wrapping, or another version of this one",
        next_step=f"drop {' and '.join(given)}, or give what belongs to this model",
    )


def against(units: Units, request: UnitsRequest, sources: Sources) -> list[str]:
    """What ``--unit``, ``--parameters`` and ``--reference`` contradict in ``units``; nothing when they agree or are
    not given."""
    wrong = list(_wrapped(units, request.globs))
    if request.parameters is not None:
        for number, (given, own) in enumerate(zip_longest(request.parameters, units.parameters)):
            if given != own:
                wrong.append(f"parameter {number} is {own} by the units, {given} by --parameters")
    if request.reference is not None:
        wrong.extend(_reference(units, reference_names(request.reference, sources)))
    return wrong


def _wrapped(units: Units, globs: tuple[str, ...]) -> Iterator[str]:
    if not globs:
        return
    names = [param.name for param in units.params().values()]
    prefixes = {"", *expand(globs, names)}
    for unit in units.units:
        astray = next((param.name for param in unit.params if owner(param.name, prefixes) != unit.prefix), None)
        if astray is not None:
            by_globs = owner(astray, prefixes)
            yield f"{astray} is in unit {unit.prefix!r} by the units, in {by_globs!r} by --unit"


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
        wrong.extend(f"{a} stands where {names.label} has {b}" for a, b in pairs)
    return wrong
