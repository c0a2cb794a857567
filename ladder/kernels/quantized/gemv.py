"""One row of activations times a quantized weight.

A program goes through its rows of the weight tile by tile, as `gemv` does, and reads a row in chunks of 16 bytes. A
thread has DEEP chunks of a row, LANES chunks from one to the next: so few warps, if not one alone, add up a row, and
each reads it in one piece. Scales and zeros are asked for a tile ahead: they come from as far as the codes do.
"""

import torch

from ladder.jit import tl, triton
from ladder.kernels.device import (
    activated,
    added_up,
    asked_for,
    let_others_start,
    normalized,
    normalized_halves,
    wait_for_all,
)
from ladder.kernels.quantized.codes import CHUNK, eight_bits
from ladder.kernels.quantized.integers import INPUTS, chunk_products, digits, row_digits, row_steps
from ladder.kernels.stream import Source
from ladder.kernels.table import Gemv
from ladder.layers.weight import Packed

DEEP = 2  # chunks of a row that a thread has, at most


@triton.jit
def _places(pid, tile, N, TILES: tl.constexpr, BN: tl.constexpr):
    """The outputs of a tile, and which of them there are."""
    r = (pid * TILES + tile) * BN + tl.arange(0, BN)
    return r, (r < N) & (tile < TILES)


@triton.jit
def _codes(weight, pid, tile, first, N, WIDTH: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr,
           DEEP: tl.constexpr, LANES: tl.constexpr, PER: tl.constexpr):  # fmt: skip
    """A tile's stored numbers, [DEEP, rows, LANES, those of a chunk]; the rows begin at `first`.

    They are asked for as a matrix, so that chunks which follow each other do so in shared memory, too: neighbouring
    threads read neighbouring chunks, and no bank twice at once.
    """
    line = tl.arange(0, DEEP * BN)[:, None]
    cols = line // BN * (LANES * PER) + tl.arange(0, LANES * PER)[None, :]
    r = (pid * TILES + tile) * BN + line % BN
    at = (first + r).to(tl.int64) * WIDTH + cols
    found = tl.load(weight + at, mask=(r < N) & (cols < WIDTH), other=0.0)
    return found.reshape(DEEP, BN, LANES, PER)


@triton.jit
def _shared(numbers, r, here, GROUPS, DEEP: tl.constexpr, LANES: tl.constexpr, SHARE: tl.constexpr):
    """What inputs share: of rows, [rows, 1], or where a row has several groups, of its chunks, [DEEP, rows, LANES]."""
    if SHARE == 0:
        return tl.load(numbers + r[:, None], mask=here[:, None], other=0.0)
    else:  # threads take what comes first: they get those of their own chunks
        group = (tl.arange(0, DEEP)[None, :] * LANES + tl.arange(0, LANES)[:, None])[:, None, :] // SHARE
        at = r.to(tl.int64)[None, :, None] * GROUPS + group
        return tl.load(numbers + at, mask=here[None, :, None] & (group < GROUPS), other=0.0).permute(2, 1, 0)


@triton.jit
def _scales_and_zeros(scales, zeros, r, here, GROUPS, DEEP: tl.constexpr, LANES: tl.constexpr, SHARE: tl.constexpr,
                      ZEROS: tl.constexpr):  # fmt: skip
    """Zeros are 8 where rows have none of their own, which only codes of 4 bits ask for."""
    scale = _shared(scales, r, here, GROUPS, DEEP, LANES, SHARE)
    if ZEROS:
        return scale, _shared(zeros, r, here, GROUPS, DEEP, LANES, SHARE)
    else:
        return scale, tl.full([1, 1] if SHARE == 0 else [1, 1, 1], 8.0, tl.float32)


