"""Reads nanotron's checkpoints."""

from fsdpckpt.readers.nanotron.reader import NanotronReader

__all__ = ["NanotronReader"]
