"""Loading without converting: a ``torch.distributed.checkpoint`` storage reader over any source. Imports torch."""
