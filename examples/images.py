"""An image task that is made on the spot: which digit is that? For a vision transformer of a few layers.

A digit of 10 by 14 pixels, somewhere on 20 by 20 pixels; beside it a small piece of another digit, and noise.
"""

import torch
from torch import Tensor
from transformers import ViTConfig

SIDE, PATCH, STEP = 20, 4, 2
_ROWS = {  # five pixels a row, as bits
    0: (14, 17, 19, 21, 25, 17, 14), 1: (4, 12, 4, 4, 4, 4, 14), 2: (14, 17, 1, 6, 8, 16, 31),
    3: (31, 2, 4, 2, 1, 17, 14), 4: (2, 6, 10, 18, 31, 2, 2), 5: (31, 16, 30, 1, 1, 17, 14),
    6: (6, 8, 16, 30, 17, 17, 14), 7: (31, 1, 2, 4, 8, 8, 8), 8: (14, 17, 17, 14, 17, 17, 14),
    9: (14, 17, 17, 15, 1, 2, 12),
}  # fmt: skip
GLYPHS = torch.tensor([[[row >> (4 - bit) & 1 for bit in range(5)] for row in rows] for rows in _ROWS.values()]).float()


def images(count: int, seed: int, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """[count, 1, 20, 20] pixels and [count] digits."""
    g = torch.Generator().manual_seed(seed)
    labels, others = torch.randint(10, (2, count), generator=g)
    pixels = noise * torch.randn(count, 1, SIDE, SIDE, generator=g)
    places = torch.rand(count, 4, generator=g)
    for image, label, other, place in zip(pixels, labels, others, places, strict=True):
        _put(image[0], GLYPHS[other][:3], place[2:])
        _put(image[0], GLYPHS[label].repeat_interleave(2, 0).repeat_interleave(2, 1), place)
    return pixels, labels


def _put(image: Tensor, glyph: Tensor, place: Tensor) -> None:
    """In place of what is there, somewhere from the upper left to the lower right corner."""
    high, wide = glyph.shape
    top, left = (STEP * int(at * ((SIDE - size) // STEP + 1)) for at, size in zip(place, (high, wide), strict=False))
    part = image[top : top + high, left : left + wide]
    part.copy_(part.where(glyph == 0, 1 + 0.3 * part))


def config(layers: int = 4, hidden: int = 64) -> ViTConfig:
    """A vision transformer for them."""
    return ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=3 * hidden,
        image_size=SIDE, patch_size=PATCH, num_channels=1, num_labels=10,
    )  # fmt: skip
