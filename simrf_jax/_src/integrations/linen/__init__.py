"""The adapters of Flax Linen."""
