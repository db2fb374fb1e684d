"""The command line: options in, one call of the API, an exit code out."""

from fsdpckpt.cli.entry import main

__all__ = ["main"]
