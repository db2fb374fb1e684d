"""Where exceptions end: every error becomes words (or JSON) and an exit code, never a traceback."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from fsdpckpt.cli.interruption import Interruption, ignore_signals
from fsdpckpt.cli.messages import error_json, error_text, in_our_words
from fsdpckpt.cli.output import Output, abandon
from fsdpckpt.errors import FsdpckptError, InterruptedRunError

__all__ = ["guarded", "report"]


def guarded(output: Output, body: Callable[[], int]) -> int:
    """The exit code of ``body``, or that of the error it raised, which has then been shown."""
    try:
        return body()
    except (KeyboardInterrupt, Interruption) as error:
        ignore_signals()
        return report(output, _interrupted(getattr(error, "__notes__", [])))
    except Exception as error:  # noqa: BLE001  # the boundary: one of the program's two broad excepts
        return report(output, error)


def _interrupted(kept: Sequence[str]) -> InterruptedRunError:
    """``kept``: what is left to resume, in words."""
    if not kept:
        why = "Ctrl-C, or the system asked for it; nothing half-made was left"
        return InterruptedRunError("by a signal", why=why, next_step="run it again")
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return InterruptedRunError(
        "by a signal",
        details=kept,
        why="Ctrl-C, or the system asked for it",
        next_step=shlex.join(["fsdpckpt", *words, "--resume"]),
    )


def report(output: Output, error: BaseException) -> int:
    """Show ``error`` and return its exit code."""
    ours: FsdpckptError = in_our_words(error)
    try:
        if os.environ.get("FSDPCKPT_DEBUG") == "1":
            output.error("".join(traceback.format_exception(error)).rstrip())
        if output.as_json:
            output.document(lambda: error_json(ours), "error")
        else:
            output.error(error_text(ours))
    except OSError:  # where it should be shown is the trouble: a full disk behind stdout or stderr
        abandon(sys.stdout)
        try:
            output.error(error_text(ours))
        except OSError:
            abandon(sys.stderr)
    return ours.exit_code
