"""Opens a checkpoint as a mapping of names to tensors that are read on demand."""

from __future__ import annotations

from contextlib import ExitStack

from fsdpckpt.execute.read_check import ReadCheck
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.lazy import LazyCheckpoint
from fsdpckpt.options.commands import InspectOptions
from fsdpckpt.queries.opening import by_name, open_all
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import without_repeats


def open_lazily(source: str, options: InspectOptions, *, verify: bool) -> LazyCheckpoint:
    """The checkpoint at ``source``, which closes its files when it is closed. ``verify``: as for ``ReadCheck``."""
    with ExitStack() as until_opened:
        sources = until_opened.enter_context(Sources())
        (checkpoint,) = open_all([source], sources, options.units, options.ignore_file)
        changed = checkpoint.origin.changed  # of files that say where everything is
        damaged = [problem for problem in checkpoint.problems if problem.fatal and problem.file in changed]
        if damaged:
            raise fatal(damaged, source=checkpoint.source)
        named = by_name(without_repeats(checkpoint, sources), sources, options)
        lazy = LazyCheckpoint(named, ReadCheck(named, sources, everything=verify))
        until_opened.pop_all()
        return lazy
