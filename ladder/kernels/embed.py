"""The start of a decode step: this rank's part of the embedding, the rotary angles of the positions, flags reset."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.layers.cache import Metadata
from ladder.layers.embedding import Embedding
from ladder.layers.rope import RopeTable


@triton.jit
def _embed(tokens, positions, frequencies, magnitudes, table, learned, out, cos, sin, flags, first, step, count, scale,
           context, rows, K: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr,
           ROPES: tl.constexpr, SCALE: tl.constexpr, LEARNED: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    if b == 0:
        f = tl.arange(0, FP)
        tl.store(flags + f, tl.zeros([FP], tl.int32), mask=f < count)
    h = tl.arange(0, HP)
    position = tl.load(positions + b)
    for rope in tl.static_range(ROPES):
        angle = position.to(tl.float32) * tl.load(frequencies + rope * HALF + h, mask=h < HALF, other=0.0)
        magnitude = tl.load(magnitudes + rope)
        at = (rope * rows + b) * HALF + h
        tl.store(cos + at, tl.cos(angle) * magnitude, mask=h < HALF)
        tl.store(sin + at, tl.sin(angle) * magnitude, mask=h < HALF)
    row = tl.load(tokens + b) - first
    mine = (row >= 0) & (row < step)
    cols = tl.arange(0, BK)
    x = tl.load(table + tl.where(mine, row, 0) * K + cols, mask=(cols < K) & mine, other=0.0)
    if SCALE:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    if LEARNED:
        at = tl.minimum(position, context - 1) * K + cols
        x = (x.to(tl.float32) + tl.load(learned + at, mask=cols < K, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(out + b * K + cols, x, mask=cols < K)


def embed(embedding: Embedding, tokens: Tensor, metadata: Metadata, ropes: RopeTable, flags: Tensor) -> Tensor:
    """x = scale table[token - first], zero for tokens of other ranks' rows, + the position's learned embedding, if any;
    the metadata's cos and sin of position * frequency. `flags` are zero afterwards.
    """
    batch, (step, hidden), (count, half) = len(tokens), embedding.weight.shape, ropes.frequencies.shape
    out = torch.empty(batch, hidden, dtype=embedding.weight.dtype, device=tokens.device)
    learned = embedding.positions
    _embed[(batch,)](
        tokens.contiguous(), metadata.positions, ropes.frequencies, ropes.magnitudes, embedding.weight, learned, out,
        metadata.cos, metadata.sin, flags, embedding.start, step, len(flags), embedding.scale,
        0 if learned is None else len(learned), batch, K=hidden, BK=triton.next_power_of_2(hidden), HALF=half,
        HP=triton.next_power_of_2(half), FP=triton.next_power_of_2(len(flags)), ROPES=count,
        SCALE=embedding.scale != 1, LEARNED=learned is not None, num_warps=8,
    )  # fmt: skip
    return out


def embed_reference(
    embedding: Embedding, tokens: Tensor, metadata: Metadata, ropes: RopeTable, flags: Tensor
) -> Tensor:
    flags.zero_()
    cos, sin = ropes.angles(metadata.positions)
    metadata.cos.copy_(cos)
    metadata.sin.copy_(sin)
    x: Tensor = embedding(tokens, metadata.positions)
    return x
