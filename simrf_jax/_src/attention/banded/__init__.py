"""Exact attention to the keys nearby, in time linear in the length."""
