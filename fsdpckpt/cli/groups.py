"""``--help`` with the options under headings: forty of them in one list are read by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typing import ClassVar

__all__ = ["GroupedCommand"]


class GroupedCommand(TyperCommand):
    """``groups``: the names of the parameters under each heading, in the order in which they are shown.

    An option that is in none comes under the last.
    """

    groups: ClassVar[dict[str, Sequence[str]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings = {name: heading for heading, names in self.groups.items() for name in names}
        places = {name: place for place, name in enumerate(headings)}
        last = next(reversed(self.groups))
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{heading: [] for heading in self.groups}}
        for param in sorted(self.get_params(ctx), key=lambda param: places.get(param.name or "", -1)):
            record = param.get_help_record(ctx)
            if record is not None:
                argument = param.param_type_name == "argument"
                rows["Arguments" if argument else headings.get(param.name or "", last)].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
