"""Fills a template of the pages. Nothing in a page runs or is fetched, whatever a checkpoint is called or holds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fsdpckpt.report.figures import MAX_ROWS, clipped
from fsdpckpt.text import count_text, plural
from fsdpckpt.version import __version__

# No script runs and nothing is fetched, whatever the keys of a checkpoint contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

MAX_PROBLEMS = 200
LONGEST_LINE = 600  # characters of a problem or a note


def render(template: str, values: dict[str, Any]) -> str:
    """The page that ``template`` makes of ``values``, all of which it escapes."""
    import jinja2
    from markupsafe import Markup

    def printable(value: object) -> object:
        """Control characters and lone surrogates in Python's notation."""
        if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
            return value
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in value)

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fsdpckpt", "report"),
        autoescape=True,
        finalize=printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(clip=clipped, count=count_text, plural=plural)
    environment.globals.update(max_rows=MAX_ROWS, max_problems=MAX_PROBLEMS, longest_line=LONGEST_LINE)
    return environment.get_template(template).render(
        policy=POLICY,
        version=__version__,
        created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **values,
    )
