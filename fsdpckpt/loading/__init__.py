"""Loads a checkpoint without converting it. Imports torch."""

from fsdpckpt.loading.storage_reader import StorageReader

__all__ = ["StorageReader"]
