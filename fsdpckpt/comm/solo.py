"""``Solo``: a group of one process. Nothing is communicated, exceptions pass unchanged, torch is never imported."""

from __future__ import annotations

from contextlib import AbstractContextManager as Context
from contextlib import nullcontext

from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import InternalError

__all__ = ["Solo"]


class Solo(Group):
    """Rank 0 of 1. ``device``: where tensors are made, a ``torch.device`` or the name of one."""

    def __init__(self, device: object = "cpu") -> None:
        self.rank = 0
        self.world_size = 1
        self.backend = None
        self.device = device
        self.transport = None

    def step(self, name: str, *, agree: str = "") -> Context[None]:  # nobody to agree with
        return nullcontext()

    def beat(self) -> None:
        return None

    def watch(self, *, moving: bool) -> None:
        return None

    def heartbeat(self) -> Context[None]:
        return nullcontext()

    def silent_for(self, seconds: float) -> Context[None]:  # nobody listens
        return nullcontext()

    def all_gather_objects(self, value: object, *, name: str = "") -> list[object]:
        return [value]

    def broadcast_object(self, value: object = None, *, source: int = 0, name: str = "") -> object:
        return value

    def send_object(self, value: object, *, to: int) -> None:
        raise InternalError(f"a lone process was to send a value to rank {to}")

    def receive_object(self, *, source: int) -> object:
        raise InternalError(f"a lone process was to receive a value from rank {source}")

    def all_stopped(self) -> None:
        return None

    def close(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        return None
