"""What to type where a part of the source lies on other nodes' disks: one process sees those of its own only."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fsdpckpt.errors import SourceIncompleteError

__all__ = ["naming_the_nodes_command"]

PORT = 29500  # torchrun's own default


@contextmanager
def naming_the_nodes_command() -> Iterator[None]:
    """An error for files that are not here says how to run this command so that it finds them on other nodes."""
    try:
        yield
    except SourceIncompleteError as error:
        command = ["torchrun", "--nnodes", "NODES", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"{socket.gethostname()}:{PORT}", "-m", "fsdpckpt", *sys.argv[1:]]
        there = f"where other nodes have what is missing, start this on each of all NODES: {shlex.join(command)}"
        error.next_step = f"{error.next_step}; or, {there}" if error.next_step else there
        raise
