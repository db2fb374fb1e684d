"""Readers: from the files of a source to the IR."""

from fsdpckpt.readers.registry import READERS

__all__ = ["READERS"]
