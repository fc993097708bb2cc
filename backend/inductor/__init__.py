"""How the rest of a graph goes to Inductor, and how its code calls a region."""
