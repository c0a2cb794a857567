"""Measuring programs; their results are JSON lines."""
