"""fsdpckpt: convert, inspect, compare and verify PyTorch FSDP checkpoints, parameters and optimizer state."""

__version__ = "0.1.0"
