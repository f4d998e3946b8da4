"""The adapters of Flax NNX."""
