"""One row of activations times a matrix of integer codes, in integers.

Of each group of inputs the row becomes fixed-point numbers, whose digits have eight bits as the codes have:

    x[i] = step q[i] + rounding,   q[i] = d0[i] + 256 d1[i] (+ 65536 d2[i]),   step = max |x| / (the largest such q)
    sum_i code[i] x[i] = step (sum_i code[i] d0[i] + 256 sum_i code[i] d1[i] + ...)

One instruction multiplies four codes by four digits and adds the products up, so no code becomes a number of its own.
Two digits round x by 2^-16 of its group's largest number, far less than bfloat16 rounds a result; float32 has three.
"""

import torch

from ladder.jit import tl, triton
from ladder.kernels.device import activated, gathered, let_others_start, normalized, normalized_halves, wait_for_all
from ladder.kernels.quantized.codes import CHUNK, chunk_scales, chunk_zeros
from ladder.layers.weight import RUN

INPUTS = 128  # that share a step where a row's scale is one
assert RUN == CHUNK  # of 4 bits a chunk's low halves are neighbouring inputs, and so are its high halves


def digits(dtype: torch.dtype) -> int:
    """How many digits a row of this type becomes."""
    return 3 if dtype is torch.float32 else 2


@triton.jit
def four_products(codes, digits, more, ASM: tl.constexpr):
    """more + the sum of the products of four signed bytes in words."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, digits, more], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            up: tl.constexpr = 24 - 8 * byte
            more += ((codes << up) >> 24) * ((digits << up) >> 24)
        return more


@triton.jit
def words(numbers, DIGIT: tl.constexpr, LAST: tl.constexpr):
    """A digit of four neighbouring numbers in the bytes of a word, [chunks, 4, 4] -> [chunks, 4]."""
    places = 8 * tl.arange(0, 4)[None, None, :]
    found = tl.sum(((numbers >> (8 * DIGIT)) & 255) << places, axis=2)
    if DIGIT < LAST:  # all but the last have 128 added
        found = found ^ -2139062144  # 0x80808080
    return found


@triton.jit
def finite(x):
    """x, with zeros in place of what is not finite: no digit can say that."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def spoiled(x, x_high):
    """NaN for the chunks that hold anything that is not finite, zero for the others."""
    each = tl.where((tl.abs(x) < float("inf")) & (tl.abs(x_high) < float("inf")), 0.0, float("nan"))
    return tl.sum(tl.sum(each, axis=2), axis=1)


