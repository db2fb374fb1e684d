"""``fsdpckpt verify``: every problem of one checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.options import AsJson, Quiet, Source, Threads, UnitsFile
from fsdpckpt.cli.output import Output
from fsdpckpt.text import plural, shape_text, size_text

if TYPE_CHECKING:
    from fsdpckpt.verify.integrity import Verification

__all__ = ["verify_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt verify runs/step-1000
  fsdpckpt verify full.pt --finite
  fsdpckpt verify runs/step-1000 --digests -q > digests.txt

\b
The exit code is 1 when there is any problem. A digest is SHA-256 over the tensor's elements in row-major order: it does
not depend on layout, container or world size.
"""


def verify_command(
    source: Source,
    *,
    digests: Annotated[bool, typer.Option("--digests", help="Print a layout-independent SHA-256 per tensor.")] = False,
    finite: Annotated[
        bool, typer.Option("--finite", help="Report NaN and Inf as problems; reads every tensor.")
    ] = False,
    units: UnitsFile = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Prove a checkpoint whole, or list everything that is wrong with it.

    Every element present exactly once, files long enough, replicas equal, checksums right, optimizer state complete and
    its steps agreeing.
    """
    output = Output(as_json=as_json, quiet=quiet)

    def body() -> int:
        from fsdpckpt.api import verify

        with output.progress() as progress:
            result = verify(source, digests=digests, finite=finite, units=units, threads=threads, progress=progress)
        output.document(lambda: _document(result), "verify")
        output.data(
            f"{one.sha256 or 'unreadable':64}  {one.section} {one.key} {one.dtype} {shape_text(one.shape)}"
            for one in result.digests
        )
        output.data(f"problem: {problem.kind}: {problem.message}" for problem in result.problems)
        for note in result.notes:
            output.talk(f"note: {note}")
        output.talk(_verdict(result))
        return 0 if result.whole else 1

    return guarded(output, body)


def _verdict(result: Verification) -> str:
    checked = f"{plural(result.tensors, 'tensor')}, {size_text(result.nbytes)}"
    also = f"{plural(result.records, 'checksum')} and {plural(result.replicas, 'replica')} compared"
    if result.whole:
        return f"{result.source} is whole: {checked}; {also}"
    return f"{result.source} has {plural(len(result.problems), 'problem')}: {checked}; {also}"


def _document(result: Verification) -> dict[str, object]:
    return {
        "source": result.source,
        "whole": result.whole,
        "problems": [asdict(problem) for problem in result.problems],
        "digests": [asdict(one) for one in result.digests],
        "tensors": result.tensors,
        "nbytes": result.nbytes,
        "records": result.records,
        "replicas": result.replicas,
        "notes": list(result.notes),
    }
