"""Training Performer ViTs with simplex, orthogonal and iid random features, and exact attention."""
