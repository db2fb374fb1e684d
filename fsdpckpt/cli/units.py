"""``fsdpckpt units``: a units file from a checkpoint, or from a model built on the meta device."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.options import AsJson, Quiet, StrategyChoice
from fsdpckpt.cli.output import Output
from fsdpckpt.cli.units_text import HEADINGS, NUMERIC, rest, row, summary
from fsdpckpt.errors import NeedsInformationError, TargetExistsError, UsageError

if TYPE_CHECKING:
    from fsdpckpt.flat.units.find import FoundUnits

__all__ = ["units_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt units --from runs/step-1000 -o runs/step-1000/units.json
  fsdpckpt units --from runs/step-1000 --reference model.pt --unit 'model.layers.*' -o units.json
  fsdpckpt units --from runs/step-1000 --units units.json
  fsdpckpt units --model train:make_model --wrap train:Block --no-use-orig-params -o units.json
  fsdpckpt units --model train:make_model --wrap train:Block --use-orig-params --from runs/step-1000

\b
--model and --wrap import and run your own code, from the current directory as `python -m` would; nothing else in
fsdpckpt runs code of yours or of a checkpoint. With --from as well, the model's units are proved by that checkpoint.
In a training script, fsdpckpt.save_units(model, optimizer, "units.json") writes the same file without inference.
"""

Repeated = list[str] | None
NO_CLASSES = ["none"]
_MARK, _HEAD = b'"fsdpckpt-units"', 4096  # what every units file has near its beginning
UNITS_FILE = "units.json"  # in a directory given to --output, where it is found beside a checkpoint


