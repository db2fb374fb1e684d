"""Reads DeepSpeed's checkpoints."""

from fsdpckpt.readers.deepspeed.reader import DeepSpeedReader

__all__ = ["DeepSpeedReader"]
