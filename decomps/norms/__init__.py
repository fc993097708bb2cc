"""Decompositions of the norm operators, forward and backward. Importing it registers them.

Instance norm has no file: aten.instance_norm is a composite that autograd takes apart into a batch
norm of (1, N * C, *) before any decomposition is asked for.
"""

from normpass.decomps.norms import batch, batch_forward, group, layer, rms, softmax

__all__ = ["batch", "batch_forward", "group", "layer", "rms", "softmax"]
