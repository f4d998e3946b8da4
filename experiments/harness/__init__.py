"""Modules that all experiments share; the package itself imports none of them."""
