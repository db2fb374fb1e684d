"""Programs that start in moments: processes of their own, forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.oracle.fork_server import MESSAGE, Child

__all__ = ["ROOT", "Program", "processes_in", "run"]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PR_SET_CHILD_SUBREAPER = 36
_one_request = threading.Lock()


@functools.cache
def _server(kind: str, process: int, preload: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's own server, which ends with it."""
    del process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if preload:
        variables["LD_PRELOAD"] = preload
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.oracle.fork_server", str(theirs.fileno()), kind]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=variables,
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours, server


class Program(Child):
    """``python ARGUMENTS``, without options but ``-m`` and ``-c``, as a process that has imported ``kind`` already.

    As subprocess.Popen with text; a stream that is not given is kept for ``communicate``. LD_PRELOAD in ``env`` is
    obeyed. ``kind``: "torch", with what torch.distributed needs, or "plain", with fsdpckpt and without torch.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        kind: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ) -> None:
        environment = {**os.environ, **(env or {})}
        self.args = [sys.executable, *map(str, arguments)]
        self._streams: list[IO[bytes]] = []
        request = {
            "arguments": self.args[1:],
            "environment": environment,
            "directory": cwd or os.getcwd(),
            "session": start_new_session,
        }
        with contextlib.ExitStack() as opened, _one_request:
            null = opened.enter_context(open(os.devnull, "rb"))
            descriptors = [null.fileno()]
            for given in (stdout, stderr):
                if given is None:
                    self._streams.append(tempfile.TemporaryFile())  # noqa: SIM115 - until it has ended
                descriptors.append(self._streams[-1].fileno() if given is None else given)
            server, _ = _server(kind, os.getpid(), environment.get("LD_PRELOAD", ""))
            socket.send_fds(server, [json.dumps(request).encode()], descriptors)
            answer = server.recv(20)
        if not answer:
            raise AssertionError("the process that forks programs ended")
        self.pid = int(answer)

    def communicate(self, timeout: float | None = None) -> tuple[str, ...]:
        """What it wrote to the streams that were not given elsewhere, once it has ended."""
        self.wait(timeout)
        said = []
        for stream in self._streams:
            stream.seek(0)
            said.append(stream.read().decode(errors="replace"))
            stream.close()
        self._streams = []
        return tuple(said)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str],
    *,
    kind: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with captured text; nothing it started in its session outlives it when it is late."""
    program = Program(arguments, kind=kind, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
    try:
        program.wait(timeout)
    finally:
        program.kill()
        program.wait()
    said = list(program.communicate())
    out = said.pop(0) if stdout is None else ""
    return subprocess.CompletedProcess(program.args, program.returncode, out, said[0] if said else "")


def processes_in(directory: Path) -> list[int]:
    """The processes whose working directory this is: a program that was started there, and what it started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += [int(process.name)] if process.joinpath("cwd").readlink() == directory else []
    return found
