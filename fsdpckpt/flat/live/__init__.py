"""What only a live FSDP1 model knows. Imports torch."""

from fsdpckpt.flat.live.modules import dtype_of, flattens_in_memory_order

__all__ = ["dtype_of", "flattens_in_memory_order"]
