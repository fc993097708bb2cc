"""Batching rules, one file a family, for vmap. Importing the package registers them.

Each example of v is normalized by itself. Statistics are taken over the axes that an example has,
wherever v lies in memory: v is never folded into the channels, which would transpose a copy of the
input, and no weight is invented. What is summed into the gradient of a parameter is summed over the
axes of one example; the sums that the input's gradient needs anyway are not taken twice.

Instance norm has no file: its operator is a composite, a batch norm of (1, N * C, *).
"""

from normpass.decomps.batching import (
    batch_norm,
    batch_norm_spellings,
    group_norm,
    layer_norm,
    rms_norm,
)

__all__ = ["batch_norm", "batch_norm_spellings", "group_norm", "layer_norm", "rms_norm"]
