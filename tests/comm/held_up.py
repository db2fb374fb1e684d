"""Three workers: the last one's disk fills up while the first has chunks under way to the second, which is held up.

What the second then takes must be what was meant for it, for it may keep what has arrived and be resumed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from fsdpckpt.comm.exchanger import Exchanger, SendRecv
from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.torch_group import TorchGroup
from tests.comm.forked_workers import forked_workers

CHUNK = 1 << 20  # bytes
ROUND = 3  # chunks of one send_recv: as many as are under way at once
EXCHANGES = 2


def work(rank: int, out: str) -> None:
    """Every chunk holds its number, from 1 on. The second worker notes the chunks of each exchange that has arrived."""
    into = np.zeros(EXCHANGES * ROUND * CHUNK, np.uint8)

    def read(send_recv: int) -> Callable[[int, int, torch.Tensor], None]:
        return lambda to, offset, buffer: _fill(buffer, send_recv * ROUND + offset // CHUNK + 1)

    def receive_into(send_recv: int) -> Callable[[int, int, int], torch.Tensor]:
        def place(source: int, offset: int, nbytes: int) -> torch.Tensor:
            begin = send_recv * ROUND * CHUNK + offset
            if begin == 0:
                time.sleep(1.0)  # as the main thread of a busy machine
            return torch.from_numpy(into[begin : begin + nbytes])

        return place

    def on_received(send_recv: int) -> Callable[[], None]:
        def note() -> None:
            begin = send_recv * ROUND * CHUNK
            held_boxes = into[begin : begin + ROUND * CHUNK : CHUNK].tolist()
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(held_boxes) + "\n")

        return note

    with TorchGroup.start(backend="gloo", device="cpu") as group:
        try:
            with group.step("copy"):
                _move(group, rank, read, receive_into, on_received)
        except Exception:  # noqa: BLE001  # each of them ends so: the last one's disk is full
            time.sleep(1.5)  # until nobody can take anything any more
            os._exit(6)


def _move(
    group: Group,
    rank: int,
    read: Callable[[int], Callable[[int, int, torch.Tensor], None]],
    receive_into: Callable[[int], Callable[[int, int, int], torch.Tensor]],
    on_received: Callable[[int], Callable[[], None]],
) -> None:
    exchanger = Exchanger(group, budget=4 * CHUNK, largest=EXCHANGES * ROUND * CHUNK, in_place=True)
    size = EXCHANGES * ROUND * CHUNK
    exchanger.check({1: size} if rank == 0 else {}, {0: size} if rank == 1 else {})
    if rank == 2:
        time.sleep(0.4)
        raise OSError(errno.ENOSPC, "No space left on device")
    send_recvs = [
        SendRecv(
            {1: ROUND * CHUNK} if rank == 0 else {},
            {0: ROUND * CHUNK} if rank == 1 else {},
            read(exchange),
            receive_into=receive_into(exchange),
            on_received=on_received(exchange) if rank == 1 else None,
        )
        for exchange in range(EXCHANGES)
    ]
    exchanger.run(iter(send_recvs), watch=lambda: group.watch(moving=True))


def _fill(buffer: torch.Tensor, number: int) -> None:
    buffer.fill_(number)


def main(out: str) -> None:
    def body(rank: int) -> int:
        work(rank, out)
        return 0

    codes = forked_workers(3, body, limit=60)
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
