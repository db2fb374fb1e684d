"""Runs ``fsdpckpt diff``: one sigil per key that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdpckpt.cli.output import Colour, Line, Styled, labelled
from fsdpckpt.command_options import DiffOptions, keywords_of
from fsdpckpt.text import count_text, fold, key_text, numbers_text, plural

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Output
    from fsdpckpt.verify.compare import Difference

EXAMPLES = """\b
Examples:
  fsdpckpt diff runs/step-1000 full.pt
  fsdpckpt diff runs/step-1000 runs/step-1000-on-3-ranks --only model
  fsdpckpt diff a.pt b.pt --rtol 1e-5 --atol 1e-8
  fsdpckpt diff a.pt b.pt --all

\b
Sigils: = same (with --all), * differs, - only in A, + only in B.
The exit code is 1 if anything differs. Extras that only one side can hold
(random states of ranks that the other does not have, what only one of two
frameworks saves) are shown in one line each and do not count, unless
--strict is given.
"""


def diff_command(output: Output, a: str, b: str, options: DiffOptions) -> int:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Keys, shapes, dtypes, every byte, param groups and extras.
    """
    from fsdpckpt.api import diff

    with output.progress() as progress:
        result = diff(a, b, **keywords_of(diff, options), progress=progress)
    for note in result.notes:
        output.message(f"note: {note}")
    output.document(lambda: _document(a, b, result), "diff")
    output.data(_lines(result, output.columns, everything=options.all_keys))
    output.message(result.summary)
    return 0 if result.same else 1


_COLOURS = {"*": Colour.CHANGED, "-": Colour.BAD, "+": Colour.NEW}


def _lines(result: Difference, columns: int | None, *, everything: bool) -> Iterator[Line]:
    """``columns``: of a terminal, on which keys of repeated layers with the same difference share a line, as do all
    keys of a section that only one side has.
    """
    shown = [entry for entry in result.entries if (everything or entry.sigil != "=") and entry.counts]
    rows = [(entry.key, 1, entry) for entry in shown]
    if columns is not None and not everything:
        sigils: dict[str, set[str]] = {}
        for entry in result.entries:
            sigils.setdefault(entry.section, set()).add(entry.sigil)
        alone = {section: sigil for section, (sigil, *more) in sigils.items() if sigil in ("-", "+") and not more}
        for section, sigil in alone.items():
            if count := sum(entry.section == section for entry in shown):
                text = f"{sigil} {section}  all {plural(count, 'key')}, only in {'A' if sigil == '-' else 'B'}"
                yield Styled(text, _COLOURS[sigil], end=1)
        shown = [entry for entry in shown if entry.section not in alone]
        folded = fold((entry.key, (entry.sigil, entry.section, entry.detail, entry.rank)) for entry in shown)
        rows = [(keys.key, len(keys.members), shown[keys.members[0]]) for keys in folded]
    for key, count, entry in rows:
        times = f"  x{count_text(count)}" if count > 1 else ""
        text = f"{entry.section} {key_text(key)}{times}" + (f"  {entry.detail}" if entry.detail else "")
        yield from labelled(entry.sigil, text, _COLOURS.get(entry.sigil), columns)
    for sigil, side in (("-", "A"), ("+", "B")):
        not_counted = [entry for entry in result.entries if entry.sigil == sigil and not entry.counts]
        of_ranks = [entry for entry in not_counted if entry.rank is not None]
        if of_ranks:
            ranks = numbers_text(sorted({entry.rank for entry in of_ranks if entry.rank is not None}))
            yield f"{sigil} extra rank{ranks}  {plural(len(of_ranks), 'value')} of ranks, only in {side}, not counted"
        tops = Counter(
            f"extra {entry.key.partition('.')[0]}" if entry.section == "extra" else str(entry.section)
            for entry in not_counted
            if entry.rank is None
        )
        for top, number in tops.items():
            yield f"{sigil} {top}  {plural(number, 'value')}, only in {side}, not counted"


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
            "not_counted": sum(not entry.counts for entry in result.entries),
        },
        "entries": [asdict(entry) for entry in result.entries],
        "notes": list(result.notes),
    }
