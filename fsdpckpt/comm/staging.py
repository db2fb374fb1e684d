"""Double buffers between the caller's memory and the process group's device, of a fixed size.

On the CPU both are one buffer. On CUDA the caller's side is pinned host memory, and copies run on a stream of their
own, beside the communication of the other buffers.

Who waits for what, on CUDA: what is sent waits for its copy, because the process group's stream waits for the stream
that is current when it is posted. A buffer is filled again only once its flight has landed, for which the host waits;
so no copy has to wait for a send or a receive.
"""

from __future__ import annotations

import torch

__all__ = ["Staging", "chunk_bytes"]

ALIGNMENT = 4096  # pages; also a multiple of every element size, so that no chunk cuts an element


def chunk_bytes(budget: int, buffers: int) -> int:
    """Bytes of each of ``buffers`` buffers that share ``budget``."""
    return max(budget // buffers // ALIGNMENT, 1) * ALIGNMENT


class Staging:
    """``count`` buffers of ``size`` bytes on ``device``, each with its host side.

    ``on_device``: the caller fills and empties the device's buffers itself, because its data lies there.
    """

    def __init__(self, device: torch.device, *, count: int, size: int, on_device: bool = False) -> None:
        self.size = size
        self._device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        if device.type == "cpu" or on_device:
            self._host = self._device
        else:
            self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copies: torch.cuda.Stream | None = None
        if self._host is not self._device:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Memory that the allocator gives anew may still be written by what its last owner has queued.
            self._copies.wait_stream(torch.cuda.current_stream(device))
            for buffer in self._device:
                buffer.record_stream(self._copies)  # and it must not be given on while a copy of ours is queued

    def host(self, slot: int, count: int) -> torch.Tensor:
        """The caller's side of buffer ``slot``: ``count`` bytes."""
        return self._host[slot][:count]

    def device(self, slot: int, count: int) -> torch.Tensor:
        """The process group's side of buffer ``slot``: ``count`` bytes."""
        return self._device[slot][:count]

    def to_device(self, slot: int, count: int) -> torch.Tensor:
        """What the caller filled, ready to be sent."""
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                self.device(slot, count).copy_(self.host(slot, count), non_blocking=True)
            torch.cuda.current_stream(self._device[slot].device).wait_stream(self._copies)
        return self.device(slot, count)

    def to_host(self, slot: int, count: int) -> torch.Tensor:
        """What was received (and has landed), for the caller to read."""
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                self.host(slot, count).copy_(self.device(slot, count), non_blocking=True)
            self._copies.synchronize()
        return self.host(slot, count)
