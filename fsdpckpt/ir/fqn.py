"""Fully qualified names of parameters and modules, as ``state_dict`` keys have them."""

from __future__ import annotations

__all__ = ["WRAPPERS", "clean", "joined"]

# FSDP1, checkpoint_wrapper and offload_wrapper, torch.compile, FSDP of torch 1.11 and of fairscale
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module"})


def clean(name: str) -> str:
    """``name`` without wrapper segments: ``_fsdp_wrapped_module.l.0._orig_mod.weight`` is ``l.0.weight``."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def joined(prefix: str, name: str) -> str:
    """The FQN of ``name`` in the module ``prefix``, "" for the root."""
    return f"{prefix}.{name}" if prefix else name
