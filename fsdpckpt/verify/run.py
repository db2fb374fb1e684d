"""Opens a checkpoint and verifies it: the function behind ``fsdpckpt verify`` and ``fsdpckpt.verify(src)``."""

from __future__ import annotations

from collections.abc import Callable

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.progress import Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.integrity import Verification, verify_checkpoint
from fsdpckpt.verify.manifest import damaged_files
from fsdpckpt.verify.parallel import threads_for

__all__ = ["verify"]


def verify(
    source: str,
    *,
    name: Callable[[Checkpoint, Sources], Checkpoint] | None = None,
    digests: bool = False,
    finite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Prove the checkpoint at ``source`` whole: ``.problems`` lists all that is wrong, ``.whole`` says if nothing is.

    ``digests`` adds a layout-independent SHA-256 per tensor, ``finite`` reports NaN and Inf. Raises SourceError (exit
    code 3) when the source cannot be read as a checkpoint at all. ``name`` turns the slices of a flattened checkpoint
    into named tensors.
    """
    with Sources() as sources:
        try:
            checkpoint = open_checkpoint(source, sources=sources, locate=True)
        except SourceError as error:  # that is one thing which is wrong: say all that can be known
            error.details = tuple(dict.fromkeys((*error.details, *damaged_files(source, sources))))
            raise
        if name is not None:
            checkpoint = name(checkpoint, sources)
        count = threads if threads is not None else threads_for(checkpoint)
        return verify_checkpoint(
            checkpoint, sources=sources, digests=digests, finite=finite, threads=count, progress=progress
        )
