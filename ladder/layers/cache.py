"""The KV cache, and the metadata of a forward pass over it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from ladder.config import ModelConfig
from ladder.devices import upload
from ladder.layers.rope import RopeTable

BLOCK = 16  # positions of a block
# blocks that no sequence has: one of zeros, and one that is written where a sequence has no block
ZEROS, SPARE, RESERVED = 0, 1, 2
FP8 = torch.float8_e4m3fn  # of a cache that takes a byte for each number
LARGEST = torch.finfo(FP8).max


class KVCache:
    """Keys and values of the running sequences, in blocks of BLOCK positions: [blocks * BLOCK, kv_heads of this rank,
    head_dim] for each layer. The slot of a sequence is a row of `tables`, [slots, blocks of the longest sequence]: its
    blocks in order.

    Keys and values have the model's dtype, or FP8, without scales. Whatever attention reads is as the cache holds it, a
    pass's own keys and values too: how a prompt was cut and what was computed before change no result.

    `lengths` says how much of each slot is valid. Beyond that may lie any finite numbers: a token sees only positions
    up to its own, and those have been written by the time it looks.
    """

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        blocks: int | None = None,
    ) -> None:
        """For sequences of up to `capacity` positions. With `blocks` the caller fills in the tables; without, every
        slot has as many blocks as it can use.
        """
        width = -(-capacity // BLOCK)
        self.blocks = slots * width if blocks is None else blocks
        shape = (self.blocks * BLOCK, max(1, config.kv_heads // size), config.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.tables = torch.full((slots, width), SPARE, dtype=torch.int32, device=device)
        if blocks is None:
            self.tables.copy_(torch.arange(slots * width, device=device).view(slots, width))
        self.lengths = [0] * slots
        self.capacity = capacity

    @staticmethod
    def block_bytes(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
        """Of one block, all layers together, on each of `size` ranks."""
        width = max(1, config.kv_heads // size) * config.head_dim
        return 2 * config.layers * BLOCK * width * dtype.itemsize

    def advance(self, counts: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """`counts[i]` more tokens of slot `slots[i]` are valid; without `slots`: of slot i."""
        for slot, count in zip(range(len(self.lengths)) if slots is None else slots, counts, strict=True):
            self.lengths[slot] += count

    def erase(self, blocks: Sequence[int]) -> None:
        """Make blocks fit for other sequences, where what they hold may not be finite."""
        for table in (*self.keys, *self.values):
            as_bytes = table.view(torch.uint8)
            as_bytes.view(-1, BLOCK, *as_bytes.shape[1:])[list(blocks)] = 0


def places(tables: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Where in the cache these positions of these slots are."""
    return tables[slots, positions // BLOCK].long() * BLOCK + positions % BLOCK


def write(table: Tensor, at: Tensor, x: Tensor) -> Tensor:
    """Keys or values go to these places of a cache's table; they are given back as they will be read from there. What
    FP8 has no number for becomes its largest.
    """
    if table.dtype is not FP8:
        table[at] = x.to(table.dtype)
        return x
    stored = x.clamp(-LARGEST, LARGEST).to(FP8)
    table.view(torch.uint8)[at] = stored.view(torch.uint8)  # not all devices can index FP8
    return stored.to(x.dtype)


def read(table: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """What these places of a cache's table hold."""
    found = table.view(torch.uint8)[at].view(FP8) if table.dtype is FP8 else table[at]
    return found.to(dtype)


@dataclass(frozen=True)
class Metadata:
    """Where the tokens of a pass stand, a row each: made once, used by all layers."""

    slots: Tensor  # [rows]
    positions: Tensor  # [rows]
    cos: Tensor  # [ropes, rows, head_dim / 2], float32, like sin
    sin: Tensor
    tables: Tensor  # the cache's
    reach: int  # positions that kernels are chosen for: the longest sequence, about

    def first(self, rows: int) -> "Metadata | None":
        """Of so many rows only; None: of no rows."""
        cos, sin = self.cos[:, :rows], self.sin[:, :rows]
        return (
            replace(self, slots=self.slots[:rows], positions=self.positions[:rows], cos=cos, sin=sin) if rows else None
        )


@dataclass(frozen=True)
class Pieces:
    """Rows of a pass that attention takes together: of `shape` = [batch, tokens], consecutive in their sequences."""

    shape: tuple[int, int]
    read: Tensor | None  # [batch, seen]: where in the cache the sequences' positions are; None: nothing came before
    masks: dict[int | None, Tensor | None]  # by sliding window: [batch, 1, tokens, seen], true where a token may look
    # None where all sequences begin at the same position and no sliding window bites: the tokens are the last of those
    # that are seen, and causal attention needs no mask in memory


@dataclass(frozen=True)
class PrefillMetadata(Metadata):
    """Of tokens that are consecutive in their sequences, sequence after sequence."""

    prompts: tuple[tuple[int, int], ...]  # where they start, and their tokens: the sequences that are not decoded
    windows: tuple[int | None, ...]  # sliding windows of the model's layers
    newest: Metadata | None = (
        None  # of the rows at the beginning that are a sequence's newest token, where there are any
    )
    made: dict[int, Tensor] = field(default_factory=dict)  # tiles of so many tokens

    @property
    def decoded(self) -> int:
        """Rows at the beginning that are a sequence's newest token: attention as in decoding."""
        return 0 if self.newest is None else len(self.newest.slots)

    @cached_property
    def pieces(self) -> tuple[Pieces, ...]:
        """Of the rows that are not decoded, as attention takes them by the library."""
        found, row = [], self.decoded
        # single tokens are taken together wherever they stand
        for _, group in groupby(self.prompts, lambda each: each if each[1] > 1 else 1):
            starts, (count, *_) = zip(*group, strict=True)
            end = row + len(starts) * count
            positions = self.positions[row:end].view(-1, count)
            found.append(_pieces(starts, positions, self.slots[row:end:count], self.tables, self.windows))
            row = end
        return tuple(found)

    @property
    def single(self) -> bool:
        """Whether there is one prompt, and this is its beginning: what it sees is in the pass."""
        return len(self.prompts) == 1 and self.prompts[0][0] == 0

    def tiles(self, tokens: int) -> Tensor:
        """The prompts in parts of up to `tokens` tokens: (row, tokens), [tiles, 2]."""
        if tokens not in self.made:
            self.made[tokens] = upload(torch.tensor(tiles(self.prompts, self.decoded, tokens)), self.positions.device)
        return self.made[tokens]

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        cache: KVCache | None,
        slots: Sequence[int] | None,
        config: ModelConfig,
        ropes: RopeTable,
        decoded: int = 0,
    ) -> "PrefillMetadata":
        """For `counts[i]` tokens that follow what slot `slots[i]` of the cache holds; without `slots`: slot i."""
        device = ropes.frequencies.device
        slots = range(len(counts)) if slots is None else slots
        starts = [0] * len(counts) if cache is None else [cache.lengths[slot] for slot in slots]
        seen = max(start + count for start, count in zip(starts, counts, strict=True))
        if cache is not None and seen > cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} positions, {seen} are needed")
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        owners = upload(torch.tensor(slots).repeat_interleave(torch.tensor(counts)), device)
        positions = upload(positions, device)  # by itself: kernels are compiled once more for addresses of other kinds
        tables = torch.zeros(1, 1, dtype=torch.int32, device=device) if cache is None else cache.tables
        reach = max(starts[:decoded], default=seen - 1) + 1  # kernels are chosen for the rows that are decoded
        prompts = tuple(zip(starts, counts, strict=True))[decoded:]
        every = Metadata(owners, positions, *ropes.angles(positions), tables, reach)
        return cls(**vars(every), prompts=prompts, windows=config.windows, newest=every.first(decoded))


