"""An image task that is made on the spot: which digit is that? For a vision transformer of a few layers.

A digit of 5 by 7 pixels at one of six places of an image of 12 by 12, and noise. How the images are made is known, and
so is the best that any model can do (`best_logits`).
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig

SIDE, PATCH, STEP, NOISE = 12, 3, 3, 0.5
_ROWS = {  # five pixels a row, as bits
    0: (14, 17, 19, 21, 25, 17, 14), 1: (4, 12, 4, 4, 4, 4, 14), 2: (14, 17, 1, 6, 8, 16, 31),
    3: (31, 2, 4, 2, 1, 17, 14), 4: (2, 6, 10, 18, 31, 2, 2), 5: (31, 16, 30, 1, 1, 17, 14),
    6: (6, 8, 16, 30, 17, 17, 14), 7: (31, 1, 2, 4, 8, 8, 8), 8: (14, 17, 17, 14, 17, 17, 14),
    9: (14, 17, 17, 15, 1, 2, 12),
}  # fmt: skip
GLYPHS = torch.tensor([[[row >> (4 - bit) & 1 for bit in range(5)] for row in rows] for rows in _ROWS.values()]).float()


def templates() -> Tensor:
    """[digits, places, 12, 12]: the images without noise."""
    high, wide = GLYPHS.shape[1:]
    places = [(top, left) for top in range(0, SIDE - high + 1, STEP) for left in range(0, SIDE - wide + 1, STEP)]
    put = [F.pad(GLYPHS, (left, SIDE - wide - left, top, SIDE - high - top)) for top, left in places]
    return torch.stack(put, dim=1)


def images(count: int, seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """[count, 1, 12, 12] pixels and [count] digits: of a seed the same, on one kind of device."""
    return draw(count, templates().to(device), torch.Generator(device).manual_seed(seed))


def draw(count: int, known: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The next images of a generator, from the templates on its device."""
    chosen = torch.randint(known.shape[0] * known.shape[1], (count,), generator=generator, device=known.device)
    noise = torch.randn(count, SIDE, SIDE, generator=generator, device=known.device)
    return (known.flatten(0, 1)[chosen] + NOISE * noise).unsqueeze(1), chosen // known.shape[1]


def best_logits(pixels: Tensor) -> Tensor:
    """[count, digits]: the digits' probabilities as they are, up to a constant, by Bayes' rule."""
    known = templates().to(pixels.device).flatten(2)
    fits = torch.einsum("ni,dpi->ndp", pixels.flatten(1), known) - known.square().sum(-1) / 2
    return (fits / NOISE**2).logsumexp(-1)


def config(layers: int = 4, hidden: int = 64) -> ViTConfig:
    """A vision transformer for them. Its weights begin larger than usual: it is narrow, and would stand still."""
    return ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=3 * hidden,
        image_size=SIDE, patch_size=PATCH, num_channels=1, num_labels=10, initializer_range=0.05,
    )  # fmt: skip
