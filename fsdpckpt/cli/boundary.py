"""Where exceptions end: every error becomes words (or JSON) and an exit code, never a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from fsdpckpt.cli.interruption import Interruption, ignore_signals
from fsdpckpt.cli.messages import error_json, error_text, in_our_words
from fsdpckpt.cli.output import Output
from fsdpckpt.errors import FsdpckptError, InterruptedRunError

__all__ = ["guarded", "report"]


def guarded(output: Output, body: Callable[[], int]) -> int:
    """The exit code of ``body``, or that of the error it raised, which has then been shown.

    A closed pipe (``fsdpckpt inspect SRC | head``) is quiet: the reader has what it wanted.
    """
    try:
        return body()
    except BrokenPipeError:
        # The interpreter flushes stdout at exit, which would complain: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, Interruption):
        ignore_signals()
        return report(
            output,
            InterruptedRunError(
                "by a signal", why="Ctrl-C, or the system asked for it; no output was left", next_step="run it again"
            ),
        )
    except Exception as error:  # noqa: BLE001  # the boundary: one of the program's two broad excepts
        return report(output, error)


def report(output: Output, error: BaseException) -> int:
    """Show ``error`` and return its exit code."""
    if os.environ.get("FSDPCKPT_DEBUG") == "1":
        output.error("".join(traceback.format_exception(error)).rstrip())
    ours: FsdpckptError = in_our_words(error)
    if output.as_json:
        output.document(lambda: error_json(ours))
    else:
        output.error(error_text(ours))
    return ours.exit_code
