"""Runs ``fsdpckpt units``: a units file from a checkpoint, or from a model built on the meta device."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from fsdpckpt.cli.output import Cell, Name, table_lines
from fsdpckpt.errors import NeedsInformationError, TargetExistsError, UsageError
from fsdpckpt.options.commands import UnitsOptions
from fsdpckpt.options.declare import Scope, refuse_unused
from fsdpckpt.text import count_text, fold, plural, shape_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.flat.units.request import ResolvedUnits
    from fsdpckpt.ir.units import Unit, Units

EXAMPLES = """\b
Examples:
  fsdpckpt units --from runs/step-1000 -o runs/step-1000/units.json
  fsdpckpt units --from runs/step-1000 --reference model.pt \\
      --unit 'model.layers.*' -o units.json
  fsdpckpt units --from runs/step-1000 --units units.json
  fsdpckpt units --config models/base --wrap LlamaDecoderLayer \\
      --from runs/step-1000 -o units.json
  fsdpckpt units --model train:make_model --wrap train:Block \\
      --no-use-orig-params -o units.json
  fsdpckpt units --model train:make_model --wrap train:Block \\
      --use-orig-params --from runs/step-1000

\b
--model and --wrap import and run your own code, from the current directory as
`python -m` would; nothing else in fsdpckpt runs your code or a checkpoint's.
With --from as well, the model's units are checked against that checkpoint.
In a training script, fsdpckpt.save_units(model, optimizer, "units.json")
writes the same file without inference.
"""

UNITS_FILE = "units.json"  # in a directory given to --output, where it is found beside a checkpoint
HEADINGS = ("flat parameter", "strategy", "parameters", "frozen", "elements", "dtype", "param_dtype")
NUMERIC = frozenset({2, 3, 4})


def units_command(output: Streams, options: UnitsOptions) -> int:
    """Make a units file: the parameters of each flat parameter, in order and with their shapes.

    Prints what was found and how it was checked; with --json the units file itself.
    """
    target = _free_target(options.output, overwrite=options.overwrite)
    if options.model is not None and options.config is not None:
        raise UsageError(
            "--model and --config each describe a model",
            next_step="give --model to build it with its code, or --config to read its config.json and weights",
        )
    if options.transformers_version is not None and options.config is None:
        what = "--transformers-version has no effect: there is no --config"
        raise UsageError(what, next_step="drop --transformers-version, or add --config DIR")
    if options.model is None:
        refuse_unused(options, Scope.LIVE_MODEL, "there is no --model")
    if options.model is None and options.config is None:
        refuse_unused(options, Scope.CLASSES, "there is no --model and no --config")
    if options.model is not None:
        refuse_unused(options, Scope.CHECKPOINT, "there is no checkpoint", "add --from SRC")
        units = _from_model(options.model, options)
    elif options.config is not None:
        refuse_unused(options, Scope.CHECKPOINT, "the model is described by --config")
        from fsdpckpt.api import base_model_units

        units = base_model_units(options.config, options)
    elif options.source is not None:
        from fsdpckpt.api import find_units

        units = find_units(options.source, options)
    else:
        raise UsageError(
            "units are made from a checkpoint, from the directory of a base model, or from a model",
            expected="--from SRC, --config DIR with --wrap CLASS, or --model MODULE:NAME with --wrap MODULE:CLASS",
        )
    if target is not None:
        from fsdpckpt.flat.units.request import write_units

        write_units(units.units, target, how=units.how)
    _print(output, units)
    if target is not None:
        output.message(f"wrote {target}")
    return 0


def _from_model(model: str, options: UnitsOptions) -> ResolvedUnits:
    if not options.wrap:
        raise NeedsInformationError(
            "a model does not say which of its modules are wrapped",
            why="each wrapped module has its own flat parameter, and wrapping is never guessed",
            next_step="add --wrap MODULE:CLASS for each class of auto_wrap_policy, or --wrap none for the root only",
        )
    from fsdpckpt.api import model_units

    with redirect_stdout(sys.stderr):  # what the user's code prints does not belong in the units file
        return model_units(model, options)


def _free_target(path: str | None, *, overwrite: bool) -> str | None:
    """The file to write, which does not exist yet. Raises TargetExistsError."""
    from fsdpckpt.flat.units.request import require_replaceable

    if path is None:
        return None
    if os.path.isdir(path):
        path = os.path.join(path, UNITS_FILE)
    require_replaceable(path)
    if os.path.lexists(path) and not overwrite:
        raise TargetExistsError(
            f"{path} already exists",
            file=path,
            why="fsdpckpt won't replace existing files without --overwrite",
            next_step=f"add --overwrite, or give a file other than {shlex.quote(path)}",
        )
    return path


def _print(output: Streams, result: ResolvedUnits) -> None:
    from fsdpckpt.ir.units_json import encode

    units = result.units
    output.document(lambda: encode(units, how=result.how))
    output.data(_summary(units))
    output.data(_table(units, output.columns))
    output.data(_rest_lines(units))
    output.data(result.how)
    output.data(f"not recorded in the checkpoint, and without effect on it: {name}" for name in result.open_settings)


def _summary(units: Units) -> Iterator[str]:
    """The lines above the table."""
    params = units.params()
    elements = sum(param.numel for param in params.values())
    ranks = f", {plural(units.world_size, 'rank')}" if units.world_size is not None else ""
    groups = f" in sharding groups of {units.shard_size}" if units.shard_size is not None else ""
    yield (
        f"{plural(len(units.units), 'unit')}, {plural(len(params), 'parameter')}, {count_text(elements)} elements; "
        f"use_orig_params={units.use_orig_params}{ranks}{groups}"
    )
    yield ""


def _table(units: Units, columns: int | None) -> list[str]:
    """A row for each unit; on a terminal one for those of repeated layers, and no column that is empty."""
    rows = [_row(unit) for unit in units.units]
    if columns is None:
        return table_lines([HEADINGS, *rows], right=NUMERIC)
    folded = []
    for keys in fold((unit.key, tuple(map(str, row[1:]))) for unit, row in zip(units.units, rows, strict=True)):
        count = len(keys.members)
        name = Name(keys.key, f"  x{count_text(count)}" if count > 1 else "")
        folded.append([name, *rows[keys.members[0]][1:]])
    by_column = enumerate(zip(HEADINGS, *folded, strict=True))
    shown = [at for at, (_, *cells) in by_column if any(cell != "-" for cell in cells)]
    table: list[list[Cell]] = []
    for row in (HEADINGS, *folded):
        table.append([row[at] for at in shown])
    return table_lines(table, right=[shown.index(at) for at in NUMERIC if at in shown], columns=columns)


def _row(unit: Unit) -> list[Cell]:
    """The cells of one unit, under ``HEADINGS``."""
    frozen = sum(not param.requires_grad for param in unit.params)
    return [
        Name(unit.key),
        unit.strategy.value,
        count_text(len(unit.params)),
        count_text(frozen) if frozen else "-",
        count_text(sum(param.numel for param in unit.params)),
        unit.params[0].dtype.name if unit.params else "-",
        unit.param_dtype.name if unit.param_dtype is not None else "-",
    ]


def _rest_lines(units: Units) -> Iterator[str]:
    """What is in no unit, and what is known of the optimizer."""
    yield ""
    for param in units.unmanaged:
        yield f"outside of all units: {param.name} {param.dtype.name} {shape_text(param.shape)}"
    for later, first in units.shared:
        yield f"shared: {later} is {first}"
    if units.groups is not None:
        sizes = ", ".join(count_text(len(group)) for group in units.groups)
        yield f"optimizer groups: {len(units.groups)}, of {sizes} parameters"
