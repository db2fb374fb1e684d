"""The command line: options in, one call of the API, an exit code out.

Until a command works, a signal just ends the process; what takes time to import is imported after that.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # without the time that signal's enums take
import os
import sys

TYPE_CHECKING = False  # as in typing, whose import takes time
if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams

# What ``--json`` prints for a signal. Nothing can be imported to make it when ``_end`` runs.
_INTERRUPTED = (
    b'{"schema": "fsdpckpt/error/1", "error": {"type": "InterruptedRunError", "exit_code": 130, '
    b'"what": "interrupted (Ctrl-C or a signal)", "details": [], "why": "no partial output was left", '
    b'"next_step": "run it again", '
    b'"file": null, "key": null, "rank": null, "expected": null, "found": null, "retryable": true}}\n'
)

NEAR = 0.8  # similarity of a mistyped option to the suggested one: --verbose is not --overwrite


def main() -> None:
    """Run the command line and exit with the contract's code."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # until the command is loaded, and catches them itself
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    import atexit
    import gc

    # Else the interpreter walks all objects once more on its way out, for a tenth of a short command. Only then: a
    # program that goes on after ``main`` would keep what it froze for ever.
    atexit.register(gc.freeze)
    gc.disable()  # until the command is imported: classes and functions live on, and walking them takes time
    # numpy's BLAS, which nothing here calls, would start a thread on each core when it is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from contextlib import suppress

    from fsdpckpt.cli.errors import Interruption, guarded, ignore_signals
    from fsdpckpt.process import process_role, started_as_worker

    worker = False
    try:
        from fsdpckpt.cli.output import Streams

        worker = process_role.worker = sys.argv[1:2] == ["convert"] and started_as_worker()
        output = Streams(as_json="--json" in sys.argv[1:], quiet=False)
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


def _end(_number: int, _frame: object) -> None:
    """End the process at once, with one line (and a document, of the first worker alone) and exit code 130: nothing has
    begun yet.

    An exception would be lost where Python cannot raise one, in the middle of an import.
    """
    try:
        os.write(2, b"error: interrupted\n")
        if "--json" in sys.argv[1:] and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            os.write(1, _INTERRUPTED)
    finally:
        os._exit(130)


def _run(output: Streams) -> int:
    from fsdpckpt.cli.app import USAGE_ERRORS, app
    from fsdpckpt.cli.errors import show_error

    try:
        code = app(prog_name="fsdpckpt", standalone_mode=False)  # also for python -m: completion is by name
    except USAGE_ERRORS as error:
        return show_error(output, _usage_error(error))
    return code if isinstance(code, int) else 0


def _usage_error(error: BaseException) -> BaseException:
    """A typer usage error as a UsageError."""
    from fsdpckpt.errors import UsageError

    unknown = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    message = str(getattr(error, "format_message", lambda: str(error))()).rstrip(".")
    message = message.partition(". Did you mean")[0]  # the next step says it
    what = f"no such option: {unknown}" if unknown else message[:1].lower() + message[1:]
    expected = _expected(error, message)
    meant = _meant_option(error, unknown) if unknown else _meant_command(message)
    return UsageError(what, expected=expected, next_step=meant)


_OTHER_NAMES = {
    "inspect": ("cat", "describe", "info", "list", "ls", "print", "show", "stat"),
    "convert": ("consolidate", "cp", "copy", "export", "merge", "merge-weights", "reshard", "save"),
    "diff": ("cmp", "compare"),
    "verify": ("check", "fsck", "test", "validate"),
}
"""What other programs call the commands."""


def _meant_command(message: str) -> str | None:
    """The command that was probably meant by one that does not exist."""
    from difflib import get_close_matches

    begin = "No such command '"
    if not message.startswith(begin):
        return None
    given = message.removeprefix(begin).partition("'")[0].lower()
    near = [name for name, others in _OTHER_NAMES.items() if given in others]
    near += get_close_matches(given, (*_OTHER_NAMES, "units", "formats", "version", "help"), n=1)
    return f"did you mean fsdpckpt {near[0]}?" if near else None


def _expected(error: BaseException, message: str) -> str | None:
    """The commands, if one was expected; else the arguments of a command that lacks some."""
    context = getattr(error, "ctx", None)
    if context is None:
        return None
    if message.startswith("No such command"):
        return ", ".join(context.command.list_commands(context))
    if message.startswith("Missing argument"):
        return " ".join((context.command_path, *context.command.collect_usage_pieces(context)[1:]))
    return None


def _meant_option(error: BaseException, unknown: str) -> str | None:
    """The option that was probably meant by one that does not exist."""
    from difflib import get_close_matches

    from fsdpckpt.errors import to_copy
    from fsdpckpt.options import ConvertOptions
    from fsdpckpt.options.declare import option_with_synonym

    meant = option_with_synonym([ConvertOptions], unknown.lstrip("-")) if sys.argv[1:2] == ["convert"] else None
    if meant is not None:
        return f"{meant.flag}: {meant.help_text}"
    if unknown == "--version":
        return to_copy("this shows the version", "fsdpckpt --version")
    command = getattr(getattr(error, "ctx", None), "command", None)
    flags: list[str] = []
    for param in getattr(command, "params", ()):
        flags += (*param.opts, *param.secondary_opts)
    near = get_close_matches(unknown, flags, n=1, cutoff=NEAR)
    return f"did you mean {near[0]}?" if near else None
