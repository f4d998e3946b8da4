"""Feature maps that fit the queries and keys of a trained model."""
