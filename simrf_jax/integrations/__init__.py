"""Adapters that put random-feature and FMM attention into Flax models; import `nnx` or `linen`."""

from simrf_jax.integrations import flax_serialization  # noqa: F401  It registers the records.
