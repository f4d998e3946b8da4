"""Configs of the recall experiment."""
