"""Adapters that put random-feature attention into Flax models; import `nnx` or `linen`."""
