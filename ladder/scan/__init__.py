"""What a wiring costs layer by layer, and weights fitted to it by least squares."""
