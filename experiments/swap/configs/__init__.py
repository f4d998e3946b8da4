"""Configs of the swap experiment."""
