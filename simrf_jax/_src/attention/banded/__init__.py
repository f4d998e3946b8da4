"""Exact attention to nearby keys, in time linear in the length."""
