"""Rotary position embedding in Hugging Face's layout: the first half of a head is rotated against its second half."""

import math

import torch
from torch import Tensor

from ladder.config import Rope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """theta^(-2i/d) for i < d/2, float32, stretched as the configuration says."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**powers)
    if rope.kind == "default":
        return plain
    slow = plain / rope.factor
    if rope.kind == "linear":
        return slow
    # llama3: wavelengths that fit high_freq_factor times into the original context stay, those that do not fit
    # low_freq_factor times are stretched, and those between are blended
    turns = rope.original_context * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * slow + blend * plain


def angles(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` [batch, tokens], each [batch, tokens, 1, head_dim]."""
    half = positions.unsqueeze(-1).float() * frequencies
    both = torch.cat((half, half), dim=-1).unsqueeze(2)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin, for x = (x1, x2) of [batch, tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
