"""The states of bitsandbytes' optimizers (``bitsandbytes/optim/optimizer.py``, 0.50).

    state1, state2    one element for each of the parameter: float32, or uint8 codes of 8 bits
    absmax1, absmax2  float32, with 8 bits: the scale of each block of codes, in memory order; the last may be shorter
    qmap1, qmap2      float32 (256,), with 8 bits: what each code stands for

Newer versions put them into one dict under each parameter, which hides them from FSDP; ``load_state_dict`` takes them
with and without that dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LIBRARY = "bitsandbytes"
_WRAPPER = "__bnb_optimizer_quant_state__"
_CODES = {"absmax1": "state1", "absmax2": "state2"}
_MAPS = ("qmap1", "qmap2")
_BLOCKS = (2048, 256)  # of older versions, and since


def unwrapped(entry: Any) -> Any:
    """The states of one parameter without the dict that hides them; anything else as it is."""
    if not isinstance(entry, dict) or not isinstance(entry.get(_WRAPPER), dict):
        return entry
    return {**{name: item for name, item in entry.items() if name != _WRAPPER}, **entry[_WRAPPER]}


def is_codes(name: object) -> bool:
    """Whether a state of this name is one that may be quantized."""
    return name in _CODES.values()


def scales_in(entry: Mapping[str, object]) -> dict[str, str]:
    """The states in ``entry`` that are scales, each with the state that its codes are."""
    return {scale: codes for scale, codes in _CODES.items() if scale in entry and codes in entry}


def maps_in(entry: Mapping[str, object]) -> tuple[str, ...]:
    """The states in ``entry`` that say what codes stand for, alike on all ranks."""
    return tuple(name for name in _MAPS if name in entry) if scales_in(entry) else ()


def block_of(lengths: Iterable[tuple[int, int]]) -> int | None:
    """Codes of a block, from numbers of codes and of their scales; None where no size of the library fits."""
    pairs = list(lengths)
    return next((size for size in _BLOCKS if all(-(-codes // size) == scales for codes, scales in pairs)), None)
