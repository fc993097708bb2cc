"""EMISSION: a fused op in, a kernel out; and the torch.compile backend itself."""
