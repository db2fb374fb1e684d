"""Says how each framework (a producer of checkpoints) names its files and keys: one table, one module a framework."""
