"""Softmax attention estimated by random features."""
