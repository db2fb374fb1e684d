"""Shows values in messages and tables: short texts, whatever the values hold."""

from __future__ import annotations

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import UNREAD, Global, Object


def value_text(value: object, longest: int = 60) -> str:
    """``value`` in at most ``longest`` characters: scalars as in Python, tensors and objects by their type."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype.name} {list(value.shape)}"
    if isinstance(value, Object):
        text = f"{value.function}(...)"
    elif isinstance(value, Global):
        text = "(not read)" if value == UNREAD else str(value)
    elif isinstance(value, (bytes, bytearray)):
        text = f"{len(value)} bytes"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        kind = "a list" if isinstance(value, list) else "a tuple"
        text = f"{kind} of {len(value)}, beginning {', '.join(map(value_text, value[:2]))}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(map(value_text, value))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    else:
        text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."
