"""Opens the finished output again, through the readers, and holds it against what was meant to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import nullcontext

from fsdpckpt.converters.options import VerifyLevel
from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.units import Units
from fsdpckpt.planner.flat_match import Mismatch, match
from fsdpckpt.planner.parameter_order import from_units
from fsdpckpt.planner.rekey import to_names
from fsdpckpt.planner.unflatten import unflatten
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
    units: Units | None,
    dtypes: DtypeRule,
    level: VerifyLevel,
    sources: Sources,
    progress: Progress,
    written_sources: Sources | None = None,
    max_memory: int | None = None,
) -> dict[str, str]:
    """Every tensor of ``expected`` must be in the output at ``path`` with its shape, dtype and bytes in its file.

    With level ``full`` every element is read from both sides and compared, casts applied; returns the SHA-256 of each
    tensor by ``<section> <key>``, empty with any other level. ``written_sources``: what opens the output, where it does
    not lie on this machine alone. ``max_memory``: bytes of buffers to read with. Raises InternalError: an output that
    fails is discarded, never committed.
    """
    sums: dict[str, str] = {}
    with nullcontext(written_sources) if written_sources is not None else Sources() as opener:
        written = _reopen(path, opener, locate=level is VerifyLevel.FULL)
        if units is not None:
            written = _named(written, units, path)
        wrong = [problem.message for problem in written.problems if problem.fatal]
        empty = frozenset(name for name, param in units.params().items() if not param.numel) if units else frozenset()
        found = {(named.section, named.key): named for named in _compared(written, empty)}
        pairs = []
        for named in _compared(expected, empty):
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
                    (named.tensor, expected.files, sources),
                    (other.tensor, written.files, opener),
                    total,
                    max_memory=max_memory,
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


def _named(written: Checkpoint, units: Units, path: str) -> Checkpoint:
    """Flattened output as whole tensors by name, proved by the units it was written with."""
    found = match(written, units)
    if isinstance(found, Mismatch):
        raise InternalError(
            f"the flattened output does not fit its own units; {path} was discarded", details=found.contradictions[:20]
        )
    named = unflatten(written, found)
    if named.optim is None or named.optim.key_type != "id":
        return named
    return to_names(named, from_units(units, "the units it was written with"))  # NO_SHARD and one rank cut nothing


def _compared(checkpoint: Checkpoint, empty: Collection[str]) -> Iterator[NamedTensor]:
    """Model and optimizer states: their keys are the same in every container, those of extras follow each container.

    States of parameters without elements, ``empty``, have no place in slices.
    """
    for named in checkpoint.tensors():
        state = named.section is Section.OPTIM and named.state is not None and named.param not in empty
        if named.section is Section.MODEL or state:
            yield named


def _form(named: NamedTensor) -> str:
    return f"{named.tensor.dtype.name} {list(named.tensor.shape)}"
