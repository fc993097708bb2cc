"""REWRITING: FX graph in, FX graph out. Finds norm regions and fuses each into one op."""
