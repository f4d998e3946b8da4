"""The training step, where its arrays lie, and the checkpoints of a run."""
