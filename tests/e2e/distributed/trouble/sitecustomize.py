"""Python imports this at its start when its directory is on PYTHONPATH: makes one worker go wrong at one place.

TROUBLE is ``rank,module:function,trouble,file``: when that worker calls that function for the second time (or the
first, where it is called once), it gets into trouble. The file then says when, in seconds since the epoch.
"""

import importlib
import os
import signal
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


TROUBLES = {
    "fail": _fail,
    "damage": _damage,
    "full": _full,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(600),
}


def _arrange(place: str, trouble: str, path: str) -> None:
    module_name, _, dotted = place.partition(":")
    holder = importlib.import_module(module_name)
    *above, name = dotted.split(".")
    for part in above:
        holder = getattr(holder, part)
    original = getattr(holder, name)

    def troubled(*arguments: object, **named: object) -> object:
        with open(path, "w") as file:
            file.write(str(time.time()))
        TROUBLES[trouble]()
        return original(*arguments, **named)

    setattr(holder, name, troubled)


if "TROUBLE" in os.environ and "RANK" in os.environ:
    _rank, _place, _trouble, _path = os.environ["TROUBLE"].split(",")
    if os.environ["RANK"] == _rank:
        _arrange(_place, _trouble, _path)
