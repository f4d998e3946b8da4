"""The choice of features, band and exact keys for a trained model, for both Flax APIs."""
