"""Grouped-query attention over this rank's heads."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.cache import KVCache, Metadata, PrefillMetadata, read
from ladder.layers.formats import new_weight
from ladder.layers.norm import Norm, new_norm
from ladder.layers.ops import Ops
from ladder.layers.shard import Piece, part
from ladder.residual import ResidualStream
from ladder.wiring import SubBlock


class Attention(nn.Module):
    """The sub-block softmax( q k^T scale ) v over this rank's heads, then its term of the output projection."""

    def __init__(self, config: ModelConfig, layer: int, rope: int, comm: Comm, dtype: torch.dtype) -> None:
        super().__init__()
        names, prefix = config.names, f"{config.names.layers}.{layer}."
        self.layer, self.rope, self.window, self.dtype = layer, rope, config.windows[layer], dtype
        self.head_dim, self.scale, self.cap = config.head_dim, config.scale, config.attention_softcap
        self.heads = config.heads // comm.size
        self.copies = max(
            1, comm.size // config.kv_heads
        )  # with fewer key/value heads than ranks, neighbours share one
        self.kv_heads = config.kv_heads * self.copies // comm.size
        self.residual_scale = config.residual_scale
        inputs, width = config.heads * config.head_dim, (self.heads + 2 * self.kv_heads) * config.head_dim
        pieces = qkv_pieces(config, layer, comm)
        self.qkv_proj = new_weight(config.weights, width, config.hidden, config.qkv_bias, dtype, pieces)
        mine, bias = part(inputs, comm.size, comm.rank), config.o_bias and comm.rank == 0  # the bias is added once
        o = Piece(prefix + names.o, (config.hidden, inputs), slice(0, config.hidden), mine, 0, names.transposed)
        self.o_proj = new_weight(config.weights, config.hidden, self.heads * config.head_dim, bias, dtype, [o])
        self.norm = new_norm(prefix, names.attention_norm, config, dtype)
        self.post_norm = new_norm(prefix, names.attention_post_norm, config, dtype)
        self.qk_norm = config.family_row.qk_norm
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if self.qk_norm == "head":
            self.q_norm = Norm(prefix + names.q_norm, config.head_dim, config, dtype)
            self.k_norm = Norm(prefix + names.k_norm, config.head_dim, config, dtype)
        elif self.qk_norm == "all":
            kv = part(config.kv_heads * config.head_dim, comm.size // self.copies, comm.rank // self.copies)
            self.q_norm = Norm(prefix + names.q_norm, inputs, config, dtype, mine)
            self.k_norm = Norm(prefix + names.k_norm, config.kv_heads * config.head_dim, config, dtype, kv)

    def forward(
        self,
        ops: Ops,
        stream: ResidualStream,
        wiring: SubBlock,
        metadata: Metadata,
        cache: KVCache | None,
        read: Tensor | None = None,
    ) -> None:
        """`read`: the product of what it reads, where the MLP's is the same one."""
        qkv = ops.norm_project(stream, wiring.lag, self.norm, self.qkv_proj, "qkv") if read is None else read
        y = ops.attend(stream, self, qkv, metadata, cache)
        ops.project(stream, wiring.out, y, self.o_proj, self.residual_scale, self.post_norm)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, (heads + 2 kv_heads) * d] -> queries, keys and values by head."""
        widths = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(widths, dim=-1))
        return q, k, v

    def norm_qk(self, stream: ResidualStream, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [rows, heads, d] through their norms, where there are any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        # one norm for all heads: the ranks' sums of squares must be added up, copies of a head counted once
        flat = [x.flatten(1).to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k)]
        q_squares, k_squares = (x.square().sum(-1) for x in flat)
        squares = stream.total(torch.stack([q_squares, k_squares / self.copies], dim=-1))
        q_mean, k_mean = squares[:, :1] / self.q_norm.width, squares[:, 1:] / self.k_norm.width
        q, k = self.q_norm(q.flatten(1), q_mean).view_as(q), self.k_norm(k.flatten(1), k_mean).view_as(k)
        return q, k

    def over_pieces(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: PrefillMetadata, keys: Tensor | None, values: Tensor | None
    ) -> Tensor:
        """Attention of a pass's rows [rows, heads, d] that are not decoded -> [such rows, heads * d]. What came before
        them is in the cache.
        """
        found, row = [], metadata.decoded
        for piece in metadata.pieces:
            end = row + piece.shape[0] * piece.shape[1]
            its_q, its_k, its_v = (x[row:end].unflatten(0, piece.shape) for x in (q, k, v))
            if piece.read is not None:
                assert keys is not None and values is not None
                its_k, its_v = (read(x, piece.read, q.dtype) for x in (keys, values))
            found.append(self._scaled_dot_product(its_q, its_k, its_v, piece.masks[self.window]))
            row = end
        return found[0] if len(found) == 1 else torch.cat(found)

    def _scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax( q k^T scale ) v for q, k, v [batch, tokens or positions, heads, d] -> [rows, heads * d]."""
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        tokens, seen = q.shape[2], k.shape[2]
        if self.cap is None:
            causal = mask is None and tokens == seen
            if mask is None and 1 < tokens < seen:
                mask = _last_of(tokens, seen, q)
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=True
            )
        else:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
            scores = self.cap * torch.tanh((q @ k.transpose(2, 3)).float() * (self.scale / self.cap))
            if mask is None:
                mask = torch.ones(tokens, seen, dtype=torch.bool, device=scores.device).tril(seen - tokens)
            y = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).to(v.dtype) @ v
        return y.transpose(1, 2).flatten(0, 1).flatten(1)


