"""Runs the command line: options in, one call of the API, an exit code out."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from fsdpckpt.cli import end_on_signals
from fsdpckpt.cli.errors import Interruption, guarded, ignore_signals, report
from fsdpckpt.process_role import process_role, started_as_worker

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output


def main() -> None:
    """Run the command line and exit with the contract's code."""
    worker = False
    try:
        end_on_signals()  # until the command has loaded what it needs, and catches them
        from fsdpckpt.cli.output import Output

        worker = process_role.worker = sys.argv[1:2] == ["convert"] and started_as_worker()
        output = Output(as_json="--json" in sys.argv[1:], quiet=False)
        code = guarded(output, lambda: _run(output))
    except Interruption:
        ignore_signals()
        sys.stderr.write("error: interrupted\n")
        code = 130
    if worker or process_role.lost:  # torch's threads may abort an orderly end, or hang when their group failed
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody listens any more
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _run(output: Output) -> int:
    import typer

    from fsdpckpt.cli.app import USAGE_ERRORS, app
    from fsdpckpt.errors import InterruptedRunError

    try:
        code = app(prog_name="fsdpckpt", standalone_mode=False)  # also for python -m: completion is by name
    except typer.Abort:
        return report(output, InterruptedRunError("while reading the command line"))
    except USAGE_ERRORS as error:
        return report(output, _usage(error))
    return code if isinstance(code, int) else 0


def _usage(error: BaseException) -> BaseException:
    """A typer usage error in the form of this program's."""
    from fsdpckpt.errors import UsageError, to_copy

    message = getattr(error, "format_message", lambda: str(error))()
    help_text = to_copy("see the options, with examples", f"{_command(error)} --help")
    return UsageError(str(message), next_step=_meant(error) or help_text)


def _meant(error: BaseException) -> str | None:
    """The option that was meant by one that does not exist, or by a value that is another option's."""
    from fsdpckpt.option_fields import instead, synonym
    from fsdpckpt.options import ConvertOptions

    if sys.argv[1:2] != ["convert"]:
        return None
    unknown = getattr(error, "option_name", None)
    if isinstance(unknown, str):
        meant = synonym([ConvertOptions], unknown.lstrip("-"))
        return f"{meant.flag}: {meant.option.help_text}" if meant is not None else None
    param = getattr(error, "param", None)
    for flag in getattr(param, "opts", ()):
        for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
            value = following if word == flag else word.removeprefix(f"{flag}=")
            if word in (flag, f"{flag}={value}") and (hint := instead(ConvertOptions, param.name, value)):  # type: ignore[union-attr]
                return hint
    return None


def _command(error: BaseException) -> str:
    """The command whose options are wrong: ``fsdpckpt convert``."""
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    if path is not None:
        return str(path)
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    return f"fsdpckpt {first}" if first in ("inspect", "convert", "diff", "verify", "units") else "fsdpckpt"