def tiles(prompts: Sequence[tuple[int, int]], first: int, tokens: int) -> list[tuple[int, int]]:
    """Prompts, by where they start and their tokens, whose rows begin at `first`, in parts of up to `tokens` tokens:
    row and tokens of each. Those that see most come first.
    """
    found = []
    for start, count in prompts:
        found += [(start + at, first + at, min(tokens, count - at)) for at in range(0, count, tokens)]
        first += count
    return [(row, count) for _, row, count in sorted(found, reverse=True)]


def _pieces(
    starts: Sequence[int], positions: Tensor, slots: Tensor, tables: Tensor, windows: Sequence[int | None]
) -> Pieces:
    """Of tokens at `positions` [batch, tokens] of `slots` [batch]."""
    batch, tokens = positions.shape
    seen, alike = max(starts) + tokens, len(set(starts)) == 1
    every = torch.arange(seen, device=slots.device)
    masks: dict[int | None, Tensor | None] = {}
    for window in set(windows):
        if alike and (window is None or window >= seen):
            masks[window] = None
        else:
            where = positions[:1] if alike else positions  # one mask for all where all begin alike
            distance = where.int().unsqueeze(-1) - every.int()
            masks[window] = ((distance >= 0) & (distance < (window or seen + 1))).unsqueeze(1)
    read = None
    if seen > tokens:
        read = places(tables, slots.unsqueeze(1), every.unsqueeze(0))
        read = read.where(every <= positions[:, -1:], ZEROS)  # what is not its own must be finite
    return Pieces((batch, tokens), read, masks)
