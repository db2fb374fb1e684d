"""Reads the shards of torch_xla's and fairscale's FSDP."""

from fsdpckpt.readers.xla_fairscale.shards import find_shard_metadata, name_shards, shards_without_metadata

__all__ = ["find_shard_metadata", "name_shards", "shards_without_metadata"]
