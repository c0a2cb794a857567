"""The KV cache, and the metadata of a forward pass over it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.config import ModelConfig
from ladder.layers.rope import RopeTable


class KVCache:
    """Keys and values of the running sequences, a slot for each: [slots, capacity, kv_heads of this rank, head_dim].

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
        """Make a slot fit for another sequence: what it held may not have been finite."""
        self.lengths[slot] = 0
        for table in (*self.keys, *self.values):
            table[slot].zero_()

    def grow(self, capacity: int) -> None:
        """Make room for longer sequences; what the slots hold stays."""
        more = (0, 0, 0, 0, 0, capacity - self.capacity)
        for tables in (self.keys, self.values):
            for layer, table in enumerate(tables):  # one layer at a time: the old and the new cache never both exist
                tables[layer] = F.pad(table, more)
        self.capacity = capacity


@dataclass(frozen=True)
class Metadata:
    """Where the tokens of a pass stand, a row each: made once, used by all layers."""

    slots: Tensor  # [rows]
    positions: Tensor  # [rows]
    cos: Tensor  # [ropes, rows, head_dim / 2], float32, like sin
    sin: Tensor


@dataclass(frozen=True)
class PrefillMetadata(Metadata):
    """Of `shape` = [batch, tokens] tokens that are consecutive in their sequences, row after row."""

    shape: tuple[int, int]
    read: slice | Tensor  # the sequences' slots: a slice where they are neighbours, which copies nothing
    seen: int  # how many positions of the cache the furthest token can see
    masks: dict[int | None, Tensor | None]  # by sliding window: [batch, 1, tokens, seen], true where a token may look
    # None where all sequences begin at position 0 and no sliding window bites: causal attention needs no mask in memory

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        cache: KVCache | None,
        slots: Sequence[int] | None,
        config: ModelConfig,
        ropes: RopeTable,
    ) -> "PrefillMetadata":
        """For `shape` = [batch, tokens] tokens that follow what the slots of the cache hold."""
        batch, tokens = shape
        device = ropes.frequencies.device
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
        each = torch.tensor(list(slots), device=device)
        neighbours = list(slots) == list(range(slots[0], slots[0] + batch))
        read = slice(slots[0], slots[0] + batch) if neighbours else each
        flat = positions.flatten()
        return cls(each.repeat_interleave(tokens), flat, *ropes.angles(flat), (batch, tokens), read, seen, masks)
