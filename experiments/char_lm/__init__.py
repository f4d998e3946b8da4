"""Character-level language models with softmax attention, far field, near field, or both."""
