"""The command line. Until a command works, a signal just ends the process: imports nothing that takes time."""

import _signal as signal  # type: ignore[import-not-found]  # without the time that signal's enums take
import os


def end_on_signals() -> None:
    """From now on a signal ends the process at once, with one line and exit code 130: nothing has been begun yet.

    An exception would be lost where Python cannot raise one, in the middle of an import.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(_number: int, _frame: object) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)
