"""Adapters that put random-feature and FMM attention into Flax models; import `nnx` or `linen`."""
