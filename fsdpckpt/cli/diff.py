"""``fsdpckpt diff``: one sigil a key."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.options import AsJson, PartChoice, Quiet, Threads, UnitsFile
from fsdpckpt.cli.output import Output

if TYPE_CHECKING:
    from fsdpckpt.verify.compare import Difference

__all__ = ["diff_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt diff runs/step-1000 full.pt
  fsdpckpt diff runs/step-1000 runs/step-1000-on-3-ranks --only model
  fsdpckpt diff a.pt b.pt --rtol 1e-5 --atol 1e-8
  fsdpckpt diff a.pt b.pt | grep -v '^='

\b
Sigils: = same, * differs, - only in A, + only in B. The exit code is 1 when anything differs.
"""


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A file, a directory or a URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)],
    *,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", min=0.0, metavar="X", help="Relative tolerance; default: every byte.", show_default=False
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            "--atol", min=0.0, metavar="X", help="Absolute tolerance; default: every byte.", show_default=False
        ),
    ] = None,
    only: Annotated[PartChoice | None, typer.Option("--only", help="Only this section.", show_default=False)] = None,
    units: UnitsFile = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Keys, shapes, dtypes, every byte, param groups and extras.
    """
    output = Output(as_json=as_json, quiet=quiet)

    def body() -> int:
        from fsdpckpt.api import diff

        with output.progress() as progress:
            result = diff(
                a,
                b,
                rtol=rtol,
                units=units,
                atol=atol,
                only=only.value if only is not None else None,
                threads=threads,
                progress=progress,
            )
        for note in result.notes:
            output.talk(f"note: {note}")
        output.document(lambda: _document(a, b, result), "diff")
        output.data(
            f"{entry.sigil} {entry.section} {entry.key}" + (f"  {entry.detail}" if entry.detail else "")
            for entry in result.entries
        )
        output.talk(
            f"{result.count('=')} same, {result.count('*')} differ, {result.count('-')} only in {a}, "
            f"{result.count('+')} only in {b}"
        )
        return 0 if result.same else 1

    return guarded(output, body)


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
