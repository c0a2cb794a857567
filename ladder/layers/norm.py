"""Root-mean-square norm."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ladder.layers.shard import Shard


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the quotient in float32 at least."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the quotient in float32 at least. Every rank has all of it."""

    def __init__(self, name: str, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)

    def shards(self, parent: str) -> Iterator[Shard]:
        width = self.weight.shape[0]
        yield Shard(f"{parent}{self.name}.weight", (width,), (slice(0, width),), self.weight.data)
