"""Derivative formulas, one file a family, under their FunctionsManual names. Importing the package
registers them.
"""

from normpass.decomps.derivatives import norm_jvps, norms, pointwise, softmax, variances

__all__ = ["norm_jvps", "norms", "pointwise", "softmax", "variances"]
