"""Builds the page of ``diff --report``: two checkpoints beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from fsdpckpt import flags
from fsdpckpt.report.curves import FEWEST_LAYERS, MAX_CURVES, Line, curve, layer_of
from fsdpckpt.report.figures import MAX_ROWS, FigureTable, more_text
from fsdpckpt.report.render import render
from fsdpckpt.text import count_text, fold, plural, rate_text, step_text
from fsdpckpt.verify.changes import changed_kinds, joined_lists, kind_of, module_changes, standings
from fsdpckpt.verify.difference import Change, ComparedKey, Difference

OUTLIER = 3.0  # times as far as is typical of the same tensor of other layers
FEWEST_ALIKE = 4  # tensors of which something is typical
MAX_OUTLIERS = 40
MAX_KINDS = 6  # columns of the table of modules
LONGEST_LIST = 8


def compared_page(result: Difference) -> str:
    """The page for a comparison."""
    return render("compared.html.jinja", {"command": "diff", **_content(result)})


def _content(result: Difference) -> dict[str, Any]:
    a, b = result.sources
    kinds = changed_kinds(result)
    return {
        "name": f"{a} and {b}",
        "a": a,
        "b": b,
        "same": result.same,
        "summary": result.summary,
        "notes": list(result.notes),
        "tiles": [
            (count_text(result.count("=")), "same"),
            (count_text(result.count("*")), "differ"),
            (count_text(result.count("-")), "only in A"),
            (count_text(result.count("+")), "only in B"),
        ],
        "standings": _standings(result),
        "curves": _curves(result.entries, kinds),
        "modules": _modules(result, kinds[:MAX_KINDS]),
        "outliers": _outliers(result.entries),
        "only_a": _only(result.entries, "-"),
        "only_b": _only(result.entries, "+"),
        "others": _others(result.entries),
        "commands": [
            ("every key, also what is the same", flags.command("diff", a, b, flags.all_)),
            ("check every byte of each", flags.command("verify", b)),
        ],
    }


def _standings(result: Difference) -> FigureTable:
    rows = []
    for letter, source, side in zip("AB", result.sources, standings(result), strict=True):
        steps = ", ".join(f"{step_text(step)} ({plural(count, 'parameter')})" for step, count in side.steps.items())
        rates = ", ".join(f"{rate_text(rate)} ({plural(count, 'group')})" for rate, count in side.rates.items())
        rows.append((letter, source, steps or "-", rates or "-"))
    return FigureTable(["side", "checkpoint", "step", "learning rate"], rows)


def _curves(entries: Sequence[ComparedKey], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """By layer, for each stack of layers and kind of tensors: how far they moved."""
    sums: dict[tuple[str, str], dict[int, Change]] = {}
    for entry in entries:
        kind = kind_of(entry)
        place = layer_of(entry.param) if entry.param is not None else None
        if entry.change is None or kind is None or place is None:
            continue
        by_layer = sums.setdefault((place[0], kind), {})
        by_layer[place[1]] = by_layer[place[1]] + entry.change if place[1] in by_layer else entry.change
    drawn = []
    by_stack = sorted(sums, key=lambda at: (at[0], kinds.index(at[1])))
    for stack, kind in by_stack:
        by_layer = sums[stack, kind]
        layers = sorted(by_layer)
        if len(layers) < FEWEST_LAYERS:
            continue
        lines = [
            Line("relative norm", "line-rms", [by_layer[layer].relative for layer in layers]),
            Line("max |A - B|", "line-max", [by_layer[layer].largest for layer in layers]),
        ]
        one = curve(f"{kind} in {stack}", layers, lines)
        drawn += [one] if one is not None else []
    return drawn[:MAX_CURVES]


def _modules(result: Difference, kinds: Sequence[str]) -> FigureTable:
    rows = []
    for module in module_changes(result.entries):
        cells: list[str] = [module.module + (f"  x{count_text(module.count)}" if module.count > 1 else "")]
        for kind in kinds:
            change = module.changes.get(kind)
            cells += [_number(change.largest if change else None), _number(change.relative if change else None)]
        rows.append(cells)
    headings = ["module"]
    for kind in kinds:
        headings += [f"{kind} max |A - B|", f"{kind} relative"]
    return FigureTable(headings, rows, frozenset(range(1, len(headings))), more=more_text(len(rows), "module"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _outliers(entries: Sequence[ComparedKey]) -> FigureTable:
    """The tensors that moved much further, or much less, than the same tensor of other layers."""
    alike: dict[tuple[str, str], list[tuple[float, ComparedKey]]] = {}
    measured = [entry for entry in entries if entry.change is not None and entry.param is not None]
    names = [entry.param or "" for entry in measured]
    for folded in fold((name, kind_of(entry)) for name, entry in zip(names, measured, strict=True)):
        for member in folded.members:
            entry, kind = measured[member], kind_of(measured[member])
            if kind is not None and entry.change is not None and entry.change.relative is not None:
                alike.setdefault((folded.key, kind), []).append((entry.change.relative, entry))
    found: list[tuple[float, Sequence[object]]] = []
    for (_, kind), group in alike.items():
        typical = median(relative for relative, _ in group)
        if len(group) < FEWEST_ALIKE or not typical:
            continue
        for relative, entry in group:
            times = relative / typical
            if times >= OUTLIER or times <= 1 / OUTLIER:
                row = (kind, entry.param or entry.key, _number(relative), _number(typical), f"{times:.3g}x")
                found.append((max(times, 1 / times) if times else float("inf"), row))
    found.sort(key=lambda each: -each[0])
    left = len(found) - MAX_OUTLIERS
    more = f"and {plural(left, 'tensor')} more" if left > 0 else ""
    headings = ["what", "tensor", "relative", "typical", "ratio"]
    return FigureTable(headings, [row for _, row in found[:MAX_OUTLIERS]], frozenset({2, 3, 4}), more=more)


def _only(entries: Sequence[ComparedKey], sigil: str) -> FigureTable:
    """What only one side has; repeated layers are one row."""
    chosen = [entry for entry in joined_lists(entries, LONGEST_LIST) if entry.sigil == sigil]
    rows = []
    for folded in fold((entry.key, (entry.section, entry.text, entry.counts)) for entry in chosen):
        entry, count = chosen[folded.members[0]], len(folded.members)
        key = folded.key + (f"  x{count_text(count)}" if count > 1 else "")
        rows.append((str(entry.section), key, entry.text, "" if entry.counts else "not counted"))
    return FigureTable(["section", "key", "value", "counts"], rows, more=more_text(len(rows), "key"))


def _others(entries: Sequence[ComparedKey]) -> FigureTable:
    """What differs and is no tensor of a parameter: settings, extras, shapes and dtypes."""
    chosen = [
        entry
        for entry in joined_lists(entries, LONGEST_LIST)
        if entry.sigil == "*" and (entry.change is None or kind_of(entry) is None) and entry.state != "step"
    ]
    rows = []
    for folded in fold((entry.key, (entry.section, entry.text)) for entry in chosen):
        entry, count = chosen[folded.members[0]], len(folded.members)
        rows.append((str(entry.section), folded.key + (f"  x{count_text(count)}" if count > 1 else ""), entry.text))
    return FigureTable(["section", "key", "A vs B"], rows[:MAX_ROWS], more=more_text(len(rows), "key"))
