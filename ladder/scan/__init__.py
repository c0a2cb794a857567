"""Which layers bear a wiring, and weights that make up for it by least squares."""
