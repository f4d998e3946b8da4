"""Everything behind the public names, free to change."""