def _last_of(tokens: int, seen: int, x: Tensor) -> Tensor:
    """The mask of causal attention of the last `tokens` of `seen` positions; on a GPU it is not made in memory."""
    if not x.is_cuda:
        return torch.ones(tokens, seen, dtype=torch.bool, device=x.device).tril(seen - tokens)
    from torch.nn.attention.bias import causal_lower_right  # it imports Triton

    return causal_lower_right(tokens, seen)


def qkv_pieces(config: ModelConfig, layer: int, comm: Comm) -> Iterator[Piece]:
    """This rank's queries, keys and values, wherever the checkpoint keeps them.

    Where only the first dimensions of a head are rotated, the two of a pair are brought half a head apart, as in a head
    that is rotated as a whole. Scores do not change: queries and keys are permuted alike.
    """
    names, d, group = config.names, config.head_dim, config.heads // config.kv_heads
    copies = max(1, comm.size // config.kv_heads)
    kv = part(config.kv_heads, comm.size // copies, comm.rank // copies)
    rope = config.rope_of(layer)
    rotated = d if rope is None else rope.dimensions(d)
    pairs, rest = rotated // 2, (d - rotated) // 2
    turned = ((0, pairs), (rotated, rotated + rest), (pairs, rotated), (rotated + rest, d))
    at = 0
    for kind, heads in enumerate((part(config.heads, comm.size, comm.rank), kv, kv)):
        for head in range(heads.start, heads.stop):
            name, total, place = names.qkv[0], config.heads + 2 * config.kv_heads, head
            if len(names.qkv) == 3:
                name, total = names.qkv[kind], config.kv_heads if kind else config.heads
            elif names.grouped:
                place = (
                    head // group * (group + 2) + head % group if kind == 0 else head * (group + 2) + group + kind - 1
                )
            elif kind:
                place = config.heads + (kind - 1) * config.kv_heads + head
            for start, stop in turned if kind < 2 and rotated < d else ((0, d),):
                rows = slice(place * d + start, place * d + stop)
                shape, columns = (total * d, config.hidden), slice(0, config.hidden)
                yield Piece(f"{names.layers}.{layer}.{name}", shape, rows, columns, at, names.transposed)
                at += stop - start
