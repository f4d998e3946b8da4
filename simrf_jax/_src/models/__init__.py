"""Models built on random-feature attention."""
