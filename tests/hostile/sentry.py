"""Run in a process of its own: opens each file named on stdin, watched for anything but reading; one JSON line each.

    python -m tests.hostile.sentry WARM... < PATHS

A file that takes too long ends the process, and is the first one without a line. Each ``WARM`` is opened first,
whatever comes of it, so that all modules are there before the watch begins. The address space is limited, so that
memory beyond the bound is an error and not a slow machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

LIMIT = 1 << 30  # bytes of address space beyond what is used when the watch begins
SECONDS = 20  # of processor time for one file: then the system ends this process, also inside of C code

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_FORBIDDEN = (
    "compile", "ctypes", "ftplib", "http", "mmap", "os.chmod", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.link",
    "os.mkdir", "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.startfile",
    "os.symlink", "os.system", "os.truncate", "pty.spawn", "shutil", "socket", "subprocess", "urllib", "webbrowser",
)  # fmt: skip


def main(warm: list[str]) -> None:
    from fsdpckpt import api
    from fsdpckpt.cli.errors import as_fsdpckpt_error
    from fsdpckpt.errors import FsdpckptError

    for path in warm:
        with suppress(FsdpckptError):
            api.inspect(path).to_json(ranks=True)
    str(FsdpckptError("the words for Python need the table of all options, which is made now"))
    seen: list[str] = []
    used = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, used + LIMIT))
    sys.addaudithook(lambda event, given: seen.append(f"{event} {given[:1]}") if _is_act(event, given) else None)
    for path in _lines():
        begin = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + SECONDS, resource.RLIM_INFINITY))
        found: dict[str, object] = {"path": path, "code": 0}
        try:
            api.inspect(path).to_json(ranks=True)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
            ours = as_fsdpckpt_error(error)
            found |= {"code": ours.exit_code, "error": type(error).__name__, "text": str(ours)[:4000]}
            found["ours"] = isinstance(error, FsdpckptError)
        found |= {"seconds": time.process_time() - begin, "acts": list(seen)}
        seen.clear()
        print(json.dumps(found), flush=True)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _is_act(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        return bool(isinstance(mode, str) and set(mode) & set("wax+")) or bool(
            isinstance(flags, int) and flags & _WRITES
        )
    if event == "import":
        return not str(arguments[0]).startswith("fsdpckpt.")
    if event == "exec":
        return getattr(arguments[0], "co_filename", "<").startswith("<")
    return event.startswith(_FORBIDDEN)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1:])
