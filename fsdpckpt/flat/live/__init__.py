"""What only a live FSDP1 model knows, or one built on the meta device. Imports torch; reads no checkpoints."""
