"""Reads files of ``torch.save``: single ones, and one for each rank."""

from fsdpckpt.readers.torch_ranks.rank_names import NamedRank, check_names, group_ranks, named_rank
from fsdpckpt.readers.torch_ranks.reader import TorchReader, looks_like_torch, may_be_torch

__all__ = ["NamedRank", "TorchReader", "check_names", "group_ranks", "looks_like_torch", "may_be_torch", "named_rank"]
