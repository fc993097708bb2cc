"""Runs regions: the operator, kernels built and kept, launched on CPUs and GPUs."""
