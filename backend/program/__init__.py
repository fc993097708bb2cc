"""From a region to a scheduled program: loops, places of values, what they move through memory."""
