"""Three workers: the last one's disk fills up while the first has chunks under way to the second, which is held up.

What the second then takes must be what was meant for it, for it may keep what has arrived and be resumed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from functools import partial

import numpy as np
import torch

from fsdpckpt.comm.exchanger import Exchanger, SendRecv
from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.torch_group import TorchGroup
from tests.comm.forked_workers import forked_workers

CHUNK = 1 << 20  # bytes
ROUND = 3  # chunks of one send_recv: as many as are under way at once
EXCHANGES = 2


def work(rank: int, out: str) -> int:
    """Every chunk holds its number, from 1 on. The second worker notes the chunks of each exchange that has arrived."""
    into = np.zeros(EXCHANGES * ROUND * CHUNK, np.uint8)

    def read(exchange: int, _: int, offset: int, buffer: torch.Tensor) -> None:
        buffer.fill_(exchange * ROUND + offset // CHUNK + 1)

    def receive_into(exchange: int, _: int, offset: int, nbytes: int) -> torch.Tensor:
        begin = exchange * ROUND * CHUNK + offset
        if begin == 0:
            time.sleep(1.0)  # as the main thread of a busy machine
        return torch.from_numpy(into[begin : begin + nbytes])

    def note(exchange: int) -> None:
        begin = exchange * ROUND * CHUNK
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(into[begin : begin + ROUND * CHUNK : CHUNK].tolist()) + "\n")

    def move(group: Group) -> None:
        to, source = [1] if rank == 0 else [], [0] if rank == 1 else []
        every, one = EXCHANGES * ROUND * CHUNK, ROUND * CHUNK
        exchanger = Exchanger(group, budget=4 * CHUNK, largest=every, in_place=True)
        exchanger.check(dict.fromkeys(to, every), dict.fromkeys(source, every))
        if rank == 2:
            time.sleep(0.4)
            raise OSError(errno.ENOSPC, "No space left on device")
        send_recvs = [
            SendRecv(
                dict.fromkeys(to, one),
                dict.fromkeys(source, one),
                partial(read, exchange),
                receive_into=partial(receive_into, exchange),
                on_received=partial(note, exchange) if rank == 1 else None,
            )
            for exchange in range(EXCHANGES)
        ]
        exchanger.run(iter(send_recvs), watch=lambda: group.watch(moving=True))

    with TorchGroup.start(backend="gloo", device="cpu") as group:
        try:
            with group.step("copy"):
                move(group)
        except Exception:  # noqa: BLE001  # each of them ends so: the last one's disk is full
            time.sleep(1.5)  # until nobody can take anything any more
            os._exit(6)
    return 0


def main(out: str) -> None:
    print(json.dumps(forked_workers(3, lambda rank: work(rank, out), limit=60)))


if __name__ == "__main__":
    main(*sys.argv[1:])
