"""Reads checkpoints of torch_checkpointing (``meta-pytorch/torch_checkpointing``)."""

from fsdpckpt.readers.torch_checkpointing.reader import TorchCheckpointingReader

__all__ = ["TorchCheckpointingReader"]
