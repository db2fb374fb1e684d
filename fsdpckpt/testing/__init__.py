"""The suites that every reader of fsdpckpt passes, for the readers of other packages. Needs pytest."""

from fsdpckpt.testing.reader_contract import WEIGHTS, ReaderContract

__all__ = ["WEIGHTS", "ReaderContract"]