def units_command(
    *,
    source: Annotated[
        str | None, typer.Option("--from", metavar="SRC", help="Infer from this checkpoint, and prove by it.")
    ] = None,
    units: Annotated[
        str | None,
        typer.Option("--units", metavar="FILE", help="With --from: prove this units file by the checkpoint."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="PATH", help="A checkpoint with the model's names, shapes and order."),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option("--parameters", metavar="FILE", help="The order of model.parameters(): one name a line."),
    ] = None,
    buffers: Annotated[
        Repeated,
        typer.Option("--buffers", metavar="GLOB", help="Model keys that are no parameters; 'none': there are none."),
    ] = None,
    unit: Annotated[
        Repeated,
        typer.Option(
            "--unit", metavar="GLOB", help="Paths of the wrapped modules ('none': the root); may be repeated."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODULE:NAME", help="Your function or class that builds the model; it is run."),
    ] = None,
    wrap: Annotated[
        Repeated,
        typer.Option("--wrap", metavar="MODULE:CLASS", help="A wrapped class ('none': the root only); repeatable."),
    ] = None,
    ignore: Annotated[
        Repeated,
        typer.Option("--ignore", metavar="GLOB", help="With --model: modules and parameters FSDP was told to ignore."),
    ] = None,
    use_orig_params: Annotated[
        bool | None,
        typer.Option("--use-orig-params/--no-use-orig-params", help="How FSDP1 flattens.", show_default=False),
    ] = None,
    strategy: Annotated[
        StrategyChoice | None, typer.Option("--strategy", help="FSDP1's sharding strategy; with --model: full-shard.")
    ] = None,
    param_dtype: Annotated[
        str | None,
        typer.Option("--param-dtype", metavar="DTYPE", help="MixedPrecision.param_dtype: it decides the alignment."),
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option("--shard-size", min=1, metavar="N", help="Ranks in one sharding group (hybrid-shard)."),
    ] = None,
    to: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the units file here.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing FILE.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Make a units file: which parameters lie in which flat parameter, in which order and with which shapes.

    Prints what was found and how it was proved; with --json the units file itself.
    """
    output = Output(as_json=as_json, quiet=quiet)
    settings = _Settings(
        use_orig_params=use_orig_params,
        strategy=strategy.value if strategy is not None else None,
        param_dtype=param_dtype,
        shard_size=shard_size,
    )

    def body() -> int:
        target = _target(to, overwrite=overwrite)
        if model is not None:
            _refuse({"--units": units, "--reference": reference, "--parameters": parameters}, "--from")
            _refuse({"--unit": unit, "--buffers": buffers}, "--from")
            found = _from_model(model, wrap or [], ignore or [], settings, source)
        elif source is not None:
            _refuse({"--wrap": wrap, "--ignore": ignore}, "--model")
            from fsdpckpt.api import find_units

            found = find_units(
                source,
                units=units,
                unit=unit or (),
                use_orig_params=use_orig_params,
                strategy=settings.strategy,
                param_dtype=param_dtype,
                shard_size=shard_size,
                reference=reference,
                parameters=parameters,
                buffers=buffers or (),
            )
        else:
            raise UsageError(
                "units are made from a checkpoint or from a model",
                expected="--from SRC, or --model MODULE:NAME with --wrap MODULE:CLASS",
                next_step="fsdpckpt units --help  # the options, with examples",
            )
        if target is not None:
            from fsdpckpt.flat.live.file import write_units

            write_units(found.units, target, how=found.how)
        _show(output, found)
        if target is not None:
            output.talk(f"wrote {target}")
        return 0

    return guarded(output, body)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What both sources of units may be told."""

    use_orig_params: bool | None
    strategy: str | None
    param_dtype: str | None
    shard_size: int | None


def _from_model(model: str, wrap: list[str], ignore: list[str], settings: _Settings, source: str | None) -> FoundUnits:
    if not wrap:
        raise NeedsInformationError(
            "a model does not say which of its modules are wrapped",
            why="each wrapped module has a flat parameter of its own, and wrapping is never guessed",
            next_step="add --wrap MODULE:CLASS for each class of auto_wrap_policy, or --wrap none for the root only",
        )
    from fsdpckpt.api import model_units

    with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the units file
        found = model_units(
            model,
            () if wrap == NO_CLASSES else wrap,
            use_orig_params=bool(settings.use_orig_params),
            strategy=settings.strategy or StrategyChoice.full_shard.value,
            param_dtype=settings.param_dtype,
            shard_size=settings.shard_size,
            ignore=ignore,
            prove_by=source,
        )
    if settings.use_orig_params is None:
        line = "use_orig_params=False, FSDP's own default: add --use-orig-params if the training sets it"
        return replace(found, how=(*found.how, line))
    return found


def _refuse(options: dict[str, object], goes_with: str) -> None:
    """Options that would be without effect are mistakes."""
    given = [name for name, value in options.items() if value]
    if given:
        raise UsageError(
            f"{', '.join(given)} would have no effect here",
            why=f"it goes with {goes_with} alone",
            next_step="fsdpckpt units --help  # the options, with examples",
        )


def _target(given: str | None, *, overwrite: bool) -> str | None:
    """The file to write, which is free. Raises TargetExistsError."""
    if given is None:
        return None
    path = os.path.join(given, UNITS_FILE) if os.path.isdir(given) else given
    if os.path.lexists(path) and not overwrite:
        raise TargetExistsError(
            f"{path} exists",
            file=path,
            why="a units file is never replaced unasked",
            next_step=f"add --overwrite, or give another file than {shlex.quote(path)}",
        )
    if os.path.lexists(path):
        _require_units_file(path)
    return path


def _require_units_file(path: str) -> None:
    """Raises TargetExistsError for what ``--overwrite`` does not replace: all but an empty file and a units file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:  # a directory, a dangling link, a file of somebody else's
        head = b"?"
    if head and _MARK not in head:
        raise TargetExistsError(
            f"{path} is no units file: --overwrite does not replace that",
            file=path,
            why="what is in it would be lost",
            next_step=f"give another file; or, when it is not needed, remove it yourself: rm {shlex.quote(path)}",
        )


def _show(output: Output, found: FoundUnits) -> None:
    from fsdpckpt.ir.units_json import encode

    units = found.units
    output.document(lambda: encode(units, how=found.how))
    output.data(summary(units))
    output.table(HEADINGS, map(row, units.units), right=NUMERIC)
    output.data(rest(units))
    output.data(found.how)
    output.data(f"not settled by the checkpoint, and without effect on it: {name}" for name in found.unsettled)
