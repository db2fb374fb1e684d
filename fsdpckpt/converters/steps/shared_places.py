"""Asks for the order of a model in which a shared parameter has lost its first name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.errors import NeedsInformationError


def require_places(draft: Draft, orders: Iterable[Sequence[str]], next_step: str, *, written: bool) -> None:
    """Raises NeedsInformationError for a shared parameter that is left out under its first name, if others follow it in
    one of ``orders``: units record the place of the first name alone, and the other one's may be behind them.

    ``orders``: names that the target counts or lays out in this order. ``written``: they are those of the target.
    """
    units, changes = draft.units_of_source, draft.changes
    if units is None or changes is None:
        return
    followed = {name for order in orders for name in order[:-1]}
    for first, later in changes.displaced(units).items():
        name = changes.new_name(later) if written else later
        if name in followed:
            raise NeedsInformationError(
                f"the place of {later} in the order of the model is not known: it is {first} under another name, and "
                "the units record one place for both",
                key=later,
                why=f"without {first} the parameter is where {later} is in the model",
                next_step=next_step,
            )
