"""Divides ``--max-memory`` among the windows that a rank assembles and the parts of objects that it sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.converters.output.division import assign_parts
from fsdpckpt.errors import UsageError
from fsdpckpt.execute.job import BUFFERS_PER_THREAD, LARGEST_WINDOW, SMALLEST_WINDOW, Budget
from fsdpckpt.plan import Plan
from fsdpckpt.storage.object_file import needs_of_parts, parts_held
from fsdpckpt.storage.parts import MAX_PARTS
from fsdpckpt.storage.upload import COPIES
from fsdpckpt.text import size_text

PART = 5 << 20  # bytes: the smallest part that S3 takes
_ALIGNED = 64  # bytes: parts of any object begin between elements of any dtype, where its tensors do
_EXCHANGE = 8 << 20  # bytes: the least with which workers exchange bytes and write windows
_NEVER_CUT = 1 << 62  # bytes: larger than any object


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """What each rank uses its memory for, in bytes.

    Each thread has its windows, the part that it fills and the part that it sends, which the store's package copies.
    The whole may exceed ``max_memory`` by one part.
    """

    max_memory: int  # of each rank, as the user limits it
    part: int = PART  # the length of each part that is sent
    threads: int = 1
    window: int = SMALLEST_WINDOW
    held: int = 0  # the most parts of which a rank waits for what others write
    shares: bool = True  # whether several ranks send one object

    @property
    def budget(self) -> Budget:
        return Budget(self.threads, self.window)

    @property
    def cut(self) -> int:
        """The length at which an object is divided among ranks."""
        return self.part if self.shares else _NEVER_CUT

    @property
    def for_copies(self) -> int:
        """What is left for windows, and for what workers send each other."""
        return _without_held(self.max_memory, self.part, self.held) - self.threads * _parts_of_thread(self.part)

    @property
    def peak(self) -> int:
        """The most that is in use at a time."""
        used = self.budget.nbytes + self.threads * _parts_of_thread(self.part) + self.held * self.part
        return min(used, self.max_memory + self.part)


def divide_memory(plan: Plan, budget: Budget, *, max_memory: int, workers: int) -> StreamMemory:
    """The division for ``plan``, with at most the threads of ``budget``. Raises UsageError if ``max_memory`` is less
    than one thread needs.
    """
    longest = max((file.nbytes for file in plan.files), default=0)
    part = max(PART, -(-longest // (MAX_PARTS * _ALIGNED)) * _ALIGNED)
    needed = memory_for(part, workers)
    if needed > max_memory:
        raise UsageError(
            f"{flags.max_memory} is too small to send parts of {size_text(part)}",
            expected=f"at least {size_text(needed)}",
            found=size_text(max_memory),
            why=f"a store takes at most {MAX_PARTS:,} parts of a file; the largest has {size_text(longest)}",
            next_step=f"{flags.max_memory(f'{-(-needed >> 20)}MiB')}, or {flags.staging('DIR')} with room for all "
            "of the output",
        )
    # Ranks share an object only if there is memory for the parts that wait for each other's checksums.
    held = _most_held(plan, part, workers)
    shares = needed + held * part <= max_memory
    held = held if shares else 0
    # As many threads as have room for windows of half the usual length, and then the longest windows for these.
    available, of_thread = _without_held(max_memory, part, held), _parts_of_thread(part)
    threads = max(min(budget.threads, available // (of_thread + BUFFERS_PER_THREAD * (LARGEST_WINDOW // 2))), 1)
    window = (available // threads - of_thread) // BUFFERS_PER_THREAD // SMALLEST_WINDOW * SMALLEST_WINDOW
    window = max(min(window, LARGEST_WINDOW), SMALLEST_WINDOW)
    return StreamMemory(max_memory, part, threads, window, held, shares)


def memory_for(part: int, workers: int) -> int:
    """The least ``--max-memory`` with which parts of ``part`` bytes are sent: what one thread needs, less one part."""
    return COPIES * part + (BUFFERS_PER_THREAD * SMALLEST_WINDOW if workers == 1 else _EXCHANGE)


def _without_held(max_memory: int, part: int, held: int) -> int:
    """Bytes of the whole but the parts that wait for other ranks."""
    return max_memory + part - held * part


def _parts_of_thread(part: int) -> int:
    """Bytes of the parts of one thread: of the one that it fills, and of the one that it sends."""
    return (COPIES + 1) * part


def _most_held(plan: Plan, part: int, workers: int) -> int:
    """The most parts that a rank holds until others know the checksums in them."""
    if workers == 1:
        return 0
    held: Counter[int] = Counter()
    for segment in assign_parts(plan, range(workers), part):
        file = plan.files[segment.file]
        if (segment.begin, segment.end) != (0, file.nbytes):
            needs = needs_of_parts(file.nbytes, part, file.checksums)
            held[segment.owner] += parts_held(needs, part, segment.begin, segment.end)
    return max(held.values(), default=0)
