"""Which producer's names a checkpoint has: a table of file names, nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["EXTRA_STEM", "MANIFEST", "UNITS", "auxiliary", "flavor_of"]

MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # what save_units calls its file in a directory
EXTRA_STEM = "extra_state"  # of the rank files, verl's and this program's, that hold extras and nothing else

# (flavor, every pattern must match some entry): the first row that fits wins.
_TABLE: tuple[tuple[str, tuple[re.Pattern[str], ...]], ...] = tuple(
    (flavor, tuple(re.compile(pattern) for pattern in patterns))
    for flavor, patterns in (
        ("plain", (r"^fsdpckpt\.json$",)),
        ("accelerate", (r"^pytorch_model_fsdp(_\d+)?(_rank\d+)?(\.bin|$)",)),
        ("verl", (r"^model_world_size_\d+_rank_\d+\.pt$", r"^(fsdp_config\.json|huggingface)$")),
        ("lightning", (r"^meta\.pt$", r"^\.metadata$")),
        ("torchtitan", (r"^\.metadata$", r"^\.\./step-\d+$")),
    )
)

# Files beside a checkpoint that describe it or belong to other tools: they hold no state that a training job saves.
_NOT_STATE = re.compile(
    r"^(training_args\.bin|.*\.(json|txt|md|yaml|yml|py|model|jinja|log|csv|tiktoken|sh|html|toml|cfg|lock))$"
    r"|^(README|LICENSE|\..*)$",
    re.IGNORECASE,
)


def flavor_of(names: Iterable[str], directory: str) -> str:
    """The producer whose file names these clearly are, else ``plain``."""
    base = directory.rstrip("/").rpartition("/")[2]
    candidates = [*names, f"../{base}"]
    for flavor, patterns in _TABLE:
        if all(any(pattern.search(name) for name in candidates) for pattern in patterns):
            return flavor
    return "plain"


def auxiliary(name: str) -> bool:
    """Whether a file of this name is no part of a checkpoint (configuration, tokenizer, log)."""
    return _NOT_STATE.match(name) is not None
