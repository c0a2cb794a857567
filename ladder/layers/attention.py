"""Grouped-query attention over this rank's heads, with a cache of the keys and values seen so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ladder.comm.base import Comm
from ladder.config import ModelConfig
from ladder.layers.linear import QKVLinear, RowLinear
from ladder.layers.norm import RMSNorm
from ladder.layers.rope import angles, rotate


class KVCache:
    """Keys and values of the requests under way, a slot for each: [slots, capacity, kv_heads of this rank, head_dim].

    `lengths` says how much of each slot is valid. Beyond that may lie any finite numbers: a token sees only positions
    up to its own, and those have been written by the time it looks.
    """

    def __init__(
        self, config: ModelConfig, size: int, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (slots, capacity, max(1, config.kv_heads // size), config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.lengths = [0] * slots
        self.capacity = capacity

    def advance(self, counts: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """`counts[i]` more tokens of slot `slots[i]` are valid; without `slots`: of slot i."""
        for slot, count in zip(range(len(self.lengths)) if slots is None else slots, counts, strict=True):
            self.lengths[slot] += count

    def clear(self, slot: int) -> None:
        """Make a slot fit for another request: what it held may not have been finite."""
        self.lengths[slot] = 0
        for table in (*self.keys, *self.values):
            table[slot].zero_()

    def grow(self, capacity: int) -> None:
        """Make room for longer requests; what the slots hold stays."""
        more = (0, 0, 0, 0, 0, capacity - self.capacity)
        for tables in (self.keys, self.values):
            for layer, table in enumerate(tables):  # one layer at a time: the old and the new cache never both exist
                tables[layer] = F.pad(table, more)
        self.capacity = capacity


@dataclass(frozen=True)
class Place:
    """Where the tokens of one forward pass stand: made once, used by all layers."""

    positions: Tensor  # [batch, tokens]
    lines: Tensor  # [batch, 1], the slots that are written
    read: slice | Tensor  # the same slots as they are read: a slice where they are neighbours, which copies nothing
    seen: int  # how many positions of the cache the furthest token can see
    cos: Tensor  # [batch, tokens, 1, head_dim], like sin
    sin: Tensor
    masks: dict[int | None, Tensor | None]  # by sliding window: [batch, 1, tokens, seen], true where a token may look
    # None where all lines begin at position 0 and no sliding window bites: causal attention needs no mask in memory

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        cache: KVCache | None,
        slots: Sequence[int] | None,
        config: ModelConfig,
        frequencies: Tensor,
        dtype: torch.dtype,
    ) -> "Place":
        """For `shape` = [batch, tokens] tokens that follow what the slots of the cache hold."""
        batch, tokens = shape
        device = frequencies.device
        slots = range(batch) if slots is None else slots
        starts = [0] * batch if cache is None else [cache.lengths[slot] for slot in slots]
        seen = max(starts) + tokens
        if cache is not None and seen > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} positions, {seen} are needed")
        positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(tokens, device=device)
        masks: dict[int | None, Tensor | None] = {}
        for window in set(config.windows):
            if seen == tokens and (window is None or window >= seen):
                masks[window] = None
            else:
                alike = positions[:1] if len(set(starts)) == 1 else positions  # one mask for all where all begin alike
                distance = alike.int().unsqueeze(-1) - torch.arange(seen, device=device, dtype=torch.int32)
                masks[window] = ((distance >= 0) & (distance < (window or seen + 1))).unsqueeze(1)
        lines = torch.tensor(list(slots), device=device).unsqueeze(1)
        neighbours = list(slots) == list(range(slots[0], slots[0] + batch))
        read = slice(slots[0], slots[0] + batch) if neighbours else lines[:, 0]
        return cls(positions, lines, read, seen, *angles(frequencies, positions, dtype), masks)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over this rank's heads, then its term of the output projection."""

    def __init__(self, config: ModelConfig, layer: int, comm: Comm, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.windows[layer]
        self.head_dim = config.head_dim
        self.qkv_proj = QKVLinear(config, comm, dtype)
        width = config.heads * config.head_dim
        self.o_proj = RowLinear("o_proj", width, config.hidden, config.o_bias, comm, dtype)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = RMSNorm("q_norm", config.head_dim, config.norm_eps, dtype)
            self.k_norm = RMSNorm("k_norm", config.head_dim, config.norm_eps, dtype)

    def forward(self, x: Tensor, place: Place, cache: KVCache | None) -> Tensor:
        """[batch, tokens, hidden] -> the partial sum, same shape."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv_proj(x))
        q = rotate(self.q_norm(q), place.cos, place.sin)
        k = rotate(self.k_norm(k), place.cos, place.sin)
        if cache is not None:
            keys, values = cache.keys[self.layer], cache.values[self.layer]
            keys[place.lines, place.positions] = k
            values[place.lines, place.positions] = v
            k, v = keys[place.read, : place.seen], values[place.read, : place.seen]
        partial: Tensor = self.o_proj(self.look(q, k, v, place))
        return partial

    def look(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        """softmax(q k^T / sqrt(d)) v for q, k, v [batch, tokens or positions, heads, head_dim] -> [.., heads * d]."""
        mask = place.masks[self.window]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return y.transpose(1, 2).flatten(-2)
