"""What the producers of checkpoints call their files and keys: tables, one module a producer, no code that branches."""
