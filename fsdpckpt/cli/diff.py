"""Runs ``fsdpckpt diff``: where both sides stood, how far each module moved, and one sigil per key that differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fsdpckpt.cli.output import Cell, Colour, Line, Name, Styled, cut_line, labelled, table_lines
from fsdpckpt.options.commands import DiffOptions, keywords_of
from fsdpckpt.text import count_text, fold, fold_notes, key_text, numbers_text, plural, rate_text, size_text, step_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.verify.changes import ModuleChange
    from fsdpckpt.verify.difference import ComparedKey, Difference

EXAMPLES = """\b
Examples:
  fsdpckpt diff runs/step-1000 full.pt
  fsdpckpt diff runs/step-1000 runs/step-1000-on-3-ranks --only model
  fsdpckpt diff a.pt b.pt --rtol 1e-5 --atol 1e-8
  fsdpckpt diff a.pt b.pt --all
  fsdpckpt diff runs/step-1000 hf --map torchtitan-llama3 --only model
  fsdpckpt diff runs/step-1000 runs/step-2000 --report diff.html

\b
On a terminal the steps and learning rates of both come first, then how far
each module moved: the largest |A - B|, and "rel.", the norm of A - B divided
by the norm of A. --all lists every key instead.

\b
Sigils: = same (with --all), * differs, - only in A, + only in B.
The exit code is 1 if anything differs. Extras that only one side can hold
(random states of ranks that the other does not have, what only one of two
frameworks saves) are shown in one line each and do not count, unless
--strict is given.
"""


def diff_command(output: Streams, a: str, b: str, options: DiffOptions) -> int:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Keys, shapes, dtypes, every byte, param groups and extras.
    """
    from fsdpckpt.api import diff

    if options.report is not None:  # before an hour of reading, not after it
        from fsdpckpt.report import check_diff_report

        check_diff_report(options.report, (a, b))
    with output.progress() as progress:
        result = diff(a, b, **keywords_of(diff, options), progress=progress)
    if options.report is not None:
        from fsdpckpt.report import write_diff_report

        nbytes = write_diff_report(result, options.report, (a, b))
        output.message(f"{options.report}: {size_text(nbytes)}")
    for note in fold_notes(result.notes):
        output.message(f"note: {note}")
    output.document(lambda: _document(a, b, result, everything=options.all_keys), "diff")
    columns = output.columns
    if columns is not None and not options.all_keys and not result.same:
        output.data(_overview(result, columns))
    output.data(_lines(result, columns, everything=options.all_keys))
    output.message(result.summary)
    return 0 if result.same else 1


_COLOURS = {"*": Colour.CHANGED, "-": Colour.BAD, "+": Colour.NEW}
LONGEST_LIST = 8  # values of a list in the extras; the values of a longer one are one entry
FEW = 12  # keys that differ, of which each is shown although its module is, too
MAX_MODULES = 30  # rows: the modules that moved furthest
NARROWEST_MODULE = 26  # columns of a module's name
WIDTH_OF_KIND = 18  # columns of the two numbers of one kind of tensors


