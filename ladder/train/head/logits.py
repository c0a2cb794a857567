"""Logits as what the head reads and its weights: the product is computed for the tokens that are asked for."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_LOGITS = 1 << 26  # that exist at once on a CPU
# Times as many on a GPU: after each chunk all of the gradient of the head's weight is read and written, in float32.
GPU_CHUNK = 4


@dataclass(frozen=True)
class Logits:
    """[tokens, vocabulary] logits; `logits[a:b]` are those of some tokens."""

    hidden: Tensor  # [tokens, width]: after the final norm
    weight: Tensor  # [vocabulary, width]
    bias: Tensor | None
    dtype: torch.dtype  # of the product, which autocast may have chosen

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.hidden), len(self.weight)

    def cast(self) -> "Logits":
        """The same with all of them in the product's dtype, and without gradients."""
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return Logits(self.hidden.detach().to(self.dtype), self.weight.detach().to(self.dtype), bias, self.dtype)

    def __getitem__(self, tokens: slice) -> Tensor:
        return F.linear(self.hidden[tokens], self.weight, self.bias)


def chunks(shape: tuple[int, ...], device: torch.device) -> Iterator[slice]:
    """The tokens of [tokens, vocabulary] logits, some at a time: equally many if a divisor is near, as another size is
    compiled anew.
    """
    tokens, vocabulary = shape
    most = max(1, CHUNK_LOGITS * (1 if device.type == "cpu" else GPU_CHUNK) // vocabulary)
    size = next((count for count in range(min(most, tokens), most // 2, -1) if tokens % count == 0), most)
    for at in range(0, tokens, size):
        yield slice(at, min(at + size, tokens))
