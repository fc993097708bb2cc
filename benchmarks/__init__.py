"""Side-by-side runs of eager, stock Inductor and normpass: the demo, the timings, compile time."""
