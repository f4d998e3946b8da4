"""Random-feature attention in fused Pallas kernels for TPUs."""
