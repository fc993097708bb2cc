"""What was fused and what was not, for people: reports, pages, listings, dumps."""
