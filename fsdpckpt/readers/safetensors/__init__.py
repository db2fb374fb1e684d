"""Reads safetensors files."""

from fsdpckpt.readers.safetensors.reader import (
    SafetensorsReader,
    read_safetensors,
    read_safetensors_index,
    sharding_info,
)

__all__ = ["SafetensorsReader", "read_safetensors", "read_safetensors_index", "sharding_info"]
