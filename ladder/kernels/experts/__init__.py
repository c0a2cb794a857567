"""Decoding with experts: the router's choice, and products that read only the chosen experts."""
