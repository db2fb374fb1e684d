"""Runs the command line: options in, one call of the API, an exit code out."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from fsdpckpt.cli.errors import Interruption, catch_signals, guarded, ignore_signals, report
from fsdpckpt.process_role import process_role, started_as_worker

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with the contract's code."""
    worker = False
    try:
        catch_signals()
        # Imported only now: a Ctrl-C while the program still loads ends it as tidily as one while it works.
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
    from fsdpckpt.errors import UsageError

    message = getattr(error, "format_message", lambda: str(error))()
    return UsageError(str(message), next_step=f"{_command(error)} --help  # the options, with examples")


def _command(error: BaseException) -> str:
    """The command whose options are wrong: ``fsdpckpt convert``."""
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    if path is not None:
        return str(path)
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    return f"fsdpckpt {first}" if first in ("inspect", "convert", "diff", "verify", "units") else "fsdpckpt"
