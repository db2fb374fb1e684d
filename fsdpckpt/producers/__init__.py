"""What each producer of checkpoints calls its files and keys: one table, one module per producer."""
