"""Takes one copy of what every rank has whole, once it is certain that the copies are equal, or a buffer's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.buffers import known_buffers, trained_keys, undecided_copies
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, Problem
from fsdpckpt.ir.copies import CopiesJudge, DifferentCopies, Meaning, differing_copies, unsummed_copies
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.ir.placements import PerRank, Whole
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.selection import KEYS_IN_MESSAGE
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.elements import check_replicas, replica_sets


def take_equal_copies(draft: Draft, decision: Decision) -> Draft:
    """Take the lowest rank's copy of what every rank has; a note lists the buffers that differ between ranks.

    Raises SourceCorruptError if ranks differ where they must agree, NeedsInformationError if nothing says whether they
    must.
    """
    buffers = decision.options.buffers
    checkpoint, needed = _with_equal_copies(draft.checkpoint, trained_keys(draft.opened), buffers, draft.sources)
    return replace(draft, checkpoint=checkpoint, buffers_needed=needed)


def _with_equal_copies(
    checkpoint: Checkpoint, trained: Collection[str], buffers: Sequence[str], sources: Sources
) -> tuple[Checkpoint, bool]:
    """``checkpoint``, with a note on the buffers that differ between ranks: the lowest rank's copy is taken.

    ``trained``: see ``CopiesJudge``; ``buffers``: the globs of ``--buffers``. Also returns whether these were needed.
    """
    judge = CopiesJudge(checkpoint, buffers, trained)
    found = [*differing_copies(checkpoint, judge), *_differing_bytes(checkpoint, judge, sources)]
    wrong = [each.problem() for each in found if each.meaning is Meaning.CONTRADICTION]
    if wrong:
        raise fatal(wrong, source=checkpoint.source)
    open_cases = {problem.key: problem for problem in undecided_copies(checkpoint, buffers)}
    open_cases |= {each.named.key: each.problem() for each in found if each.meaning is Meaning.OPEN}
    if open_cases:
        raise _undecided(checkpoint.source, list(open_cases.values()))
    keys = tuple(dict.fromkeys(each.named.key for each in found))
    whole, settled = _with_whole_buffers(checkpoint, buffers)
    if not keys:
        return whole, bool(settled)
    told = known_buffers(checkpoint, buffers) - known_buffers(checkpoint)
    needed = bool(settled) or not told.isdisjoint(keys)
    count = plural(len(keys), "model key", "differ")
    message = f"{count} between ranks; the lowest rank's copy is used: {some_of(keys, KEYS_IN_MESSAGE)}"
    return whole.noted(Note("replicas", message, keys=keys)), needed


def _undecided(source: str, problems: Sequence[Problem]) -> NeedsInformationError:
    return NeedsInformationError(
        f"{source}: cannot tell whether one rank's copy of {plural(len(problems), 'model tensor')} is complete",
        details=[problem.message for problem in problems],
        key=problems[0].key,
        why="each rank has its own copy of a buffer; of a parameter it may hold only a part (tensor parallelism), or "
        "a different one than the other ranks (experts, ignored_params)",
        next_step=f"add {flags.buffers('GLOB')} for the buffers (the lowest rank's copy is used); save "
        "parameters as DTensors, or give the file of one rank",
    )


def _differing_bytes(checkpoint: Checkpoint, judge: CopiesJudge, sources: Sources) -> Iterator[DifferentCopies]:
    """What ``differing_copies`` finds, for the copies of which some have no checksum: their bytes are read."""
    readers = None
    for named in unsummed_copies(checkpoint):
        readers = readers or (BlockReader(checkpoint.files, sources), BlockReader(checkpoint.files, sources))
        for rows in replica_sets(named.tensor):
            for problem in check_replicas(readers, named, [rows]):
                yield judge.judge(named, int(named.tensor.chunks.rank[rows[0]]), problem.rank or 0)


def _with_whole_buffers(checkpoint: Checkpoint, buffers: Sequence[str]) -> tuple[Checkpoint, list[str]]:
    """``checkpoint`` with the known buffers whole that might have been parts. Also returns their keys."""
    params = checkpoint.params
    per_rank = {key: leaf for key, leaf in params.items() if isinstance(leaf, Tensor) and isinstance(leaf.cut, PerRank)}
    if not per_rank or checkpoint.model is None:
        return checkpoint, []
    known = known_buffers(checkpoint, buffers)
    whole = {key: replace(leaf, sharded=False, cut=Whole()) for key, leaf in per_rank.items() if key in known}
    model = ModelState({**params, **whole}, checkpoint.model.metadata)
    return replace(checkpoint, model=model), list(whole)
