"""Choice of the feature map, the coupling and the number of features."""
