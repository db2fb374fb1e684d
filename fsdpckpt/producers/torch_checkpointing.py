"""The names that torch_checkpointing gives files and descriptions, for the reader and the writer of them."""

from __future__ import annotations

METADATA = "metadata.pkl"
VERSION = "2.0"  # of the metadata that is written
OF_DTENSOR = "DTensorShardingMetadata"


def default_file(item: str, rank: int | str) -> str:
    """The name of the file of an item without a layout (``default_torch_layout_info``)."""
    return f"{item}_{rank}.pt"
