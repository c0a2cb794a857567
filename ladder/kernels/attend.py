"""Attention of one new token per request over its slot of the cache, split along the positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import cache_line, cached, let_others_start, product, wait_for_others
from ladder.kernels.rotary import head_gains, rotate_write_reference
from ladder.kernels.table import Split
from ladder.layers.attention import Attention
from ladder.layers.cache import BLOCK, Metadata, places, read


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
def _attend(qkv, cos, sin, q_gain, k_gain, keys, values, slots, positions, tables, out, parts, weights,
            arrived, eps, scale, cap, BATCH, WIDTH, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr,
            HP: tl.constexpr, KVHEADS: tl.constexpr, WINDOW: tl.constexpr, QS: tl.constexpr, QKNORM: tl.constexpr,
            OFFSET: tl.constexpr, CAP: tl.constexpr, BT: tl.constexpr,
            SPLITS: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
    half: tl.constexpr = D // 2  # keys and queries in halves, which are rotated against each other
    d = tl.arange(0, DP)
    h = tl.arange(0, HP)
    g = tl.arange(0, GP)
    t = tl.arange(0, BT)
    row = KVHEADS * D
    own = tables + tl.load(slots + b).to(tl.int64) * WIDTH
    keys += kv * D
    values += kv * D
    wide = d < D
    low = h < half
    # the newest position comes from the kernel before this one; all others can be had before it has finished
    at = begin + t
    old = (at < tl.minimum(end, n - 1))[:, None]
    place = (cache_line(own, at, at < end, BLOCK) * row)[:, None]
    ka = tl.load(keys + place + h[None, :], mask=old & low[None, :], other=0.0)
    kb = tl.load(keys + place + half + h[None, :], mask=old & low[None, :], other=0.0)
    v = tl.load(values + place + d[None, :], mask=old & wide[None, :], other=0.0)
    newest_place = cache_line(own, n - 1, True, BLOCK) * row
    c = tl.load(cos + b * half + h, mask=low, other=0.0)
    s = tl.load(sin + b * half + h, mask=low, other=0.0)
    if QKNORM:
        q_gain_a = tl.load(q_gain + h, mask=low, other=0.0).to(tl.float32) + OFFSET
        q_gain_b = tl.load(q_gain + half + h, mask=low, other=0.0).to(tl.float32) + OFFSET
        k_gain_a = tl.load(k_gain + h, mask=low, other=0.0).to(tl.float32) + OFFSET
        k_gain_b = tl.load(k_gain + half + h, mask=low, other=0.0).to(tl.float32) + OFFSET
    wait_for_others(PDL)
    let_others_start(PDL)
    width = (G + 2) * KVHEADS * D
    here = (g < G)[:, None] & low[None, :]
    at_q = b * width + (kv * G + g[:, None]) * D + h[None, :]
    qa = _heads(qkv, at_q, BATCH * width, here, QS)
    qb = _heads(qkv, at_q + half, BATCH * width, here, QS)
    at_k = b * width + (G * KVHEADS + kv) * D
    xa = _heads(qkv, at_k + h, BATCH * width, low, QS)
    xb = _heads(qkv, at_k + half + h, BATCH * width, low, QS)
    new_v = _heads(qkv, at_k + KVHEADS * D + d, BATCH * width, wide, QS)
    if QKNORM:
        factor = tl.rsqrt((tl.sum(qa * qa, axis=1) + tl.sum(qb * qb, axis=1)) / D + eps)[:, None]
        qa, qb = qa * factor * q_gain_a[None, :], qb * factor * q_gain_b[None, :]
        factor = tl.rsqrt((tl.sum(xa * xa, axis=0) + tl.sum(xb * xb, axis=0)) / D + eps)
        xa, xb = xa * factor * k_gain_a, xb * factor * k_gain_b
    query_a = (qa * c[None, :] - qb * s[None, :]).to(out.dtype.element_ty)
    query_b = (qb * c[None, :] + qa * s[None, :]).to(out.dtype.element_ty)
    kept_a = cached((xa * c - xb * s).to(out.dtype.element_ty), ka.dtype)
    kept_b = cached((xb * c + xa * s).to(out.dtype.element_ty), ka.dtype)
    kept_v = cached(new_v.to(out.dtype.element_ty), v.dtype)
    mine = (begin <= n - 1) & (n - 1 < end)
    tl.store(keys + newest_place + h, kept_a, mask=low & mine)
    tl.store(keys + newest_place + half + h, kept_b, mask=low & mine)
    tl.store(values + newest_place + d, kept_v, mask=wide & mine)
    new_a = kept_a.to(query_a.dtype)
    new_b = kept_b.to(query_a.dtype)
    new_v = kept_v.to(query_a.dtype)
    top = tl.full([GP], float("-inf"), tl.float32)
    mass = tl.zeros([GP], tl.float32)
    y = tl.zeros([GP, DP], tl.float32)
    nothing = tl.zeros([GP, BT], tl.float32)
    for block in range(begin, end, BT):
        at = block + t
        newest = (at == n - 1)[:, None]
        key_a = tl.where(newest, new_a[None, :], ka.to(new_a.dtype))
        key_b = tl.where(newest, new_b[None, :], kb.to(new_b.dtype))
        value = tl.where(newest, new_v[None, :], v.to(new_v.dtype))
        following = at + BT
        old = (following < tl.minimum(end, n - 1))[:, None]
        place = (cache_line(own, following, following < end, BLOCK) * row)[:, None]
        next_a = tl.load(keys + place + h[None, :], mask=old & low[None, :], other=0.0)
        next_b = tl.load(keys + place + half + h[None, :], mask=old & low[None, :], other=0.0)
        next_v = tl.load(values + place + d[None, :], mask=old & wide[None, :], other=0.0)
        score = product(query_b, tl.trans(key_b), product(query_a, tl.trans(key_a), nothing, IEEE), IEEE) * scale
        if CAP:  # cap tanh(score / cap); tanh(u) is 2 sigmoid(2 u) - 1
            score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
        score = tl.where((at < end)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp(top - higher)
        p = tl.exp(score - higher[:, None])
        mass = mass * fade + tl.sum(p, axis=1)
        y = product(p.to(value.dtype), value, y * fade[:, None], IEEE)
        top = higher
        ka = next_a
        kb = next_b
        v = next_v
    here = (g < G)[:, None] & wide[None, :]
    line = b * KVHEADS + kv
    to = out + (line * G + g[:, None]) * D + d[None, :]
    if SPLITS == 1:
        tl.store(to, (y / mass[:, None]).to(out.dtype.element_ty), mask=here)
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
            tl.store(to, (y / mass[:, None]).to(out.dtype.element_ty), mask=here)


def attend(
    qkv: Tensor,
    block: Attention,
    metadata: Metadata,
    keys: Tensor,
    values: Tensor,
    config: Split,
    scratch: Scratch,
    pdl: bool,
) -> Tensor:
    """softmax( q K^T scale ) V for one new token of every sequence, over its blocks of the cache and itself.

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
    out = torch.empty(batch, block.heads * d, dtype=block.dtype, device=qkv.device)
    q_gain, k_gain, eps, offset = head_gains(block)
    _attend[(config.splits, kv_heads, batch)](
        qkv, metadata.cos[block.rope], metadata.sin[block.rope], q_gain, k_gain, keys, values, metadata.slots,
        metadata.positions, metadata.tables, out, scratch.parts, scratch.weights, scratch.arrived, eps, block.scale,
        block.cap or 1.0, batch, metadata.tables.shape[1],
        G=group, GP=max(16, triton.next_power_of_2(group)), D=d, DP=max(16, triton.next_power_of_2(d)),
        HP=max(16, triton.next_power_of_2(d // 2)), KVHEADS=kv_heads, WINDOW=block.window or 0, QS=splits,
        QKNORM=q_gain is not None, OFFSET=offset, CAP=block.cap is not None, BT=config.positions,
        SPLITS=config.splits, IEEE=block.dtype is torch.float32, BLOCK=BLOCK, PDL=pdl,
        num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def attend_reference(qkv: Tensor, block: Attention, metadata: Metadata, keys: Tensor, values: Tensor) -> Tensor:
    """The same with torch, one sequence after the other."""
    q = rotate_write_reference(qkv.sum(0), block, metadata, keys, values)[:, : block.heads]
    found = []
    for query, slot, position in zip(q, metadata.slots.tolist(), metadata.positions.tolist(), strict=True):
        first = max(0, position + 1 - (block.window or position + 1))
        seen = torch.arange(first, position + 1, device=keys.device)
        at = places(metadata.tables, torch.full_like(seen, slot), seen)
        k, v = (read(x, at, q.dtype).repeat_interleave(block.heads // block.kv_heads, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", query, k).float() * block.scale
        scores = scores if block.cap is None else block.cap * torch.tanh(scores / block.cap)
        found.append(torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1).to(v.dtype), v).flatten())
    return torch.stack(found)