def _overview(result: Difference, columns: int) -> Iterator[Line]:
    """For a terminal: the steps and the learning rates of both sides, and a table of the modules."""
    from fsdpckpt.verify.changes import changed_kinds, module_changes, standings

    sides = standings(result)
    rows: list[Sequence[Cell]] = []
    for letter, source, side in zip("AB", result.sources, sides, strict=True):
        steps = f"step {_counted(side.steps, 'parameter', step_text)}" if side.steps else ""
        rates = f"lr {_counted(side.rates, 'group', rate_text)}" if side.rates else ""
        rows.append((letter, Name(source), steps, rates))
    yield from table_lines(rows, right=(), columns=columns)
    modules = module_changes(result.entries)
    kinds = changed_kinds(result)
    if not modules:
        return
    at_once = max((columns - NARROWEST_MODULE) // WIDTH_OF_KIND, 1)
    for first in range(0, len(kinds), at_once):
        yield ""
        yield from _module_table(modules, kinds[first : first + at_once], columns)
    yield Styled("max: the largest |A - B|; rel.: the norm of A - B divided by the norm of A", Colour.ASIDE)
    yield from _furthest_texts(result, columns)
    yield ""


def _counted(values: Mapping[float, int], word: str, text: Callable[[float], str]) -> str:
    """``1,000``; of several values how often each: ``1,000 (198 parameters), 0 (3 parameters)``."""
    by_count = sorted(values.items(), key=lambda item: -item[1])
    if len(by_count) == 1:
        return text(by_count[0][0])
    shown = ", ".join(f"{text(value)} ({plural(count, word)})" for value, count in by_count[:3])
    return shown + (f" and {len(by_count) - 3} more" if len(by_count) > 3 else "")


def _module_table(modules: Sequence[ModuleChange], kinds: Sequence[str], columns: int) -> Iterator[Line]:
    """The largest |A - B| and the relative norm of each module, for each of ``kinds``."""
    shown = [module for module in modules if not module.changes.keys().isdisjoint(kinds)]
    left = len(shown) - MAX_MODULES
    if left > 0:
        by_distance = sorted(shown, key=lambda module: -max(_distance(module, kind) for kind in kinds))
        furthest = by_distance[:MAX_MODULES]
        shown = [module for module in shown if module in furthest]
    rows: list[Sequence[Cell]] = []
    for module in shown:
        cells: list[Cell] = [Name(module.module)]
        for kind in kinds:
            change = module.changes.get(kind)
            for number in (None, None) if change is None else (change.largest, change.relative):
                cells.append("-" if number is None else f"{number:.2g}")
        rows.append(cells)
    headings: list[Cell] = ["module", *(["max", "rel."] * len(kinds))]
    heading, *lines = table_lines([headings, *rows], right=range(1, len(headings)), columns=columns)
    above = ""  # each kind over its two columns
    for kind, end in zip(kinds, (match.end() for match in re.finditer(r"rel\.", heading)), strict=True):
        above += f" {kind}".rjust(end - len(above))[len(above) - end :]
    yield Styled(above, Colour.HEADING)
    yield Styled(heading, Colour.HEADING)
    yield from lines
    if left > 0:
        yield f"and {plural(left, 'module')} that moved less (--all lists every key)"


def _distance(module: ModuleChange, kind: str) -> float:
    change = module.changes.get(kind)
    return (change.relative or 0.0) if change is not None else 0.0


def _furthest_texts(result: Difference, columns: int) -> Iterator[str]:
    """Where in the folded rows the largest changes are."""
    from fsdpckpt.verify.changes import furthest

    for kind, entry in furthest(result.entries).items():
        if entry.change is not None and entry.change.largest is not None:
            yield cut_line(f"{kind} changed most in {key_text(entry.param)}: by {entry.change.largest:.3g}", columns)


def _lines(result: Difference, columns: int | None, *, everything: bool) -> Iterator[Line]:
    """``columns``: of a terminal, on which keys of repeated layers with the same difference share a line, as do all
    keys of a section that only one side has.
    """
    from fsdpckpt.verify.changes import joined_lists

    entries = result.entries if everything else joined_lists(result.entries, LONGEST_LIST)
    shown = [entry for entry in entries if (everything or entry.sigil != "=") and entry.counts]
    if columns is not None and not everything:
        shown = _without_modules(shown)
    rows = [(entry.key, 1, entry) for entry in shown]
    if columns is not None and not everything:
        sigils: dict[str, set[str]] = {}
        for entry in result.entries:
            sigils.setdefault(entry.section, set()).add(entry.sigil)
        alone: dict[str, str] = {}  # the sections that one side has
        for section, (sigil, *more) in sigils.items():
            if sigil in ("-", "+") and not more:
                alone[section] = sigil
        for section, sigil in alone.items():
            if count := sum(entry.section == section for entry in shown):
                text = f"{sigil} {section}  all {plural(count, 'key')}, only in {'A' if sigil == '-' else 'B'}"
                yield Styled(text, _COLOURS[sigil], end=1)
        shown = [entry for entry in shown if entry.section not in alone]
        folded = fold((entry.key, (entry.sigil, entry.section, entry.text, entry.rank)) for entry in shown)
        rows = [(keys.key, len(keys.members), shown[keys.members[0]]) for keys in folded]
    for key, count, entry in rows:
        times = f"  x{count_text(count)}" if count > 1 else ""
        text = f"{entry.section} {key_text(key)}{times}" + (f"  {entry.text}" if entry.text else "")
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


def _without_modules(entries: list[ComparedKey]) -> list[ComparedKey]:
    """``entries`` without the tensors that the table of modules shows, unless they are few."""
    from fsdpckpt.verify.changes import kind_of

    measured = [entry for entry in entries if entry.change is not None and kind_of(entry) is not None]
    if len(measured) <= FEW:
        return entries
    steps = [entry for entry in entries if entry.state == "step" and entry.change is not None]  # above the table
    left_out = {id(entry) for entry in (*measured, *steps)}
    return [entry for entry in entries if id(entry) not in left_out]


def _document(a: str, b: str, result: Difference, *, everything: bool) -> dict[str, object]:
    """``everything``: also the values of long lists, such as a random state, one by one."""
    from fsdpckpt.describe import json_value
    from fsdpckpt.verify.changes import joined_lists, standings

    entries = result.entries if everything else joined_lists(result.entries, LONGEST_LIST)
    sides = standings(result)
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
        "steps": [_standing_json(side.steps) for side in sides],
        "learning_rates": [_standing_json(side.rates) for side in sides],
        "entries": [json_value(_entry_json(entry)) for entry in entries],
        "notes": list(result.notes),
    }


def _standing_json(values: Mapping[float, int]) -> list[dict[str, object]]:
    from fsdpckpt.describe import json_value

    return [{"value": json_value(value), "count": count} for value, count in values.items()]


def _entry_json(entry: ComparedKey) -> dict[str, object]:
    row: dict[str, object] = {
        "sigil": entry.sigil,
        "section": str(entry.section),
        "key": entry.key,
        "detail": entry.detail,
        "rank": entry.rank,
        "counts": entry.counts,
    }
    if entry.change is not None:
        change = entry.change
        row["change"] = {
            "elements": change.elements,
            "of": change.numel,
            "largest": change.largest,
            "norm": change.norm,
            "relative": change.relative,
        }
    return row
