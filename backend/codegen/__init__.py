"""Generators: each prints the same plan in one dialect."""
