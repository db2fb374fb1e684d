"""What only a live model knows, or one built on the meta device: imports torch, and nothing here reads checkpoints."""
