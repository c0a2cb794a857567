"""What the library leaves to be done between its matrix products, for prompts: rotate and write, gate."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.place import Steps
from ladder.layers.norm import rms
from ladder.layers.rope import rotate


@triton.jit
def _gate(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    gate = tl.load(x + row * 2 * width + i, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


def gate(x: Tensor) -> Tensor:
    """silu(gate) * up for rows x = (gate, up)."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _gate[(rows, -(-width // 1024))](x, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _rotate_write(qkv, cos, sin, q_gain, k_gain, slots, positions, out, keys, values, eps, CAPACITY,
                  HEADS: tl.constexpr, KVHEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                  QKNORM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    half: tl.constexpr = D // 2
    partner = tl.where(d < half, d + half, d - half)
    wide = d < D
    here = (h < HEADS + 2 * KVHEADS)[:, None] & wide[None, :]
    line = row.to(tl.int64) * (HEADS + 2 * KVHEADS) * D
    x = tl.load(qkv + line + h[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    y = tl.load(qkv + line + h[:, None] * D + partner[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + d % half, mask=wide, other=0.0)
    s = tl.load(sin + row * half + d % half, mask=wide, other=0.0)
    s = tl.where(d < half, -s, s)
    is_q = (h < HEADS)[:, None]
    turned = (h < HEADS + KVHEADS)[:, None]
    u, v = x, y
    if QKNORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        qa = tl.load(q_gain + d, mask=wide, other=0.0).to(tl.float32)[None, :]
        qb = tl.load(q_gain + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
        ka = tl.load(k_gain + d, mask=wide, other=0.0).to(tl.float32)[None, :]
        kb = tl.load(k_gain + partner, mask=wide, other=0.0).to(tl.float32)[None, :]
        u = x * factor * tl.where(is_q, qa, ka)
        v = y * factor * tl.where(is_q, qb, kb)
    z = tl.where(turned, u * c[None, :] + v * s[None, :], x).to(out.dtype.element_ty)
    tl.store(out + line + h[:, None] * D + d[None, :], z, mask=here)
    at = (tl.load(slots + row) * CAPACITY + tl.load(positions + row)) * KVHEADS * D
    k_at = at + (h - HEADS)[:, None] * D + d[None, :]
    tl.store(keys + k_at, z, mask=here & turned & (h >= HEADS)[:, None])
    tl.store(values + k_at - KVHEADS * D, z, mask=here & (h >= HEADS + KVHEADS)[:, None])


def rotate_write(
    qkv: Tensor,
    place: Steps,
    gains: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    """q, k and v by head, [tokens, heads + 2 kv_heads, d], q and k rotated (and normalized by head where there are
    gains); k and v go to the cache, too.
    """
    rows = len(qkv)
    _, capacity, kv_heads, d = keys.shape
    out = torch.empty(rows, heads + 2 * kv_heads, d, dtype=qkv.dtype, device=qkv.device)
    q_gain, k_gain, eps = gains if gains is not None else (None, None, 0.0)
    _rotate_write[(rows,)](
        qkv, place.cos, place.sin, q_gain, k_gain, place.slots, place.positions, out, keys, values, eps, capacity,
        HEADS=heads, KVHEADS=kv_heads, HP=triton.next_power_of_2(heads + 2 * kv_heads), D=d,
        DP=triton.next_power_of_2(d), QKNORM=gains is not None, num_warps=4,
    )  # fmt: skip
    return out


def rotate_write_twin(
    qkv: Tensor,
    place: Steps,
    gains: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    kv_heads, d = keys.shape[2:]
    q, k, v = qkv.unflatten(-1, (-1, d)).split((heads, kv_heads, kv_heads), dim=1)
    if gains is not None:
        q, k = rms(q, gains[0], gains[2]), rms(k, gains[1], gains[2])
    cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(1).to(q.dtype) for x in (place.cos, place.sin))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys[place.slots, place.positions] = k
    values[place.slots, place.positions] = v
    return torch.cat((q, k, v), dim=1)
