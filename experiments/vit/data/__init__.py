"""Data sets, their images, and the batches that a run reads."""
