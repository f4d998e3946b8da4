"""Random-feature attention in fused Pallas kernels for NVIDIA GPUs of the Hopper generation."""
