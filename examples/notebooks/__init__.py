"""The programs of examples/ as notebooks, which `make notebooks` makes of the scripts."""
