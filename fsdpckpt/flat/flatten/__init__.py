"""Writes FSDP1's flattened checkpoints."""

from fsdpckpt.flat.flatten.files import lay_out

__all__ = ["lay_out"]
