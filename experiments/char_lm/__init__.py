"""A character-level language model: softmax attention, the far field, the near field, and both."""
