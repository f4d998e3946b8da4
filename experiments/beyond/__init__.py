"""What the closed forms show that the paper does not: blocks, small distances, other maps."""