@triton.jit
def group_steps(x, x_high, LARGEST: tl.constexpr, SHARE: tl.constexpr):
    """The step of each chunk, [chunks]: that of its group of SHARE chunks."""
    count: tl.constexpr = x.shape[0]
    largest = tl.max(tl.max(tl.maximum(tl.abs(x), tl.abs(x_high)), axis=2), axis=1)
    largest = tl.max(largest.reshape(count // SHARE, SHARE), axis=1, keep_dims=True)
    largest = tl.broadcast_to(largest, [count // SHARE, SHARE]).reshape(count)
    return tl.maximum(largest, 1e-30) / LARGEST


@triton.jit
def fixed_point(x, step, MIDDLE: tl.constexpr):
    """[chunks, 4, 4] as whole steps, with 128 added in every digit but the last."""
    return tl.floor(x * (1.0 / step)[:, None, None] + 0.5).to(tl.int32) + MIDDLE


@triton.jit
def chunk_products(codes, l0, l1, l2, h0, h1, h2, BITS: tl.constexpr, DIGITS: tl.constexpr, ASM: tl.constexpr):
    """Codes [rows, chunks, 4 words] times the digits of x: each chunk's whole steps, [rows, chunks]."""
    none = tl.zeros(codes.shape, tl.int32)
    if BITS == 4:
        low, high = codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
        first = four_products(high, h0[None, :, :], four_products(low, l0[None, :, :], none, ASM), ASM)
        found = four_products(high, h1[None, :, :], four_products(low, l1[None, :, :], none, ASM), ASM)
        if DIGITS == 3:
            third = four_products(high, h2[None, :, :], four_products(low, l2[None, :, :], none, ASM), ASM)
    else:
        first = four_products(codes, l0[None, :, :], none, ASM)
        found = four_products(codes, l1[None, :, :], none, ASM)
        if DIGITS == 3:
            third = four_products(codes, l2[None, :, :], none, ASM)
    if DIGITS == 3:  # all at once they may not fit into 32 bits
        upper = tl.sum(found + (third << 8), axis=2).to(tl.float32)
        return upper * 256.0 + tl.sum(first, axis=2).to(tl.float32)
    else:
        return tl.sum(first + (found << 8), axis=2).to(tl.float32)


@triton.jit
def scaled_products(codes, digits, step, total, scale, zero, BITS: tl.constexpr, DIGITS: tl.constexpr,
                    ASM: tl.constexpr):  # fmt: skip
    """sum_i (code[o, i] - zero[o, i]) x[i] scale[o, i], [rows]; `total`: the whole steps of each chunk's inputs."""
    l0, l1, l2, h0, h1, h2 = digits
    found = chunk_products(codes, l0, l1, l2, h0, h1, h2, BITS, DIGITS, ASM)
    if BITS == 4:
        found -= zero * total[None, :]
    return tl.sum(found * (step[None, :] * scale), axis=1)


@triton.jit
def integer_gemv(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, weight, scales, zeros,
                 bias, plus, out, eps, scale, alpha, N, GROUPS, K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
                 TILES: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFTS: tl.constexpr,
                 NORM: tl.constexpr, OFFSET: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
                 PLUS: tl.constexpr, ALPHA: tl.constexpr, TP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
                 BITS: tl.constexpr, ZEROS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr, CHUNKS: tl.constexpr,
                 SHARE: tl.constexpr, STEP: tl.constexpr, DIGITS: tl.constexpr):  # fmt: skip
    """`gemv` of codes that are integers; `weight` has four bytes of them in a word, WIDTH words in a row."""
    middle: tl.constexpr = 128 if DIGITS == 2 else 32896  # 0x8080
    largest: tl.constexpr = 32639.0 if DIGITS == 2 else 8355000.0  # 0x7F7F; 0x7F7F7F, less what the division may add
    pid = tl.program_id(0)
    cols = tl.arange(0, CHUNKS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = cols < WIDTH
    byte = cols[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    known = byte < 4 * WIDTH
    at_x = byte
    if BITS == 4:  # the inputs of the bytes' low halves; those of their high halves are RUN on
        at_x = byte // RUN * (2 * RUN) + byte % RUN
    if NORM:
        g = tl.load(gain + at_x, mask=known, other=0.0).to(tl.float32) + OFFSET
        g_high = g
        if BITS == 4:
            g_high = tl.load(gain + at_x + RUN, mask=known, other=0.0).to(tl.float32) + OFFSET
    l0 = tl.zeros([CHUNKS, 4], tl.int32)
    l1, l2, h0, h1, h2 = l0, l0, l0, l0, l0
    step = tl.zeros([CHUNKS], tl.float32)
    total = step
    factor = 1.0
    turn = tl.arange(0, TP)
    more = tl.zeros([TP, BN], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = (pid * TILES + tile) * BN + tl.arange(0, BN)
        here = r < N
        at = r.to(tl.int64)[:, None, None] * WIDTH + cols[None, :, :]
        live = here[:, None, None] & inside[None, :, :]
        wa = tl.load(weight + at, mask=live, other=0)
        scale_a = chunk_scales(scales, r, here, GROUPS, CHUNKS, SHARE)
        zero_a = chunk_zeros(zeros, r, here, GROUPS, CHUNKS, SHARE, BITS, ZEROS)
        if PAIR:
            wb = tl.load(weight + N.to(tl.int64) * WIDTH + at, mask=live, other=0)
            scale_b = chunk_scales(scales, N + r, here, GROUPS, CHUNKS, SHARE)
            zero_b = chunk_zeros(zeros, N + r, here, GROUPS, CHUNKS, SHARE, BITS, ZEROS)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            if PLUS:  # of all tiles at once, not one latency after the other
                all_r = (pid * TILES + turn)[:, None] * BN + tl.arange(0, BN)[None, :]
                more = tl.load(
                    plus + all_r, mask=(turn < TILES)[:, None] & (all_r < N), other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
            x = gathered(base, first, second, drift1, drift2, saved, at_x, known, pid == 0, SUMS, DRIFTS)
            x_high = x
            if BITS == 4:
                x_high = gathered(base, first, second, drift1, drift2, saved, at_x + RUN, known, pid == 0, SUMS, DRIFTS)
                if NORM:
                    x, x_high, factor = normalized_halves(
                        x, x_high, g, g_high, norm_bias, at_x, at_x + RUN, known, eps, K, NORM
                    )
            elif NORM:
                x, factor = normalized(x, g, norm_bias, at_x, known, eps, K, NORM)
                x_high = x
            wrong = spoiled(x, x_high)
            x, x_high = finite(x), finite(x_high)
            step = group_steps(x, x_high, largest, STEP)
            q = fixed_point(x, step, middle)
            l0, l1, l2 = words(q, 0, DIGITS - 1), words(q, 1, DIGITS - 1), words(q, 2, DIGITS - 1)
            total = tl.sum(tl.sum(q - middle, axis=2), axis=1).to(tl.float32)
            if BITS == 4:
                q = fixed_point(x_high, step, middle)
                h0, h1, h2 = words(q, 0, DIGITS - 1), words(q, 1, DIGITS - 1), words(q, 2, DIGITS - 1)
                total += tl.sum(tl.sum(q - middle, axis=2), axis=1).to(tl.float32)
            step += wrong
            let_others_start(PDL)
        digits = (l0, l1, l2, h0, h1, h2)
        ya = factor * scaled_products(wa, digits, step, total, scale_a, zero_a, BITS, DIGITS, ASM)
        if BIAS:
            ya += tl.load(bias + r, mask=here, other=0.0).to(tl.float32)
        ya = activated(ya, ACT)
        if PAIR:
            yb = factor * scaled_products(wb, digits, step, total, scale_b, zero_b, BITS, DIGITS, ASM)
            if BIAS:
                yb += tl.load(bias + N + r, mask=here, other=0.0).to(tl.float32)
            ya = ya * yb
        if ALPHA:
            ya = ya * alpha
        if PLUS:
            ya += scale * tl.sum(tl.where((turn == tile)[:, None], more, 0.0), axis=0)
        tl.store(out + r, ya.to(out.dtype.element_ty), mask=here)
