"""A step's beginning: this rank's term of the embedding, the angles of the positions, and the flags put down."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.jit import tl, triton


@triton.jit
def _start(tokens, positions, frequencies, table, out, cos, sin, flags, first, step, count,
           K: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    if b == 0:
        f = tl.arange(0, FP)
        tl.store(flags + f, tl.zeros([FP], tl.int32), mask=f < count)
    h = tl.arange(0, HP)
    angle = tl.load(positions + b).to(tl.float32) * tl.load(frequencies + h, mask=h < HALF, other=0.0)
    tl.store(cos + b * HALF + h, tl.cos(angle), mask=h < HALF)
    tl.store(sin + b * HALF + h, tl.sin(angle), mask=h < HALF)
    row = tl.load(tokens + b) - first
    mine = (row >= 0) & (row < step)
    cols = tl.arange(0, BK)
    x = tl.load(table + tl.where(mine, row, 0) * K + cols, mask=(cols < K) & mine, other=0.0)
    tl.store(out + b * K + cols, x, mask=cols < K)


def start(
    tokens: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor, first: int, flags: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x = table[token - first], zero for tokens of other ranks' rows; cos and sin of position * frequency.

    `flags` are zero afterwards.
    """
    batch, (step, hidden), half = len(tokens), table.shape, len(frequencies)
    out = torch.empty(batch, hidden, dtype=table.dtype, device=table.device)
    cos, sin = (torch.empty(batch, half, device=table.device) for _ in range(2))
    _start[(batch,)](
        tokens.contiguous(), positions, frequencies, table, out, cos, sin, flags, first, step, len(flags),
        K=hidden, BK=triton.next_power_of_2(hidden), HALF=half, HP=triton.next_power_of_2(half),
        FP=triton.next_power_of_2(len(flags)), num_warps=8,
    )  # fmt: skip
    return out, cos, sin


def start_twin(
    tokens: Tensor, positions: Tensor, frequencies: Tensor, table: Tensor, first: int, flags: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    flags.zero_()
    row = tokens - first
    mine = (row >= 0) & (row < len(table))
    angle = positions.unsqueeze(-1).float() * frequencies
    return F.embedding(row.where(mine, 0), table).where(mine.unsqueeze(-1), 0), angle.cos(), angle.sin()
