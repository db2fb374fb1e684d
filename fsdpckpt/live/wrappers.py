"""Parameter names without the segments that wrappers add, as ``state_dict`` keys have them."""

from __future__ import annotations

__all__ = ["clean", "joined"]

# FSDP1, checkpoint_wrapper and offload_wrapper, torch.compile
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def clean(name: str) -> str:
    """``name`` without wrapper segments: ``_fsdp_wrapped_module.l.0._orig_mod.weight`` is ``l.0.weight``."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def joined(prefix: str, name: str) -> str:
    """The FQN of ``name`` in the module ``prefix``, "" for the root."""
    return f"{prefix}.{name}" if prefix else name
