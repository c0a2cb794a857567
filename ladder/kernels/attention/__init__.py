"""Attention by kernels: of tokens that are decoded, and of prompts; rotary embedding and cache writes."""
