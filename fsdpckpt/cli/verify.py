"""Runs ``fsdpckpt verify``: every problem of one checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdpckpt.cli.errors import as_fsdpckpt_error, show_error
from fsdpckpt.cli.output import Colour, Line, Styled, UnbrokenLine, labelled
from fsdpckpt.errors import FsdpckptError, SourceError
from fsdpckpt.options.commands import VerifyOptions, keywords_of
from fsdpckpt.text import fold_notes, key_text, plural, shape_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.verify.integrity import Verification
    from fsdpckpt.verify.resumption import Resumption

EXAMPLES = """\b
Examples:
  fsdpckpt verify runs/step-1000
  fsdpckpt verify full.pt --finite --exclude '*.attn_mask'
  fsdpckpt verify runs/step-1000 --digests -q > digests.txt
  fsdpckpt verify runs/step-1000 --junit verify.xml
  fsdpckpt verify checkpoint-500 --for trainer --world-size 6

\b
The exit code is 1 if there is any problem, or if the framework of --for does
not resume from SRC. It is 3 if SRC cannot be read as a checkpoint: a rank's
file is missing, a file is cut short. A digest is the SHA-256 of the tensor's
elements in row-major order: it does not depend on layout, container or world
size.
"""


def verify_command(output: Streams, source: str, options: VerifyOptions) -> int:
    """Check a checkpoint for damage, and list everything that is wrong with it.

    Every element present exactly once, files long enough, replicas equal, checksums right, optimizer state complete and
    its steps in agreement.
    """
    from fsdpckpt.api import verify

    if options.junit is not None:  # before hours of reading, not after them
        from fsdpckpt.cli.junit import RESULTS

        RESULTS.check(options.junit, source)
    begun = time.monotonic()
    try:
        with output.progress() as progress:
            result = verify(source, **keywords_of(verify, options), progress=progress)
    except Exception as error:  # whatever it is: an earlier result must not stand for this run
        refused = as_fsdpckpt_error(error)
        _write_junit(source, options, refused, begun)
        if not isinstance(refused, SourceError):  # not of the source: nothing is known of that
            raise
        return show_error(output, error, _refused_document(source, refused), "verify")
    _write_junit(source, options, result, begun)
    output.document(lambda: _document(result), "verify")
    output.data(
        f"{digest.sha256 or 'unreadable':64}  {digest.section} {key_text(digest.key)} "
        f"{digest.dtype} {shape_text(digest.shape)}"
        for digest in result.digests
    )
    for problem in result.problems:
        output.data(labelled("problem:", f"{problem.kind}: {problem.message}", Colour.BAD, output.columns))
    for note in fold_notes(result.notes):
        output.message(f"note: {note}")
    output.message(_verdict(result))
    resumption = result.resumption
    if resumption is not None:
        _show_resumption(output, result.source, resumption)
    return 0 if result.whole and (resumption is None or resumption.resumes) else 1


def _write_junit(source: str, options: VerifyOptions, result: Verification | FsdpckptError, begun: float) -> None:
    if options.junit is not None:
        from fsdpckpt.cli.junit import write_results

        write_results(options.junit, source, result, searched=options.finite, seconds=time.monotonic() - begun)


def _show_resumption(output: Streams, source: str, resumption: Resumption) -> None:
    """What the framework would do with the checkpoint, and the command that makes one from which it resumes."""
    ranks = plural(resumption.world_size, "rank")
    for reason in resumption.missing:
        output.data(labelled("problem:", f"resume: {reason}", Colour.BAD, output.columns))
    for change in resumption.changes:
        output.warning(change)
    if resumption.resumes:
        output.message(f"{resumption.flavor} resumes from {source} on {ranks}")
        return
    output.message(f"{resumption.flavor} does not resume from {source} on {ranks}")
    if resumption.beyond_conversion:
        output.message("no conversion can add what is missing: only the job that saves can")
        return
    begin = "this conversion alone does not fix" if resumption.command else "cannot be converted"
    for reason in resumption.still_missing:
        output.message(f"{begin}: {reason}")
    if resumption.command is not None:
        output.message(UnbrokenLine(f"next: {resumption.command}"))


def _verdict(result: Verification) -> Line:
    begin = len(f"{result.source} is ")
    return Styled(result.summary, Colour.GOOD, begin, begin + len("whole")) if result.whole else result.summary


def _refused_document(source: str, error: FsdpckptError) -> dict[str, object]:
    """The document of a source that cannot be read as a checkpoint: it is not whole."""
    from fsdpckpt.verify.integrity import Verification, unreadable

    return _document(Verification(source, unreadable(error), (), tensors=0, nbytes=0, records=0, replicas=0))


def _document(result: Verification) -> dict[str, object]:
    document = {"source": result.source, "whole": result.whole, **asdict(result)}
    document["problems"] = [problem.to_json() for problem in result.problems]
    found = result.resumption
    if found is None:
        del document["resumption"]
    else:
        document["resumption"] = {**asdict(found), "resumes": found.resumes}
    return document
