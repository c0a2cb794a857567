"""Triton kernels for decoding, each beside its plain torch reference."""