@triton.jit
def _partial(codes, x, digits, step, total, scale, zero, BITS: tl.constexpr, SHARE: tl.constexpr,
             DIGITS: tl.constexpr, ASM: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Rows of codes times x, as far as each thread has them, [rows, LANES]."""
    if DIGITS == 0:
        found = tl.sum(eight_bits(codes, True, ASM) * x[:, None, :, :], axis=3)
    else:
        found = chunk_products(codes, digits, BITS, DIGITS, ASM, WHOLE)
        if BITS == 4:
            zero = zero.to(tl.float32)
            if SHARE == 0:
                zero = zero[None, :, :]
            found -= zero * total[:, None, :]
        found = found * step[:, None, :]
    if SHARE == 0:
        return tl.sum(found, axis=0) * scale.to(tl.float32)
    else:
        return tl.sum(found * scale.to(tl.float32), axis=0)


@triton.jit
def quantized_gemv(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, weight, scales,
                   zeros, bias, plus, out, eps, scale, alpha, N, GROUPS, K: tl.constexpr, WIDTH: tl.constexpr,
                   BN: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr,
                   DRIFTS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, PAIR: tl.constexpr,
                   ACT: tl.constexpr, BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr,
                   STAGES: tl.constexpr, PDL: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
                   ASM: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr,
                   SHARE: tl.constexpr, STEP: tl.constexpr, DIGITS: tl.constexpr,
                   FOURS: tl.constexpr):  # fmt: skip
    """`gemv` of a weight of WIDTH stored numbers a row: fp8 where DIGITS is 0, else words of four bytes of integers."""
    per: tl.constexpr = 16 if DIGITS == 0 else 4  # stored numbers of a chunk
    inputs: tl.constexpr = 128 // BITS
    pid = tl.program_id(0)
    chunk = tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    at_x = chunk[:, :, None] * inputs + tl.arange(0, 16)[None, None, :]
    known = at_x < K
    if NORM:
        g = tl.load(gain + at_x, mask=known, other=0.0).to(tl.float32) + OFFSET
        if BITS == 4:
            g_high = tl.load(gain + at_x + 16, mask=known, other=0.0).to(tl.float32) + OFFSET
    x = tl.zeros([DEEP, LANES, 16], tl.float32)
    l0 = tl.zeros([DEEP, LANES, 4], tl.int32)
    l1, l2, h0, h1, h2 = l0, l0, l0, l0, l0
    step = tl.zeros([DEEP, LANES], tl.float32)
    total = step
    factor = 1.0
    if PLUS:
        more = tl.zeros([BN], plus.dtype.element_ty)
    r, here = _places(pid, 0, N, TILES, BN)
    scale_a, zero_a = _scales_and_zeros(scales, zeros, r, here, GROUPS, DEEP, LANES, SHARE, ZEROS)
    if PAIR:
        scale_b, zero_b = _scales_and_zeros(scales, zeros, N + r, here, GROUPS, DEEP, LANES, SHARE, ZEROS)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r, here = _places(pid, tile, N, TILES, BN)
        wa = _codes(weight, pid, tile, 0, N, WIDTH, TILES, BN, DEEP, LANES, per)
        if PAIR:
            wb = _codes(weight, pid, tile, N, N, WIDTH, TILES, BN, DEEP, LANES, per)
        later, there = _places(pid, tile + 1, N, TILES, BN)
        next_a, next_zero_a = _scales_and_zeros(scales, zeros, later, there, GROUPS, DEEP, LANES, SHARE, ZEROS)
        if PAIR:
            next_b, next_zero_b = _scales_and_zeros(scales, zeros, N + later, there, GROUPS, DEEP, LANES, SHARE, ZEROS)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            if PLUS:
                more = tl.load(plus + r, mask=here, other=0.0, cache_modifier=".cg")
            terms = asked_for(base, first, second, drift1, drift2, at_x, known, SUMS, DRIFTS)
            at_high = at_x + 16
            if BITS == 4:
                more_terms = asked_for(base, first, second, drift1, drift2, at_high, known, SUMS, DRIFTS)
            x = added_up(terms, saved, at_x, known, pid == 0, SUMS, DRIFTS)
            high = x
            if BITS == 4:
                high = added_up(more_terms, saved, at_high, known, pid == 0, SUMS, DRIFTS)
                if NORM:
                    x, high, factor = normalized_halves(
                        x, high, g, g_high, norm_bias, at_x, at_high, known, eps, K, NORM
                    )
            elif NORM:
                x, factor = normalized(x, g, norm_bias, at_x, known, eps, K, NORM)
                high = x
            if DIGITS > 0:
                step = row_steps(x, high, STEP, DIGITS)
                l0, l1, l2, steps = row_digits(x, step, DIGITS, ASM and FOURS)
                if BITS == 4:
                    h0, h1, h2, more_steps = row_digits(high, step, DIGITS, ASM and FOURS)
                    total = (steps + more_steps).to(tl.float32)
            let_others_start(PDL)
        if PLUS:  # a tile ahead, too, from the first one's turn on
            next_more = tl.load(plus + later, mask=there, other=0.0, cache_modifier=".cg")
        digits = (l0, l1, l2, h0, h1, h2)
        ya = _partial(wa, x, digits, step, total, scale_a, zero_a, BITS, SHARE, DIGITS, ASM, WHOLE)
        if PAIR:
            yb = _partial(wb, x, digits, step, total, scale_b, zero_b, BITS, SHARE, DIGITS, ASM, WHOLE)
            ya, yb = (factor * tl.sum(tl.join(ya, yb), axis=1)).split()
            if BIAS:
                yb += tl.load(bias + N + r, mask=here, other=0.0).to(tl.float32)
        else:
            ya = factor * tl.sum(ya, axis=1)
        if BIAS:
            ya += tl.load(bias + r, mask=here, other=0.0).to(tl.float32)
        ya = activated(ya, ACT)
        if PAIR:
            ya = ya * yb
        if ALPHA:
            ya = ya * alpha
        if PLUS:
            ya += scale * more.to(tl.float32)
            more = next_more
        tl.store(out + r, ya.to(out.dtype.element_ty), mask=here)
        scale_a, zero_a = next_a, next_zero_a
        if PAIR:
            scale_b, zero_b = next_b, next_zero_b


def chunked(weight: Packed, config: Gemv, source: Source, padded: int) -> dict[str, int]:
    """How threads share the chunks of a row, which are those of `padded` bytes."""
    whole_row, threads = weight.scales.shape[1] == 1, 32 * config.warps
    chunks = max(padded // CHUNK, 1)
    # at least as many as a warp has threads follow each other, and no thread is without any
    deep = max(1, min(DEEP, chunks // 32, chunks * config.rows // threads))
    share = 0 if whole_row else weight.group * weight.bits // 8 // CHUNK
    rows_aligned = all(x.data_ptr() % CHUNK == 0 for x in (source.base, *source.sums, *source.drifts))
    aligned = weight.codes.shape[1] % CHUNK == 0 and weight.codes.data_ptr() % CHUNK == 0
    return {
        "DEEP": deep, "LANES": chunks // deep, "SHARE": share, "WHOLE": aligned and chunks * config.rows >= threads,
        "STEP": min(chunks // deep, share or INPUTS * weight.bits // 8 // CHUNK),
        "FOURS": rows_aligned and 4 * chunks >= threads,  # a thread has four neighbouring inputs
        "DIGITS": 0 if weight.codes.dtype is torch.float8_e4m3fn else digits(source.base.dtype),
    }  # fmt: skip
