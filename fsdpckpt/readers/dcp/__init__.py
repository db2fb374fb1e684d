"""Reads DCP directories, and Megatron-FSDP's."""

from fsdpckpt.readers.dcp.directory import open_directory
from fsdpckpt.readers.dcp.reader import DcpReader

__all__ = ["DcpReader", "open_directory"]
