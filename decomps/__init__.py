"""Stage one, meaning: rules as records. Pure torch in, pure torch out."""
