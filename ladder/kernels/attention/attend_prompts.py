"""Attention of the tokens of several prompts over their blocks of the cache, in one launch."""

from dataclasses import replace
from math import e, log2

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.attention.attend import PER_WARP, attend_rows_reference, block_of, capped
from ladder.kernels.device import product
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, PrefillMetadata

QUERIES = 128  # of a tile: a few tokens, each with the heads that share a key
POSITIONS = 64  # of keys and values that are under way together
STAGES = 3


@triton.jit
def _over(query, keys, values, own, begin, end, last, position, top, mass, y, row, d, scale, cap, D: tl.constexpr,
          BT: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
          IEEE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest score so far, the sum of 2^(score - largest), and that of the values weighted so, with the positions
    from `begin` to `end`; those from `last` on are of nobody's.
    """
    for block in tl.range(begin, end, BT, num_stages=STAGES):
        at = block + tl.arange(0, BT)
        key, value = block_of(keys, values, own, at, at < last, row, d, D, BLOCK)
        nothing = tl.zeros([query.shape[0], BT], tl.float32)
        score = capped(product(query, tl.trans(key.to(query.dtype)), nothing, IEEE) * scale, cap, CAP)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        known = tl.where(higher == float("-inf"), 0.0, higher)  # nothing has been seen yet
        fade = tl.exp2(top - known)
        p = tl.exp2(score - known[:, None])
        mass = mass * fade + tl.sum(p, axis=1)
        y = product(p.to(query.dtype), value.to(query.dtype), y * fade[:, None], IEEE)
        top = higher
    return top, mass, y


@triton.jit(do_not_specialize=["WIDTH"])
def _attend_prompts(turned, keys, values, tiles, slots, positions, tables, out, scale, cap, WIDTH, G: tl.constexpr,
                    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KVHEADS: tl.constexpr, WINDOW: tl.constexpr,
                    CAP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    first, count = tl.load(tiles + 2 * tile).to(tl.int32), tl.load(tiles + 2 * tile + 1).to(tl.int32)
    start = tl.load(positions + first, mask=count > 0, other=0).to(
        tl.int32
    )  # none of a tile that fills up their number
    own = tables + tl.load(slots + first).to(tl.int64) * WIDTH
    m = tl.arange(0, BM)
    token, head = m // GP, m % GP
    d = tl.arange(0, DP)
    here = ((token < count) & (head < G))[:, None] & (d < D)[None, :]
    rows = (first + token).to(tl.int64)
    query = tl.load(
        turned + (rows * ((G + 2) * KVHEADS * D) + (kv * G + head) * D)[:, None] + d[None, :], mask=here, other=0.0
    )
    position = start + token
    end = start + count
    keys += kv * D
    values += kv * D
    row = KVHEADS * D
    top = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    y = tl.zeros([BM, DP], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, start + 1 - WINDOW) // BT * BT
    else:  # what all of the tile's tokens see
        begin = (start + 1) // BT * BT
        top, mass, y = _over(query, keys, values, own, 0, begin, begin, position, top, mass, y, row, d, scale, cap, D,
                             BT, 0, False, CAP, STAGES, IEEE, BLOCK)  # fmt: skip
    top, mass, y = _over(query, keys, values, own, begin, end, end, position, top, mass, y, row, d, scale, cap, D, BT,
                         WINDOW, True, CAP, STAGES, IEEE, BLOCK)  # fmt: skip
    to = out + rows[:, None] * (G * KVHEADS * D) + ((kv * G + head) * D)[:, None] + d[None, :]
    mass = tl.maximum(mass, 1.0)  # the largest score's share is 1; the tile's end may have seen nothing
    tl.store(to, (y / mass[:, None]).to(out.dtype.element_ty), mask=here)


def tokens_of_tile(heads: int, kv_heads: int, head_dim: int, size: int) -> int:
    """Tokens of a program, of numbers of `size` bytes."""
    group, padded = triton.next_power_of_2(heads // kv_heads), max(16, triton.next_power_of_2(head_dim))
    return int(_queries(group, padded, size) // group)


def _queries(group: int, width: int, size: int) -> int:
    return max(16, group, min(QUERIES, QUERIES * 256 // (width * size)))


def attend_prompts(
    turned: Tensor, block: Attention, metadata: PrefillMetadata, keys: Tensor, values: Tensor, shared: int
) -> Tensor:
    """softmax( q K^T scale ) V for the rows of a pass that are a prompt's, [rows, heads * d]: each sees its sequence up
    to itself, in the cache, where its own key and value are by now. `turned` [rows, heads + 2 kv_heads, d] has q. Rows
    that are in no tile are not written.

    Scores become cap tanh(score / cap) if there is a cap. A program has some tokens of a sequence and the heads that
    share a key; `shared`: bytes of a multiprocessor for the keys and values that it has under way.
    """
    rows, (_, kv_heads, d) = len(turned), keys.shape
    group = block.heads // kv_heads
    group_padded, padded = triton.next_power_of_2(group), max(16, triton.next_power_of_2(d))
    size = turned.element_size()
    queries = _queries(group_padded, padded, size)
    under_way = shared - queries * padded * size
    position_bytes = 2 * padded * keys.element_size() * (STAGES - 1)
    seen = max(16, min(POSITIONS * 2 // size, 1 << (max(1, under_way // position_bytes).bit_length() - 1)))
    tiles = metadata.tiles(queries // group_padded)
    out = torch.empty(rows, block.heads * d, dtype=turned.dtype, device=turned.device)
    in_bits = log2(e)  # scores are exponents of 2
    _attend_prompts[(len(tiles), kv_heads)](
        turned, keys, values, tiles, metadata.slots, metadata.positions, metadata.tables, out, block.scale * in_bits,
        (block.cap or 1.0) * in_bits, metadata.tables.shape[1],
        G=group, GP=group_padded, D=d, DP=padded, KVHEADS=kv_heads, WINDOW=block.window or 0,
        CAP=block.cap is not None, BM=queries, BT=seen, STAGES=STAGES, IEEE=turned.dtype is torch.float32, BLOCK=BLOCK,
        num_warps=max(4, min(8, queries * padded // PER_WARP)),
    )  # fmt: skip
    return out


def attend_tiles_reference(
    turned: Tensor, block: Attention, metadata: PrefillMetadata, keys: Tensor, values: Tensor
) -> Tensor:
    """The same of the tiles that the metadata has, with torch, one row after the other."""
    (tiles,) = metadata.made.values()
    rows = torch.cat([torch.arange(first, first + count, device=turned.device) for first, count in tiles.tolist()])
    out = turned.new_zeros(len(turned), block.heads * turned.shape[2])
    own = replace(metadata, slots=metadata.slots[rows], positions=metadata.positions[rows])
    out[rows] = attend_rows_reference(turned[rows, : block.heads], block, own, keys, values)
    return out
