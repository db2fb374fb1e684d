"""Prepares a conversion: reads, transforms, lays out and plans. Reads only headers and writes nothing.

Only rank 0 does this, and ``--dry-run`` does nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpckpt import flags
from fsdpckpt.converters.lay_out import lay_out
from fsdpckpt.converters.linking import Linking, choose_linking, link_equal_files
from fsdpckpt.converters.read_source import Asked, read_source
from fsdpckpt.converters.steps.draft import TransformedCheckpoint
from fsdpckpt.converters.target.decide import decide
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.transform import transform
from fsdpckpt.errors import (
    SourceCorruptError,
    SourceError,
    SourceIncompleteError,
    TargetUnwritableError,
)
from fsdpckpt.execute.recorded import recorded_checksums
from fsdpckpt.ir import Section
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.options import ConvertOptions
from fsdpckpt.plan import Plan, make_plan
from fsdpckpt.readers.protocol import require_matches
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A conversion that is ready to be executed."""

    options: ConvertOptions  # as they were given, with the dtype that the source states for ``auto``
    transformed: TransformedCheckpoint
    decision: Decision
    output: Target
    plan: Plan
    linking: Linking

    def outline(self) -> Prepared:
        """What is needed after the plan has run: without literals, write items and copies."""
        files = [TargetFile(file.path, nbytes=file.nbytes) for file in self.output.files]
        return replace(self, output=replace(self.output, files=files), plan=self.plan.outline())


_MOST_BYTES = 1 << 58  # 256 PiB: casts, and copies for several ranks, leave their total below 2**63


def prepare(source: str, target: str, options: ConvertOptions, sources: Sources) -> Prepared:
    """Read ``source``, transform it, lay out ``target`` and plan the copies. Reads tensor data only where a proof needs
    some of it.
    """
    asked = Asked.by(source, target, options, sources)
    try:
        opened = read_source(asked)
        require_matches(options.ignore_file, opened.checkpoint)
        decision = decide(target, options, opened.checkpoint, sources)
        draft = transform(opened.begun(decision, sources), decision)
    except (SourceIncompleteError, SourceCorruptError) as error:
        if options.only is None and (readable := _what_can_be_read(source, error, options, sources)) is not None:
            steps = [error.next_step or error.usual_next_step, readable]
            error.next_step = "; or ".join(f"{step}" for step in steps)
        raise
    checkpoint = draft.checkpoint
    _require_possible_size(checkpoint, target)
    files = checkpoint.files
    linking = choose_linking(options.link, files, target)
    totals_only = options.dry_run and not linking.files  # links are found by comparing the plan of each file
    output = lay_out(draft.transformed, decision, draft.side_files, linking.files)
    output, plan = link_equal_files(output, make_plan(output, totals_only=totals_only), linking, files, sources)
    output.notes += linking.notes(output, files)
    recorded = recorded_checksums(plan, checkpoint, frozenset(link.source for link in output.links))
    checkpoint.checksums = Checksums.joined([checkpoint.checksums, recorded.checksums])
    output.notes += recorded.notes
    as_given = replace(options, dtype=decision.options.dtype)
    return Prepared(as_given, draft.transformed, decision, output, plan, linking)


def _what_can_be_read(source: str, error: SourceError, options: ConvertOptions, sources: Sources) -> str | None:
    """How to take what needs none of the files that are missing or damaged; None if there is nothing."""
    from fsdpckpt.describe import describe_incomplete  # on the way to an error only

    incomplete = describe_incomplete(source, error, sources, options.ignore_file)
    if incomplete is None:
        return None
    for section in incomplete.readable:
        if str(flags.only(section)) in str(error.next_step):
            return None  # it says so
        return f"take the {_WORDS[section]} alone, which is complete: add {flags.only(section)}"
    return None


_WORDS = {Section.MODEL: "model", Section.OPTIM: "optimizer"}


def _require_possible_size(checkpoint: Checkpoint, target: str) -> None:
    """Raises TargetUnwritableError for tensors of more bytes than can be counted in 64 bits when they are laid out: a
    small file may hold any number of expanded ones.
    """
    total = sum(tensor.nbytes for tensor in checkpoint.leaves())
    if total > _MOST_BYTES:
        raise TargetUnwritableError(
            f"{target} would hold {size_text(total)}, more than any file system",
            file=target,
            why="SRC has expanded tensors, each of which stands for many more bytes than are stored",
            next_step=f"leave them out with {flags.exclude('GLOB')}",
        )
