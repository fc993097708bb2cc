"""Derivative formulas, one file a family, under their FunctionsManual names. Importing the package
registers them.
"""

from normpass.decomps.derivatives import (
    activations,
    binary,
    indexing,
    linalg_factorizations,
    linalg_products,
    linalg_solves,
    losses,
    norm_backwards,
    norm_jvps,
    norms,
    pointwise,
    reductions,
    scans,
    softmax,
    variances,
    views,
)

__all__ = [
    "activations",
    "binary",
    "indexing",
    "linalg_factorizations",
    "linalg_products",
    "linalg_solves",
    "losses",
    "norm_backwards",
    "norm_jvps",
    "norms",
    "pointwise",
    "reductions",
    "scans",
    "softmax",
    "variances",
    "views",
]
