"""Results beyond the paper: row blocks, small distances, and couplings for each feature map."""
