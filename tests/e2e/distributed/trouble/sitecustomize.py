"""Python imports this at its start when its directory is on PYTHONPATH: makes one worker go wrong at one place.

TROUBLE is ``rank,module:function,trouble,file``: when that worker calls that function, it gets into trouble; with
``,number`` behind it, when it does so for that time. The file then says when, in seconds since the epoch.
SYNC_SECONDS: how often every worker says in its journal what it has written.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import signal
import socket
import struct
import sys
import threading
import time


def _fail() -> None:
    raise RuntimeError("the lights went out")


def _damage() -> None:
    from fsdpckpt.errors import SourceCorruptError

    raise SourceCorruptError(
        "a record is damaged", file="model.pt", expected="1", found="2", next_step="fetch it again"
    )


def _full() -> None:
    raise OSError(28, "No space left on device", "full.pt")


def _sockets() -> list[socket.socket]:
    """Every TCP connection of this process. Those it listens on are none."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(name)))
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                    found.append(connection)
    return found


def _cut_off() -> None:
    """Close all connections, as a network does that answers with resets."""
    for connection in _sockets():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _become_unreachable() -> None:
    """From now on nothing that is sent to this process arrives, and nothing tells the senders."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0 bytes of each packet
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    for connection in _sockets():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


SO_ATTACH_FILTER = 26
TROUBLES = {
    "cut off": _cut_off,
    "unreachable": _become_unreachable,
    "fail": _fail,
    "damage": _damage,
    "full": _full,
    "kill soon": lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL)),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(600),
}


def _arrange(place: str, trouble: str, path: str, number: str = "1") -> None:
    module_name, _, dotted = place.partition(":")
    holder = importlib.import_module(module_name)
    *above, name = dotted.split(".")
    for part in above:
        holder = getattr(holder, part)
    original = getattr(holder, name)
    calls = itertools.count(1)

    def troubled(*arguments: object, **named: object) -> object:
        if next(calls) < int(number):
            return original(*arguments, **named)
        own = f"{path}.{threading.get_ident()}"  # threads that copy get here together, and one kills all
        with open(own, "w") as file:
            file.write(str(time.time()))
        os.replace(own, path)
        TROUBLES[trouble]()
        return original(*arguments, **named)

    for each in (holder, *(module for title, module in sys.modules.items() if title.startswith("fsdpckpt."))):
        if vars(each).get(name) is original:  # where it was imported by name, too
            setattr(each, name, troubled)


_HERE = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
if "TROUBLE" in os.environ and _HERE is not None:
    _rank, *_more = os.environ["TROUBLE"].split(",")
    if _rank == _HERE:
        _arrange(*_more)
if "SYNC_SECONDS" in os.environ and _HERE is not None:
    importlib.import_module("fsdpckpt.execute.journal").SYNC_SECONDS = float(os.environ["SYNC_SECONDS"])
