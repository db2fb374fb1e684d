"""Why parameters are not named without the units file beside a checkpoint: there is one that cannot be used.

What a units file says is never inferred instead: it was written because files of the checkpoint do not say it.
"""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint


def units_beside_unreadable(checkpoint: Checkpoint) -> SourceCorruptError | None:
    """The error if no units file beside ``checkpoint`` can be read, although there is one."""
    if checkpoint.units is not None or checkpoint.origin.units_from or not checkpoint.origin.units_refused:
        return None
    return SourceCorruptError(
        f"the units file beside {checkpoint.source} cannot be used, and what it says may not be inferred instead",
        details=checkpoint.origin.units_refused,
        why="it was damaged, or changed by hand, or a newer fsdpckpt wrote it",
        next_step=f"name an intact one with {flags.units('FILE')}, or leave this one out with "
        f"{flags.ignore_file('GLOB')}",
    )
