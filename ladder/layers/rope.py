"""Rotary position embedding: the first half of a head is rotated against its second half.

A head of which only a share is rotated is laid out so that the pairs are those of a whole one (see `qkv_pieces`); the
other pairs have the frequency 0, as all pairs of a layer without rotary embedding have.
"""

import math

import torch
from torch import Tensor

from ladder.config import ModelConfig, Rope


def frequencies(rope: Rope | None, head_dim: int) -> Tensor:
    """theta^(-2i/d) for the first d/2 pairs of a head whose first d dimensions are rotated; float32, stretched as the
    configuration says; 0 for the others.
    """
    found = torch.zeros(head_dim // 2)
    if rope is None:
        return found
    rotated = rope.dimensions(head_dim)
    powers = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    plain = 1.0 / (rope.theta**powers)
    found[: rotated // 2] = _stretched(rope, plain)
    return found


def _stretched(rope: Rope, plain: Tensor) -> Tensor:
    if rope.kind == "default":
        return plain
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.factors)
    slow = plain / rope.factor
    if rope.kind == "linear":
        return slow
    # llama3: wavelengths that fit high_freq_factor times into the original context stay, those that do not fit
    # low_freq_factor times are stretched, and those between are blended
    turns = rope.original_context * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * slow + blend * plain


class RopeTable:
    """The different rotary embeddings of a model's layers: `frequencies` [ropes, head_dim / 2] and `magnitudes`."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        each = [config.rope_of(layer) for layer in range(config.layers)]
        ropes = list(dict.fromkeys(each))
        self.of_layer = [ropes.index(rope) for rope in each]
        self.frequencies = torch.stack([frequencies(rope, config.head_dim) for rope in ropes]).to(device)
        magnitudes = [[1.0 if rope is None else rope.magnitude] for rope in ropes]
        self.magnitudes = torch.tensor(magnitudes, device=device).unsqueeze(-1)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for `positions` [rows], each [ropes, rows, head_dim / 2], float32."""
        half = positions.float()[None, :, None] * self.frequencies[:, None, :]
        return half.cos() * self.magnitudes, half.sin() * self.magnitudes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x1 cos - x2 sin, x2 cos + x1 sin) for x = (x1, x2) of [rows, heads, d]; cos and sin are [rows, d / 2]."""
    cos, sin = (torch.cat((half, half), dim=-1).unsqueeze(1).to(x.dtype) for half in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
