"""Sec. 5.3 and App. B of Simplex Random Features: classification by kernel regression."""
