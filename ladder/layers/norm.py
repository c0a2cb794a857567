"""Norms: root-mean-square, or with the mean subtracted."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ladder.config import ModelConfig
from ladder.layers.shard import Shard


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight); centered: x - mean(x) for x, and a bias. float32 at least.

    Every rank has all of it, or `part` of it: then the mean of squares is over all ranks' parts, and must be given.
    """

    def __init__(
        self, name: str, width: int, config: ModelConfig, dtype: torch.dtype, part: slice | None = None
    ) -> None:
        super().__init__()
        self.name, self.width, self.eps = name, width, config.norm_eps
        self.offset, self.centered = config.family_row.norm_offset, config.family_row.layer_norm
        self.part = part or slice(0, width)
        mine = self.part.stop - self.part.start
        self.weight = nn.Parameter(torch.empty(mine, dtype=dtype), requires_grad=False)
        bias = nn.Parameter(torch.empty(mine, dtype=dtype), requires_grad=False) if self.centered else None
        self.bias: nn.Parameter | None = bias

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centered:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt((y.square().mean(-1, keepdim=True) if mean_square is None else mean_square) + self.eps)
        if self.offset:
            return (y * (self.offset + self.weight.to(y.dtype))).to(x.dtype)
        y = self.weight * y.to(x.dtype)
        return y if self.bias is None else y + self.bias

    def shards(self) -> Iterator[Shard]:
        yield Shard(f"{self.name}.weight", (self.width,), (self.part,), self.weight.data)
        if self.bias is not None:
            yield Shard(f"{self.name}.bias", (self.width,), (self.part,), self.bias.data)


def new_norm(prefix: str, name: str | None, config: ModelConfig, dtype: torch.dtype) -> Norm | None:
    """A norm of the stream, where the family has one of this name."""
    return None if name is None else Norm(prefix + name, config.hidden, config, dtype)
