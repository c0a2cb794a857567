"""`Ops` for prefill: the library's matrix products, and kernels for what lies between them."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.kernels.decode import FusedReader
from ladder.kernels.launch import Launch
from ladder.kernels.library import library_product
from ladder.lanes import Lanes
from ladder.layers.activation import activate
from ladder.layers.attention import Attention
from ladder.layers.cache import KVCache, Metadata, PrefillMetadata
from ladder.layers.embedding import Embedding, Head
from ladder.layers.experts import ExpertMLP
from ladder.layers.mlp import MLP
from ladder.layers.norm import Norm
from ladder.layers.weight import Weight, as_one
from ladder.residual import ResidualStream
from ladder.wiring import Out

PIECES = 2  # that a prompt's partial sums are sent in: the first is reduced while the second is computed
# rows; below, a product of half of them is one wave of the chip, which becomes two beside an all-reduce on some cores
WORTH_CUTTING = 2048


class Prefill(FusedReader):
    """A sub-block's partial sum is all-reduced in pieces, most of it behind what this rank still computes."""

    def __init__(self, launch: Launch, size: int, lanes: Lanes | None = None) -> None:
        super().__init__(launch, lanes)
        self._size = size

    def embed(self, embedding: Embedding, tokens: Tensor, metadata: Metadata) -> Tensor:
        x: Tensor = embedding(tokens, metadata.positions)
        return x

    def norm_project(
        self, stream: ResidualStream, lag: int, norm: Norm | None, weight: Weight, kind: str,
        activation: str | None = None, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        x = self.norm(stream, lag, norm)
        y = library_product(x, weight, self.launch.library_matrix(x, weight))
        return y if activation is None else self.launch.activate(y, activation, gated)

    def norm_project_both(
        self, stream: ResidualStream, lag: int, attention: Attention, mlp: MLP
    ) -> tuple[Tensor, Tensor] | None:
        both = as_one(attention.qkv_proj, mlp.up_proj)
        if both is None:
            return None
        y = F.linear(self.norm(stream, lag, attention.norm), both.matrix, both.bias)
        return y[:, : both.first], self.launch.activate(y[:, both.first :], mlp.activation, mlp.gated)

    def attend(
        self, stream: ResidualStream, block: Attention, qkv: Tensor, metadata: Metadata, cache: KVCache | None
    ) -> Tensor:
        assert isinstance(metadata, PrefillMetadata) and cache is not None
        keys, values = cache.keys[block.layer], cache.values[block.layer]
        qkv = self.norms_of_all_heads(stream, block, qkv)
        turned = self.launch.rotate_write(qkv, block, metadata, keys, values)
        y = self.launch.attend_prompts(turned, block, metadata, keys, values)
        if metadata.newest is not None:
            self.launch.attend(qkv[: metadata.decoded].unsqueeze(0), block, metadata.newest, keys, values, y)
        return y

    def experts(self, stream: ResidualStream, out: Out, block: ExpertMLP, x: Tensor) -> None:
        choice = block.choose(x)
        y = grouped_experts(block, x, *choice) if can_group(block, x) else block.apply_experts(x, *choice)
        stream.write(y if block.residual_scale == 1 else y * block.residual_scale, out, self.post(block.post_norm))

    def project(
        self, stream: ResidualStream, out: Out, x: Tensor, weight: Weight, scale: float, post: Norm | None
    ) -> None:
        def whole(plus: Tensor | None, divisor: int) -> Tensor | Iterator[Tensor]:
            if out is Out.REDUCE and plus is None and post is None and len(x) >= WORTH_CUTTING and self._size > 1:
                return self._pieces(x, weight, scale)
            y = library_product(x, weight, self.launch.library_matrix(x, weight))
            y = y if scale == 1 else y * scale
            return y if plus is None else (plus / divisor + y if divisor > 1 else plus + y)

        stream.write(whole, out, self.post(post))

    def _pieces(self, x: Tensor, weight: Weight, scale: float) -> Iterator[Tensor]:
        target, matrix = x.new_empty(len(x), weight.outputs), self.launch.library_matrix(x, weight)
        for part, here in zip(x.chunk(PIECES), target.chunk(PIECES), strict=True):
            library_product(part, weight, matrix, here)
            yield here if scale == 1 else here.mul_(scale)

    def head(self, stream: ResidualStream, norm: Norm, head: Head, last: Tensor | None) -> Tensor:
        x = stream.read(lag=0)
        logits: Tensor = head(norm(x if last is None else x[last]))
        return logits


def can_group(block: ExpertMLP, x: Tensor) -> bool:
    """Whether the library has a product of all experts at once for this."""
    aligned = x.shape[1] % 8 == 0 and block.width % 8 == 0
    formats = block.up_proj.dense is not None and block.down_proj.dense is not None
    return formats and aligned and x.is_cuda and x.dtype is torch.bfloat16 and hasattr(F, "grouped_mm")


def grouped_experts(block: ExpertMLP, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """`apply_experts` with two products for all experts, and nothing that the CPU would have to wait for: rows are
    sorted by their experts, those of other ranks' experts last.
    """
    up, down = block.up_proj.dense, block.down_proj.dense
    assert up is not None and down is not None
    local = numbers.flatten() - block.first
    elsewhere = (local < 0) | (local >= block.local)
    expert, order = local.masked_fill(elsewhere, block.local).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(block.local, device=x.device), right=True).int()
    rows = x[order // block.top_k]
    inner = F.grouped_mm(rows, up.view(block.local, -1, x.shape[1]).transpose(1, 2), offs=ends)
    inner = activate(inner, block.activation, gated=True)
    each = F.grouped_mm(inner, down.view(block.local, x.shape[1], -1).transpose(1, 2), offs=ends)
    each = (each * weights.flatten()[order, None]).masked_fill((expert == block.local)[:, None], 0)
    by_row = torch.empty_like(each).index_copy(0, order, each).view(len(x), block.top_k, -1)
    return by_row.sum(1).to(x.dtype)
