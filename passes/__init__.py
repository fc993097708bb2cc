"""REWRITING: FX graph in, FX graph out. Finds norm regions and puts one fused op in place of each."""
