"""Escapes and formats text for the page, and has its style sheet.

All text from a checkpoint goes through ``escaped``: none of it reaches the page raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["MOST_ROWS", "STYLE", "clipped", "escaped", "percent", "table"]

MOST_ROWS = 300  # of a table; the page says how many more there are
LONGEST = 160  # characters of one cell: a key may have a megabyte


def escaped(text: object) -> str:
    """HTML that shows ``text``; control characters and lone surrogates in Python's notation."""
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    return escape(shown, quote=True)


def clipped(text: object, longest: int = LONGEST) -> str:
    """``text`` without its middle when it is long. Still to be escaped."""
    shown = str(text)
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} … {shown[-longest // 2 + 3 :]}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: frozenset[int] = frozenset(),
    label: str = "",
    longest: int = LONGEST,
) -> str:
    """A table of unescaped texts. ``right``: columns to align right; ``label``: its name for screen readers.

    ``longest``: most characters of a cell that are shown.
    """

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{escaped(clipped(cell, longest))}</{tag}>'
            if number in right
            else f"<{tag}>{escaped(clipped(cell, longest))}</{tag}>"
            for number, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    named = f' aria-label="{escaped(label)}"' if label else ""
    return (
        f'<div class="wide"><table{named}><thead><tr>{cells(headings, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
    )


STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --text: #1d2430; --quiet: #5b6675; --line: #d8dde5; --panel: #f5f7fa;
  --hue: #2563a8; --module0: #dbe6f3; --module1: #c8d8ec; --tensor: #e9edf2; --bad: #b3261e; --badground: #fbe9e7;
  --good: #1b6e3c; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14181f; --text: #e4e8ee; --quiet: #9aa5b4; --line: #333b47; --panel: #1c222b;
  --hue: #6ea8e6; --module0: #26384f; --module1: #2f4763; --tensor: #262c36; --bad: #ff8a80; --badground: #3a1f1d;
  --good: #7fd6a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px 20px 60px; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 8px; }
h3 { font-size: 14px; margin: 0 0 4px; }
p { margin: 4px 0 10px; max-width: 80em; }
.quiet { color: var(--quiet); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; padding: 0; list-style: none; }
.tiles li { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.tiles b { display: block; font-size: 17px; }
.problems { background: var(--badground); border-left: 4px solid var(--bad); padding: 8px 14px; border-radius: 4px; }
.problems li { overflow-wrap: anywhere; }
.problems h2 { margin: 2px 0; color: var(--bad); }
.whole { border-left: 4px solid var(--good); background: var(--panel); padding: 8px 14px; border-radius: 4px; }
.wide { overflow-x: auto; max-height: 560px; overflow-y: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 4px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { position: sticky; top: 0; background: var(--panel); }
td { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: 10px 0; } summary { cursor: pointer; }
svg { width: 100%; height: auto; display: block; margin: 8px 0; }
svg text { font: 11px ui-monospace, "DejaVu Sans Mono", monospace; fill: var(--text); }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
.small { max-width: 440px; } .row { display: flex; flex-wrap: wrap; gap: 20px; }
.row > div { flex: 1 1 320px; max-width: 460px; }
.ground { fill: var(--panel); } .bar { fill: var(--hue); } .bad { fill: var(--bad); }
.module0 { fill: var(--module0); } .module1 { fill: var(--module1); } .tensor { fill: var(--tensor); }
.s1, .s2, .s3, .s4, .s5 { fill: var(--hue); }
.s1 { opacity: .3; } .s2 { opacity: .45; } .s3 { opacity: .6; } .s4 { opacity: .8; }
.key { display: inline-block; width: 12px; height: 12px; background: var(--hue); margin: 0 3px 0 10px; }
@media print { .wide { max-height: none; } }
"""
