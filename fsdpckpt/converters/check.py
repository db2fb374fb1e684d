"""Opens the finished output again, through the readers, and holds it against what was meant to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from fsdpckpt.converters.options import VerifyLevel
from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.progress import Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.content import first_difference
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["check_output"]


def check_output(
    expected: Checkpoint,
    path: str,
    *,
    dtypes: DtypeRule,
    level: VerifyLevel,
    sources: Sources,
    progress: Progress,
) -> dict[str, str]:
    """Every tensor of ``expected`` must be in the output at ``path`` with its shape, dtype and bytes in its file.

    With level ``full`` every element is read from both sides and compared, casts applied; returns the SHA-256 of each
    tensor by ``<section> <key>``, empty with any other level. Raises InternalError: an output that fails is discarded,
    never committed.
    """
    sums: dict[str, str] = {}
    with Sources() as written_sources:
        written = _reopen(path, written_sources, locate=level is VerifyLevel.FULL)
        wrong = [problem.message for problem in written.problems if problem.fatal]
        found = {(named.section, named.key): named for named in _compared(written)}
        pairs = []
        for named in _compared(expected):
            other = found.pop((named.section, named.key), None)
            dtype = dtypes.of(named.section, named.state, named.tensor)
            if other is None:
                wrong.append(f"{named.section} {named.key} was not written")
            elif (other.tensor.shape, other.tensor.dtype) != (named.tensor.shape, dtype):
                wrong.append(f"{named.section} {named.key} was written as {_form(other)}, not as {_form(named)}")
            else:
                pairs.append((named, other))
        wrong.extend(f"{named.section} {named.key} was written and should not be there" for named in found.values())
        if level is VerifyLevel.FULL and not wrong:
            progress.begin("verify", sum(other.tensor.nbytes for _, other in pairs))
            for named, other in pairs:
                total = hashlib.sha256()
                at = first_difference(
                    (named.tensor, expected.files, sources), (other.tensor, written.files, written_sources), total
                )
                progress.advance(other.tensor.nbytes)
                if at is not None:
                    wrong.append(f"{named.section} {named.key} differs from the source at element {at}")
                sums[f"{other.section} {other.key}"] = total.hexdigest()
            progress.end()
    if wrong:
        raise InternalError(
            f"the output does not read back as it was planned; {path} was discarded",
            details=wrong[:20],
            next_step="please report this with the command line and the output of `fsdpckpt inspect` on the source",
        )
    return sums


def _reopen(path: str, sources: Sources, *, locate: bool) -> Checkpoint:
    try:
        return open_checkpoint(path, sources=sources, locate=locate)
    except FsdpckptError as error:  # our own output: whatever is wrong with it is no fault of the user's source
        raise InternalError(f"the output does not read back: {error.what}", details=error.details) from error


def _compared(checkpoint: Checkpoint) -> Iterator[NamedTensor]:
    """Model and optimizer states: their keys are the same in every container, those of extras follow each container."""
    for named in checkpoint.tensors():
        if named.section is Section.MODEL or (named.section is Section.OPTIM and named.state is not None):
            yield named


def _form(named: NamedTensor) -> str:
    return f"{named.tensor.dtype.name} {list(named.tensor.shape)}"
