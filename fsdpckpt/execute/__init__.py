"""Runs a plan: copies every byte of it, on one rank or on many."""

from fsdpckpt.execute.run import execute

__all__ = ["execute"]
