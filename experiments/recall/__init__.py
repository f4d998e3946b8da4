"""Is it worth it? Associative recall, and language models trained for equal time."""
