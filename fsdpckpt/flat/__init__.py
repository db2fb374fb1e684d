"""FSDP1's flat parameters: their slices, the units they belong to, and the way there and back."""

from fsdpckpt.flat.slices import is_number_per_rank, is_sliced, is_step, lengths_text, slice_lengths, tensor_text

__all__ = ["is_number_per_rank", "is_sliced", "is_step", "lengths_text", "slice_lengths", "tensor_text"]
