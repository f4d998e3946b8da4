"""Adapters for other libraries: import `nnx` or `linen` for Flax, or `sklearn`."""

from simrf_jax._src.integrations import flax_serialization  # noqa: F401  It registers the records.
