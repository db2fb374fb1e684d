"""Runs ``fsdpckpt verify``: every problem of one checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdpckpt.cli.errors import as_fsdpckpt_error, show_error
from fsdpckpt.cli.output import Colour, Line, Styled, labelled
from fsdpckpt.command_options import VerifyOptions, keywords_of
from fsdpckpt.errors import FsdpckptError, SourceError
from fsdpckpt.text import key_text, shape_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output
    from fsdpckpt.verify.integrity import Verification

EXAMPLES = """\b
Examples:
  fsdpckpt verify runs/step-1000
  fsdpckpt verify full.pt --finite --exclude '*.attn_mask'
  fsdpckpt verify runs/step-1000 --digests -q > digests.txt

\b
The exit code is 1 if there is any problem, and 3 if SRC cannot be read as a
checkpoint: a rank's file is missing, a file is cut short. A digest is the
SHA-256 of the tensor's elements in row-major order: it does not depend on
layout, container or world size.
"""


def verify_command(output: Output, source: str, options: VerifyOptions) -> int:
    """Check a checkpoint for damage, and list everything that is wrong with it.

    Every element present exactly once, files long enough, replicas equal, checksums right, optimizer state complete and
    its steps in agreement.
    """
    from fsdpckpt.api import verify

    try:
        with output.progress() as progress:
            result = verify(source, **keywords_of(verify, options), progress=progress)
    except (SourceError, OSError) as error:
        return show_error(output, error, _refused_document(source, as_fsdpckpt_error(error)), "verify")
    output.document(lambda: _document(result), "verify")
    output.data(
        f"{digest.sha256 or 'unreadable':64}  {digest.section} {key_text(digest.key)} "
        f"{digest.dtype} {shape_text(digest.shape)}"
        for digest in result.digests
    )
    for problem in result.problems:
        output.data(labelled("problem:", f"{problem.kind}: {problem.message}", Colour.BAD, output.columns))
    for note in result.notes:
        output.message(f"note: {note}")
    output.message(_verdict(result))
    return 0 if result.whole else 1


def _verdict(result: Verification) -> Line:
    begin = len(f"{result.source} is ")
    return Styled(result.summary, Colour.GOOD, begin, begin + len("whole")) if result.whole else result.summary


def _refused_document(source: str, error: FsdpckptError) -> dict[str, object]:
    """The document of a source that cannot be read as a checkpoint: it is not whole."""
    from fsdpckpt.verify.integrity import Verification, unreadable

    return _document(Verification(source, unreadable(error), (), tensors=0, nbytes=0, records=0, replicas=0))


def _document(result: Verification) -> dict[str, object]:
    return {"source": result.source, "whole": result.whole, **asdict(result)}
