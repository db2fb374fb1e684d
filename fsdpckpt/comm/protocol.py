"""``Group``: one rank among the ranks of a run. Defines what ranks do together, and how their errors are sent.

``Solo`` is a group of one process and never imports torch; ``comm.torch_group.TorchGroup`` is a group over a live
process group. Code written against ``Group`` runs the same on one rank and on a thousand.

An error is sent as a record of its type and its fields, so that a damaged source is exit code 3 whichever rank reads
it. This program's errors and the operating system's have a record; of any other error the other ranks get only the
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import nullcontext
from typing import Any, Self, TypeAlias

from fsdpckpt import errors
from fsdpckpt.errors import FsdpckptError, InternalError, UsageError, WorkerError


class Group:
    """Rank ``rank`` of ``world_size``. A method marked *collective* is called by all ranks, in the same order.

    The methods here are those of a world of one: ``Solo`` has no others; ``TorchGroup`` overrides most.

    ``device``: where data must be to be sent to other ranks, a ``torch.device`` or the name of one. ``backend``: the
    process group's, None in a world of one. ``transport``: moves tensor bytes between ranks (``comm.transport``), only
    for the code that exchanges them; ``control``: moves everything else between their CPUs. None in a world of one.
    """

    rank: int
    world_size: int
    backend: str | None
    device: Any
    transport: Any
    control: Any

    def step(self, name: str, *, agree: str = "") -> Context[None]:
        """Collective: ``with group.step("write shards"):`` all ranks enter and leave the body together.

        ``agree``: a digest of what must be the same on all ranks. An exception in the body of any rank is raised as the
        same WorkerError on all of them, with the exception itself as ``original``; ``Solo`` raises it unchanged. Steps
        may be nested.
        """
        return nullcontext()

    def check_rank(self, argument: str, ranks: Sequence[int]) -> None:
        """Raises UsageError unless ``ranks``, what each rank (or this one alone) passes as ``argument``, are the same
        rank of this group.
        """
        if len(set(ranks)) > 1:
            found = ", ".join(f"{rank} in rank {number}" for number, rank in enumerate(ranks))
            raise UsageError(f"the ranks pass different ranks as {argument}", expected="the same", found=found)
        if not 0 <= ranks[0] < self.world_size:
            last = self.world_size - 1
            raise UsageError(
                f"{argument}={ranks[0]} is not a rank of the group",
                expected=f"0 to {last}" if last else "0: this process is alone",
                found=str(ranks[0]),
                why="ranks count within the group, which may be a part of the job",
            )

    def beat(self) -> None:
        """Report progress to the other ranks. In a long step, call it at least every few seconds."""
        self.watch(moving=True)

    def watch(self, *, moving: bool) -> None:
        """Check the other ranks, from a loop that waits for threads of this process; at least every second.

        ``moving``: whether those threads made progress since the last call. A rank without progress counts as lost,
        like a silent one, unless it waits for an object store. Raises WorkerError if a rank failed.
        """

    def heartbeat(self) -> Context[None]:
        """While the body runs, report progress for as long as it uses the processor or waits for an object store.

        A failure of another rank is raised in place of what the body returns or raises. On the main thread, it
        interrupts the body.
        """
        return nullcontext()

    def silent_for(self, seconds: float) -> Context[None]:
        """Allow the body ``seconds`` more than the limit without a report of progress, for a single long
        library call.
        """
        return nullcontext()

    def all_gather_objects(self, value: object, *, name: str = "exchange of values") -> list[object]:
        """Collective: every rank's ``value``, by rank; this rank's own is returned as it is.

        Values are sent in a closed encoding (``comm.trees``); raises UsageError for a type outside it.
        """
        return [value]

    def broadcast_object(self, value: object = None, *, source: int = 0, name: str = "broadcast of a value") -> object:
        """Collective: rank ``source``'s ``value`` on every rank; the values of the others are ignored."""
        self.check_rank("source", [source])
        return value

    def send_object(self, value: object, *, to: int) -> None:
        """Send ``value`` to rank ``to``, which receives it with ``receive_object``."""
        raise InternalError(f"a group of one process cannot send to rank {to}")

    def receive_object(self, *, source: int) -> object:
        """The value that rank ``source`` sends with ``send_object``."""
        raise InternalError(f"a group of one process cannot receive from rank {source}")

    def all_stopped(self) -> None:
        """After a failure: wait until every rank has raised it, up to the limit; only briefly if a rank was lost."""

    def close(self) -> None:
        """Collective: leave the group. After a failure, only release resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave the group, as ``close``. The other ranks raise an ``error`` that was raised outside of steps."""


ErrorRecord: TypeAlias = "dict[str, Any]"
"""``{"type": class name, ...}`` with the fields of the error; plain JSON values."""


def encode_error(error: BaseException) -> ErrorRecord | None:
    """``error`` as a record; None for an error without one: a WorkerError, and what this program did not foresee."""
    if isinstance(error, OSError):
        filename = error.filename if isinstance(error.filename, str) else None
        return {"type": "OSError", "args": [error.errno, error.strerror or str(error), filename]}
    if not isinstance(error, FsdpckptError) or isinstance(error, WorkerError):
        return None
    return {"type": type(error).__name__, **error.to_json()}


def decode_error(record: Mapping[str, Any]) -> Exception:
    """The inverse of ``encode_error``. An InternalError if this program does not know the type."""
    return _decoded(record) or InternalError(f"another worker reported an unknown error: {record!r}")


def _decoded(record: Mapping[str, Any]) -> Exception | None:
    fields = dict(record)
    name = fields.pop("type", None)
    if name == "OSError":
        return OSError(*fields["args"])
    kind = getattr(errors, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, FsdpckptError):
        return None
    return kind.from_json(fields)


def original_error(error: WorkerError) -> Exception:
    """The error that made a rank fail, if a single process would end with it too; else ``error`` itself."""
    original = None if error.original is None else _decoded(error.original)
    if original is None:
        return error
    if isinstance(original, FsdpckptError) and error.rank:
        original.details = (*original.details, f"raised by worker {error.rank} in step '{error.step}'")
    return original


def broadcast_object(group: Group, value: object = None, *, source: int = 0) -> object:
    """``Group.broadcast_object``, as a function like those for state dicts."""
    return group.broadcast_object(value, source=source)


class Solo(Group):
    """Rank 0 of 1. ``device``: where tensors are made, a ``torch.device`` or the name of one."""

    def __init__(self, device: object = "cpu") -> None:
        self.rank = 0
        self.world_size = 1
        self.backend = None
        self.device = device
        self.transport = None
        self.control = None
