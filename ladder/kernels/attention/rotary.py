"""Norms by head, rotary embedding and cache writes for prefill, between the library's matrix products."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import cache_line, cached
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, Metadata, places, write
from ladder.layers.rope import rotate


@triton.jit
def _rotate_write(qkv, cos, sin, q_gain, k_gain, slots, positions, tables, out, keys, values, eps, WIDTH, STRIDE,
                  HEADS: tl.constexpr, KVHEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                  QKNORM: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    half: tl.constexpr = D // 2
    partner = tl.where(d < half, d + half, d - half)
    wide = d < D
    here = (h < HEADS + 2 * KVHEADS)[:, None] & wide[None, :]
    line = row.to(tl.int64) * (HEADS + 2 * KVHEADS) * D
    given = qkv + row.to(tl.int64) * STRIDE
    x = tl.load(given + h[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    y = tl.load(given + h[:, None] * D + partner[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + d % half, mask=wide, other=0.0)
    s = tl.load(sin + row * half + d % half, mask=wide, other=0.0)
    s = tl.where(d < half, -s, s)
    is_q = (h < HEADS)[:, None]
    turned = (h < HEADS + KVHEADS)[:, None]
    u, v = x, y
    if QKNORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        qa = (tl.load(q_gain + d, mask=wide, other=0.0).to(tl.float32) + OFFSET)[None, :]
        qb = (tl.load(q_gain + partner, mask=wide, other=0.0).to(tl.float32) + OFFSET)[None, :]
        ka = (tl.load(k_gain + d, mask=wide, other=0.0).to(tl.float32) + OFFSET)[None, :]
        kb = (tl.load(k_gain + partner, mask=wide, other=0.0).to(tl.float32) + OFFSET)[None, :]
        u = x * factor * tl.where(is_q, qa, ka)
        v = y * factor * tl.where(is_q, qb, kb)
    z = tl.where(turned, u * c[None, :] + v * s[None, :], x).to(out.dtype.element_ty)
    kept = cached(z, keys.dtype.element_ty)
    z = tl.where(is_q, z, kept)
    tl.store(out + line + h[:, None] * D + d[None, :], z, mask=here)
    at = cache_line(tables + tl.load(slots + row) * WIDTH, tl.load(positions + row), True, BLOCK) * KVHEADS * D
    k_at = at + (h - HEADS)[:, None] * D + d[None, :]
    tl.store(keys + k_at, kept.to(keys.dtype.element_ty), mask=here & turned & (h >= HEADS)[:, None])
    tl.store(values + k_at - KVHEADS * D, kept.to(keys.dtype.element_ty), mask=here & (h >= HEADS + KVHEADS)[:, None])


def head_gains(block: Attention) -> tuple[Tensor | None, Tensor | None, float, int]:
    """As the kernels take norms by head: gain of queries, gain of keys, eps, offset."""
    if block.qk_norm != "head" or block.q_norm is None or block.k_norm is None:
        return None, None, 0.0, 0
    return block.q_norm.weight, block.k_norm.weight, block.q_norm.eps, block.q_norm.offset


def rotate_write(qkv: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor) -> Tensor:
    """q, k and v by head, [tokens, heads + 2 kv_heads, d], q and k through their norms by head where there are any, and
    rotated; k and v go to the cache, too, and are as it holds them. Rows of qkv may be parts of longer ones.
    """
    rows, heads = len(qkv), block.heads
    _, kv_heads, d = keys.shape
    out = torch.empty(rows, heads + 2 * kv_heads, d, dtype=qkv.dtype, device=qkv.device)
    q_gain, k_gain, eps, offset = head_gains(block)
    _rotate_write[(rows,)](
        qkv, metadata.cos[block.rope], metadata.sin[block.rope], q_gain, k_gain, metadata.slots, metadata.positions,
        metadata.tables, out, keys, values, eps, metadata.tables.shape[1], qkv.stride(0), HEADS=heads, KVHEADS=kv_heads,
        HP=triton.next_power_of_2(heads + 2 * kv_heads), D=d, DP=triton.next_power_of_2(d),
        QKNORM=q_gain is not None, OFFSET=offset, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def rotate_write_reference(qkv: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = block.split(qkv)
    if block.qk_norm == "head":
        assert block.q_norm is not None and block.k_norm is not None
        q, k = block.q_norm(q), block.k_norm(k)
    cos, sin = metadata.cos[block.rope], metadata.sin[block.rope]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    at = places(metadata.tables, metadata.slots, metadata.positions)
    k, v = write(keys, at, k), write(values, at, v)
    return torch.cat((q, k, v), dim=1)
