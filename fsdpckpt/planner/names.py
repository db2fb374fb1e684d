"""Names without what wrappers add to them."""

from __future__ import annotations

__all__ = ["clean"]

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module"})


def clean(name: str) -> str:
    """``name`` without the path segments that FSDP, activation checkpointing and ``torch.compile`` add."""
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)
