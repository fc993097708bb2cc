"""Derivative formulas, one file a family, under their FunctionsManual names. Importing the package
registers them.
"""

from normpass.decomps.derivatives import pointwise, softmax

__all__ = ["pointwise", "softmax"]
