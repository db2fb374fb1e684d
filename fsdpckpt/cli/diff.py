"""Runs ``fsdpckpt diff``: one sigil per key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdpckpt.options import DiffOptions

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output
    from fsdpckpt.verify.compare import Difference

__all__ = ["diff_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt diff runs/step-1000 full.pt
  fsdpckpt diff runs/step-1000 runs/step-1000-on-3-ranks --only model
  fsdpckpt diff a.pt b.pt --rtol 1e-5 --atol 1e-8
  fsdpckpt diff a.pt b.pt | grep -v '^='

\b
Sigils: = same, * differs, - only in A, + only in B.
The exit code is 1 if anything differs.
"""


def diff_command(output: Output, a: str, b: str, options: DiffOptions) -> int:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Keys, shapes, dtypes, every byte, param groups and extras.
    """
    from fsdpckpt.api import diff

    with output.progress() as progress:
        result = diff(
            a,
            b,
            rtol=options.rtol,
            atol=options.atol,
            only=options.only,
            units=options.units,
            threads=options.threads,
            progress=progress,
        )
    for note in result.notes:
        output.message(f"note: {note}")
    output.document(lambda: _document(a, b, result), "diff")
    output.data(
        f"{entry.sigil} {entry.section} {entry.key}" + (f"  {entry.detail}" if entry.detail else "")
        for entry in result.entries
    )
    output.message(
        f"{result.count('=')} same, {result.count('*')} differ, {result.count('-')} only in {a}, "
        f"{result.count('+')} only in {b}"
    )
    return 0 if result.same else 1


def _document(a: str, b: str, result: Difference) -> dict[str, object]:
    return {
        "a": a,
        "b": b,
        "same": result.same,
        "counts": {
            "same": result.count("="),
            "differ": result.count("*"),
            "only_a": result.count("-"),
            "only_b": result.count("+"),
        },
        "entries": [asdict(entry) for entry in result.entries],
        "notes": list(result.notes),
    }
