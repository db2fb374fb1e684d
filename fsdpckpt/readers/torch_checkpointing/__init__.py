"""Reads checkpoints of torch_checkpointing (``meta-pytorch/torch_checkpointing``)."""

from fsdpckpt.readers.torch_checkpointing.reader import TorchCheckpointingReader, files_of_ranks

__all__ = ["TorchCheckpointingReader", "files_of_ranks"]
