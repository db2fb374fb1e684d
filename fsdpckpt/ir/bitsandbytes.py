"""Describes bitsandbytes' 8-bit optimizer states (``bitsandbytes/optim/optimizer.py``, 0.50): ordinary tensors.

    state1, state2    one element for each of the parameter: float32, or uint8 codes of 8 bits
    absmax1, absmax2  float32, with 8 bits: the scale of each block of codes, in memory order; the last may be shorter
    qmap1, qmap2      float32 (256,), with 8 bits: what each code stands for

Newer versions put them into one dict under each parameter, which hides them from FSDP; ``load_state_dict`` takes them
with and without that dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BITSANDBYTES = "bitsandbytes"
SCALES = {"absmax1": "state1", "absmax2": "state2"}  # each with the state that has its codes
MAPS = {"qmap1": "state1", "qmap2": "state2"}
_WRAPPER = "__bnb_optimizer_quant_state__"
_BLOCK_SIZES = (2048, 256)  # of older versions, and since


def unwrapped(entry: Any) -> Any:
    """The states of one parameter without the dict that hides them from FSDP; anything else unchanged."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get(_WRAPPER), dict):
        return entry
    return {**{name: item for name, item in entry.items() if name != _WRAPPER}, **entry[_WRAPPER]}


def may_be_codes(name: object) -> bool:
    """Whether a state with this name may be quantized."""
    return name in SCALES.values()


def block_of(lengths: Iterable[tuple[int, int]]) -> int | None:
    """The number of codes in a block, from the numbers of codes and scales; None if no block size of the
    library fits.
    """
    pairs = list(lengths)
    for size in _BLOCK_SIZES:
        if all(-(-codes // size) == scales for codes, scales in pairs):
            return size
    return None
