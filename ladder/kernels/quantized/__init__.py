"""Quantized weights: their codes in matrix kernels, and whole matrices of them."""
