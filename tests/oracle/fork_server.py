"""A process that has imported what programs need and forks each program it is asked for: it starts in moments.

``python -m tests.oracle.fork_server FD KIND`` reads requests from the socket FD; ``tests.oracle.forked`` sends them.
The programs become children of whoever started the server, which has to be a subreaper (see prctl).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["IMPORTED", "Child", "become", "end_with_parent", "forked", "play", "run_forking"]

_PROGRAM = ("fsdpckpt.cli.app", "fsdpckpt.api", "fsdpckpt.converters.pipeline", "fsdpckpt.execute")
IMPORTED = {
    "plain": _PROGRAM,
    "torch": (
        *_PROGRAM,
        "fsdpckpt.comm.launch",
        "fsdpckpt.comm.torch_group",
        "fsdpckpt.execute.send_recv",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.run",
        "torch.distributed.tensor.parallel",
    ),
}
OPTIONAL = ("isal.igzip", "ml_dtypes", "pydantic.type_adapter", "rich.console", "typer")
"""What else the command line imports; typer takes pydantic where it is installed."""
MESSAGE = 1 << 18  # bytes of a request at most
_PR_SET_PDEATHSIG = 1
_OWN_PATHS = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}


def end_with_parent() -> None:
    """Be killed when the parent process ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def play(arguments: Sequence[str]) -> int:
    """``python ARGUMENTS`` in this process, without options but ``-m`` and ``-c``; its exit code."""
    how, *rest = arguments
    try:
        if how == "-m":
            sys.argv = rest
            warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            code, *rest = rest
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [how, *rest]
            sys.path[0] = os.path.dirname(how)
            runpy.run_path(how, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def forked(body: Callable[..., int], *arguments: Any) -> int:
    """The process id of a child that ends with the exit code of ``body(*arguments)``."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = body(*arguments)
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but for torch's threads and globals, which do not survive that in a forked process."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if "torch" not in sys.modules:
        ctypes.CDLL(None).exit(code)  # with the destructors of preloaded libraries
    os._exit(code)


def become(
    arguments: Sequence[str], environment: Mapping[str, str], *, directory: str | None = None, session: bool = False
) -> int:
    """Go on as ``python ARGUMENTS`` would in this ``environment``."""
    if session:
        os.setsid()
    os.closerange(3, 1 << 12)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what the server found, which TMPDIR in this environment may not be
    if directory is not None:
        os.chdir(directory)
    paths = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [os.getcwd(), *paths, *(path for path in sys.path if path not in _OWN_PATHS)]
    for path in paths:
        if os.path.exists(os.path.join(path, "sitecustomize.py")):
            runpy.run_path(os.path.join(path, "sitecustomize.py"))
    if "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _Worker  # type: ignore[attr-defined, assignment, misc]
    return play(arguments)


class Child:
    """A child of this process, as a ``subprocess.Popen``."""

    args: Sequence[str]
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else 1e9)
        pause = 0.002
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(pause)
            pause = min(pause * 1.2, 0.05)
        return code


class _Worker(Child):
    """What the elastic launcher takes for a ``subprocess.Popen``: forked from the launcher instead of executed."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        assert args[0] == sys.executable, args

        def body() -> int:
            for stream, number in ((stdout, 1), (stderr, 2)):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            return become(args[2 if args[1] == "-u" else 1 :], env, session=start_new_session)

        self.args = args
        self.pid = forked(body)


def run_forking() -> None:
    """``sys.argv[1:]`` as a program whose ``subprocess.run`` forks Python programs instead of executing them."""

    executed = subprocess.run

    def run_forked(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[0] != sys.executable:
            return executed(command, **options)
        with tempfile.TemporaryFile("w+") as said:
            stdout = said if options["stdout"] == subprocess.PIPE else options["stdout"]
            code = _Worker(command, options["env"], stdout, None, False).wait()
            said.seek(0)
            if code and options["check"]:
                raise subprocess.CalledProcessError(code, command)
            return subprocess.CompletedProcess(command, code, said.read())

    subprocess.run = run_forked  # type: ignore[assignment]
    sys.exit(play(sys.argv[1:]))


def _start(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """The process id of the program, whose parent has ended."""
    reading, writing = os.pipe()

    def program(parent: int) -> int:
        os.close(reading)
        os.write(writing, b"%d" % os.getpid())
        os.close(writing)
        while os.getppid() == parent:
            time.sleep(0.0002)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        return become(
            request["arguments"], request["environment"], directory=request["directory"], session=request["session"]
        )

    middle = os.fork()
    if not middle:
        forked(program, os.getpid())
        os._exit(0)
    os.close(writing)
    found = int(os.read(reading, 20))
    os.close(reading)
    os.waitpid(middle, 0)
    return found


def main() -> None:
    """Serve until the other end of the socket is closed: whoever started this has ended."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED[sys.argv[2]]:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is never looked at again, and its pages stay shared with what is forked
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # which counts for 0.05 s; programs ask whether there are any
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not message:
            return
        process = _start(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"%d" % process)


if __name__ == "__main__":
    main()
