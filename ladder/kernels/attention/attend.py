"""Attention of one new token per request over its slot of the cache, split along the positions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.attention.rotary import head_gains, rotate_write_reference
from ladder.kernels.device import cache_line, cached, let_others_start, product, wait_for_others
from ladder.kernels.table import Split
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, Metadata, places, read

PER_WARP = 2048  # numbers of an output that the registers of a warp hold beside all else


@dataclass(frozen=True)
class Scratch:
    """Where the splits of one kernel leave what they found; `arrived` is zero between kernels."""

    parts: Tensor
    weights: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, batch: int, heads: int, head_dim: int, splits: int, device: torch.device) -> "Scratch":
        parts = torch.empty(batch * heads * splits * head_dim, device=device)
        weights = torch.empty(batch * heads * splits * 2, device=device)
        return cls(parts, weights, torch.zeros(batch * heads, dtype=torch.int32, device=device))


@triton.jit
def _heads(qkv, at, stride, inside, QS: tl.constexpr):
    """One of the fused projection's outputs, the sum of its splits."""
    x = tl.load(qkv + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for split in tl.static_range(1, QS):
        x += tl.load(qkv + split * stride + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return x


@triton.jit
def capped(score, cap, CAP: tl.constexpr):
    """cap tanh(score / cap), where there is a cap; tanh(u) is 2 sigmoid(2 u) - 1"""
    if CAP:
        return cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
    else:
        return score


@triton.jit
def block_of(keys, values, table, at, inside, row, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values of these positions of a sequence."""
    place = (cache_line(table, at, inside, BLOCK) * row)[:, None] + d[None, :]
    here = inside[:, None] & (d < D)[None, :]
    return tl.load(keys + place, mask=here, other=0.0), tl.load(values + place, mask=here, other=0.0)


@triton.jit
def _seen(query, key, value, inside, top, mass, y, scale, cap, CAP: tl.constexpr, IEEE: tl.constexpr):
    """The largest score so far, the sum of exp(score - largest), and that of the values weighted so, with these."""
    nothing = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    score = capped(product(query, tl.trans(key.to(query.dtype)), nothing, IEEE) * scale, cap, CAP)
    score = tl.where(inside[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    fade = tl.exp(top - higher)
    p = tl.exp(score - higher[:, None])
    y = product(p.to(query.dtype), value.to(query.dtype), y * fade[:, None], IEEE)
    return higher, mass * fade + tl.sum(p, axis=1), y


@triton.jit(do_not_specialize=["BATCH"])  # else batches of a multiple of 16 have a kernel of their own
def _attend(qkv, cos, sin, q_gain, k_gain, keys, values, slots, positions, tables, out, parts, weights,
            arrived, eps, scale, cap, BATCH, WIDTH, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr, KVHEADS: tl.constexpr, WINDOW: tl.constexpr, QS: tl.constexpr, QKNORM: tl.constexpr,
            OFFSET: tl.constexpr, CAP: tl.constexpr, BT: tl.constexpr,
            SPLITS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    split = tl.program_id(0)
    kv = tl.program_id(1)
    b = tl.program_id(2)
    n = tl.load(positions + b).to(tl.int32) + 1  # how many positions can be seen
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, n - WINDOW)
    share = tl.cdiv(tl.cdiv(n - first, SPLITS), BT) * BT
    begin = first + split * share
    end = tl.minimum(n, begin + share)
    last = tl.minimum(end, n - 1)  # the newest position comes from the kernel before this one
    half: tl.constexpr = D // 2  # keys and queries have halves, which are rotated against each other
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    t = tl.arange(0, BT)
    row = KVHEADS * D
    own = tables + tl.load(slots + b).to(tl.int64) * WIDTH
    keys += kv * D
    values += kv * D
    wide = d < D
    if EARLY:  # older positions can be had before the kernel before this one has finished
        early = begin + t
        first_keys, first_values = block_of(keys, values, own, early, early < last, row, d, D, BLOCK)
    newest_place = cache_line(own, n - 1, n > 0, BLOCK) * row
    partner = tl.where(d < half, d + half, d - half)
    c = tl.load(cos + b * half + d % half, mask=wide, other=0.0)
    s = tl.load(sin + b * half + d % half, mask=wide, other=0.0)
    s = tl.where(d < half, -s, s)
    if QKNORM:
        q_own = tl.load(q_gain + d, mask=wide, other=0.0).to(tl.float32) + OFFSET
        q_other = tl.load(q_gain + partner, mask=wide, other=0.0).to(tl.float32) + OFFSET
        k_own = tl.load(k_gain + d, mask=wide, other=0.0).to(tl.float32) + OFFSET
        k_other = tl.load(k_gain + partner, mask=wide, other=0.0).to(tl.float32) + OFFSET
    wait_for_others(PDL)
    let_others_start(PDL)
    width = (G + 2) * KVHEADS * D
    here = (g < G)[:, None] & wide[None, :]
    there = here & (n > 0)  # else it is nobody's row
    at_q = b * width + (kv * G + g[:, None]) * D
    q = _heads(qkv, at_q + d[None, :], BATCH * width, here, QS)
    other_q = _heads(qkv, at_q + partner[None, :], BATCH * width, here, QS)
    at_k = b * width + (G * KVHEADS + kv) * D
    k = _heads(qkv, at_k + d, BATCH * width, wide, QS)
    other_k = _heads(qkv, at_k + partner, BATCH * width, wide, QS)
    v = _heads(qkv, at_k + KVHEADS * D + d, BATCH * width, wide, QS)
    if QKNORM:
        factor = tl.rsqrt(tl.sum(q * q, axis=1) / D + eps)[:, None]
        q, other_q = q * factor * q_own[None, :], other_q * factor * q_other[None, :]
        factor = tl.rsqrt(tl.sum(k * k, axis=0) / D + eps)
        k, other_k = k * factor * k_own, other_k * factor * k_other
    query = (q * c[None, :] + other_q * s[None, :]).to(out.dtype.element_ty)
    new_key = cached((k * c + other_k * s).to(out.dtype.element_ty), keys.dtype.element_ty)
    new_value = cached(v.to(out.dtype.element_ty), values.dtype.element_ty)
    mine = (begin <= n - 1) & (n - 1 < end)
    tl.store(keys + newest_place + d, new_key.to(keys.dtype.element_ty), mask=wide & mine)
    tl.store(values + newest_place + d, new_value.to(values.dtype.element_ty), mask=wide & mine)
    # the newest position first, where it is this program's
    seen = query.to(tl.float32) * new_key.to(tl.float32)[None, :]
    top = tl.where(mine, capped(tl.sum(seen, axis=1) * scale, cap, CAP), float("-inf"))
    mass = tl.where(mine, tl.full([GP], 1.0, tl.float32), 0.0)
    y = tl.where(mine & here, new_value.to(tl.float32)[None, :], 0.0)
    if EARLY:
        if begin < last:
            top, mass, y = _seen(query, first_keys, first_values, early < last, top, mass, y, scale, cap, CAP, IEEE)
        begin += BT
    for block in tl.range(begin, last, BT, num_stages=STAGES):
        at = block + t
        key, value = block_of(keys, values, own, at, at < last, row, d, D, BLOCK)
        top, mass, y = _seen(query, key, value, at < last, top, mass, y, scale, cap, CAP, IEEE)
    line = b * KVHEADS + kv
    to = out + (line * G + g[:, None]) * D + d[None, :]
    if SPLITS == 1:
        tl.store(to, (y / mass[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        slot = (line * SPLITS + split) * G + g
        tl.store(parts + slot[:, None] * D + d[None, :], y, mask=here)
        tl.store(weights + slot * 2, top, mask=g < G)
        tl.store(weights + slot * 2 + 1, mass, mask=g < G)
        tl.debug_barrier()
        if tl.atomic_add(arrived + line, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(arrived + line, 0)
            # unrolled, so that everything is asked for at once
            every = (line * SPLITS + tl.arange(0, SPLITS)[:, None]) * G + g[None, :]
            tops = tl.load(weights + every * 2, mask=(g < G)[None, :], other=0.0, cache_modifier=".cg")
            masses = tl.load(weights + every * 2 + 1, mask=(g < G)[None, :], other=1.0, cache_modifier=".cg")
            top = tl.max(tops, axis=0)
            mass = tl.sum(masses * tl.exp(tops - top[None, :]), axis=0)
            y = tl.zeros([GP, DP], tl.float32)
            for another in tl.static_range(SPLITS):
                slot = (line * SPLITS + another) * G + g
                its_top = tl.load(weights + slot * 2, mask=g < G, other=0.0, cache_modifier=".cg")
                part = tl.load(parts + slot[:, None] * D + d[None, :], mask=here, other=0.0, cache_modifier=".cg")
                y += part * tl.exp(its_top - top)[:, None]
            tl.store(to, (y / mass[:, None]).to(out.dtype.element_ty), mask=there)


def attend(
    qkv: Tensor,
    block: Attention,
    metadata: Metadata,
    keys: Tensor,
    values: Tensor,
    config: Split,
    scratch: Scratch,
    pdl: bool,
    out: Tensor | None = None,
) -> Tensor:
    """softmax( q K^T scale ) V for one new token of every sequence, over its blocks of the cache and itself. It goes to
    the first rows of `out`, if that is given. A sequence at position -1 is none, and nothing is written for it.

    `qkv` [splits, batch, (heads + 2 kv_heads) * d] is the fused projection's output, to be added up over its splits.
    q and k go through their norms by head where there are any, then they are rotated; k and v are written into the
    cache, [positions, kv_heads, d], where the sequence's table says, and used as it holds them. Scores become
    cap tanh(score / cap) if there is a cap. The positions are split over programs; the one that ends last adds up what
    all found:
    y = sum_s exp(m_s - m) y_s / sum_s exp(m_s - m) l_s,  m = max_s m_s.
    """
    splits, batch, _ = qkv.shape
    _, kv_heads, d = keys.shape
    group = block.heads // kv_heads
    group_padded, padded = (max(16, triton.next_power_of_2(width)) for width in (group, d))
    if out is None:
        out = torch.empty(batch, block.heads * d, dtype=block.dtype, device=qkv.device)
    q_gain, k_gain, eps, offset = head_gains(block)
    _attend[(config.splits, kv_heads, batch)](
        qkv, metadata.cos[block.rope], metadata.sin[block.rope], q_gain, k_gain, keys, values, metadata.slots,
        metadata.positions, metadata.tables, out, scratch.parts, scratch.weights, scratch.arrived, eps, block.scale,
        block.cap or 1.0, batch, metadata.tables.shape[1],
        G=group, GP=group_padded, D=d, DP=padded,
        KVHEADS=kv_heads, WINDOW=block.window or 0, QS=splits, QKNORM=q_gain is not None, OFFSET=offset,
        CAP=block.cap is not None, BT=config.positions, SPLITS=config.splits, STAGES=config.stages, EARLY=config.early,
        IEEE=block.dtype is torch.float32, BLOCK=BLOCK, PDL=pdl,
        num_warps=max(config.warps, group_padded * padded // PER_WARP), launch_pdl=pdl,
    )  # fmt: skip
    return out


def attend_reference(
    qkv: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor, out: Tensor | None = None
) -> Tensor:
    """The same with torch, one sequence after the other."""
    q = qkv.sum(0)
    rows = (metadata.positions >= 0).nonzero().flatten()
    metadata = replace(
        metadata, slots=metadata.slots[rows], positions=metadata.positions[rows], cos=metadata.cos[:, rows],
        sin=metadata.sin[:, rows],
    )  # fmt: skip
    turned = rotate_write_reference(q[rows], block, metadata, keys, values)
    if out is None:
        out = q.new_zeros(len(q), block.heads * keys.shape[2])
    out[rows] = attend_rows_reference(turned[:, : block.heads], block, metadata, keys, values)
    return out


def attend_rows_reference(
    queries: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotated queries [rows, heads, d] over the cache, which holds all that they may see -> [rows, heads * d]."""
    found = []
    for query, slot, position in zip(queries, metadata.slots.tolist(), metadata.positions.tolist(), strict=True):
        first = max(0, position + 1 - (block.window or position + 1))
        seen = torch.arange(first, position + 1, device=keys.device)
        at = places(metadata.tables, torch.full_like(seen, slot), seen)
        k, v = (
            read(x, at, queries.dtype).repeat_interleave(block.heads // block.kv_heads, dim=1) for x in (keys, values)
        )
        scores = torch.einsum("hd,thd->ht", query, k).float() * block.scale
        scores = scores if block.cap is None else block.cap * torch.tanh(scores / block.cap)
        found.append(torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1).to(v.dtype), v).flatten())
    return torch.stack(found) if found else queries.new_empty(0, block.heads * queries.shape[2])
