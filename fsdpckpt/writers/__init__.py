"""Writers: from the IR to the files of a target."""

from fsdpckpt.writers.protocol import DtypeRule, Writer, WriteSpec

__all__ = ["DtypeRule", "WriteSpec", "Writer"]
