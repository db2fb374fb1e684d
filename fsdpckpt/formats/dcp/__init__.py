"""The ``.metadata`` file of a DCP directory, read and written."""

from fsdpckpt.formats.dcp.metadata import DcpMetadata, DcpTensor, PathElement, merge_metadata, parse_metadata

__all__ = ["DcpMetadata", "DcpTensor", "PathElement", "merge_metadata", "parse_metadata"]
