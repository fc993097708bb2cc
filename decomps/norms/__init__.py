"""One file a norm: forward, backward, tangent, further derivatives, and both of them under vmap.
Importing the package registers them.

What a backward or a batching rule computes is written once: a batching rule is the same function
with one more axis v, the first, that no sum reduces. Each example of v is normalized by itself,
wherever v lies in memory: v is never folded into the channels, which would transpose a copy of the
input, and no weight is invented. What is summed into the gradient of a parameter is summed over the
axes of one example; the sums that the input's gradient needs anyway are not taken twice.

Instance norm has no file: aten.instance_norm is a composite that autograd takes apart into a batch
norm of (1, N * C, *) before any rule is asked for.
"""

from normpass.decomps.norms import (
    batch,
    batch_spellings,
    group,
    layer,
    rms,
    softmax,
    weight_norm,
)

__all__ = ["batch", "batch_spellings", "group", "layer", "rms", "softmax", "weight_norm"]
