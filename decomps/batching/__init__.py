"""Batching rules, one file a family, for vmap. Importing the package registers them."""

from normpass.decomps.batching import norms, norms_backward

__all__ = ["norms", "norms_backward"]
