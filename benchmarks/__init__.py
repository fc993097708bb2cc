"""Eager, stock Inductor and normpass side by side: demo, norms, whole models, compile time."""
