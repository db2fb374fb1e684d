"""Reads Megatron-LM's torch format of several tensor-parallel ranks."""

from fsdpckpt.readers.megatron_torch.reader import MegatronTorchReader

__all__ = ["MegatronTorchReader"]
