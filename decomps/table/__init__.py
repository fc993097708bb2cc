"""The derivative table: operators bound to their formulas, as derivatives.yaml binds them."""
