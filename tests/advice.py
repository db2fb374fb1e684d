"""What the next step of an error proposes, and what comes of it: each way is followed, word by word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fsdpckpt.errors import FsdpckptError, NeedsInformationError

__all__ = ["require_ways_on"]

_OPTION = re.compile(r"--[a-z][a-z-]*")


def require_ways_on(
    asked: FsdpckptError,
    ways: Mapping[str, dict[str, Any]],
    follow: Callable[[int, dict[str, Any]], object],
    *,
    alternative: bool = False,
) -> None:
    """``asked`` names the options ``ways`` and no other, and with what is given for each of them ``follow`` converts,
    or asks for something else. ``follow`` also gets the number of the way. ``alternative``: that of the error counts.
    """
    assert asked.exit_code in (2, 3, 4)
    advice = f"{asked.next_step} {asked.alternative or ''}" if alternative else str(asked.next_step)
    own_options = re.sub(r"`fsdpckpt units .*?`", "", advice)  # another command makes the file
    assert set(_OPTION.findall(own_options)) == ways.keys(), asked
    for number, (way, given) in enumerate(ways.items()):
        try:
            follow(number, given)
        except NeedsInformationError as error:
            assert way not in _OPTION.findall(str(error.next_step)), (way, error)
