"""Trained models whose softmax attention is replaced by random features, and then fine-tuned."""
