"""Which producer's names a checkpoint has, and which files beside it are no part of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fsdpckpt.flavors.forms import PLAIN
from fsdpckpt.flavors.table import recognise

__all__ = ["EXTRA_STEM", "MANIFEST", "UNITS", "auxiliary", "flavor_of"]

MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # what save_units calls its file in a directory
EXTRA_STEM = "extra_state"  # of the rank files, verl's and this program's, that hold extras and nothing else

# Files beside a checkpoint that describe it or belong to other tools: they hold no state that a training job saves.
_NOT_STATE = re.compile(
    r"^(training_args\.bin|.*\.(json|txt|md|yaml|yml|py|model|jinja|log|csv|tiktoken|sh|html|toml|cfg|lock))$"
    r"|^(README|LICENSE|\..*)$",
    re.IGNORECASE,
)


def flavor_of(names: Iterable[str], directory: str, keys: Iterable[object] = ()) -> str:
    """The producer whose file names these clearly are, or whose ``keys`` beside model and optimizer; else ``plain``."""
    known = list(names)
    if MANIFEST in known:  # which says it itself
        return PLAIN
    flavor = recognise(known, directory=directory, keys=keys)
    return flavor.name if flavor is not None else PLAIN


def auxiliary(name: str) -> bool:
    """Whether a file of this name is no part of a checkpoint (configuration, tokenizer, log)."""
    return _NOT_STATE.match(name) is not None
