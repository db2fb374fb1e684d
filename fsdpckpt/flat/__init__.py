"""FSDP1's flat parameters: their slices, the units they belong to, and the way there and back."""
