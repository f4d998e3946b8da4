"""What a run measures, writes and shows."""
