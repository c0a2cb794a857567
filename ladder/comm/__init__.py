"""Communicators: the all-reduces and all-gathers between the ranks of a tensor-parallel model."""
