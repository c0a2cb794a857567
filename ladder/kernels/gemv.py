"""One row of activations times a weight."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import (
    ACTIVATIONS,
    activated,
    gathered,
    let_others_start,
    normalized,
    normalized_halves,
    wait_for_all,
)
from ladder.kernels.norm import norm_arguments
from ladder.kernels.quantized.codes import code_arguments, scaled_rows
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv
from ladder.layers.activation import activate
from ladder.layers.norm import Norm
from ladder.layers.weight import Packed, Weight


@triton.jit
def _gemv(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, weight, scales, zeros, bias,
          plus, out, eps, scale, alpha, N, GROUPS, K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
          BN: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFTS: tl.constexpr,
          NORM: tl.constexpr, OFFSET: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
          PLUS: tl.constexpr, ALPHA: tl.constexpr, TP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
          BITS: tl.constexpr, STORED: tl.constexpr, ZEROS: tl.constexpr, RUN: tl.constexpr,
          ASM: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BK)  # of the weight's stored numbers
    if BITS < 16:  # [groups, numbers of a group]
        cols = tl.arange(0, BK // STORED)[:, None] * STORED + tl.arange(0, STORED)[None, :]
    inside = cols < WIDTH
    at_x = cols
    if BITS == 4:  # the inputs of the bytes' low halves; those of their high halves are RUN on
        at_x = cols // RUN * (2 * RUN) + cols % RUN
    if NORM:
        g = tl.load(gain + at_x, mask=inside, other=0.0).to(tl.float32) + OFFSET
        g_high = g
        if BITS == 4:
            g_high = tl.load(gain + at_x + RUN, mask=inside, other=0.0).to(tl.float32) + OFFSET
    x = tl.zeros(cols.shape, tl.float32)
    x_high = x
    x_sums = tl.zeros([BK // STORED], tl.float32)
    factor = 1.0
    turn = tl.arange(0, TP)
    more = tl.zeros([TP, BN], tl.float32)
    # the weight's tiles go through shared memory, STAGES - 1 of them in flight: also while the first tile's turn waits
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = (pid * TILES + tile) * BN + tl.arange(0, BN)
        here = r < N
        line = r.to(tl.int64)[:, None] * WIDTH
        live = here[:, None]
        if BITS < 16:
            line, live = line[:, :, None], live[:, :, None]
        at = line + cols.expand_dims(0)
        live = live & inside.expand_dims(0)
        wa = tl.load(weight + at, mask=live, other=0.0)
        if PAIR:
            wb = tl.load(weight + N.to(tl.int64) * WIDTH + at, mask=live, other=0.0)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            if PLUS:  # of all tiles at once, not one latency after the other
                all_r = (pid * TILES + turn)[:, None] * BN + tl.arange(0, BN)[None, :]
                more = tl.load(
                    plus + all_r, mask=(turn < TILES)[:, None] & (all_r < N), other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
            x = gathered(base, first, second, drift1, drift2, saved, at_x, inside, pid == 0, SUMS, DRIFTS)
            if BITS == 4:
                x_high = gathered(
                    base, first, second, drift1, drift2, saved, at_x + RUN, inside, pid == 0, SUMS, DRIFTS
                )
                if NORM:
                    x, x_high, factor = normalized_halves(
                        x, x_high, g, g_high, norm_bias, at_x, at_x + RUN, inside, eps, K, NORM
                    )
                x_sums = tl.sum(x + x_high, axis=1)
            elif NORM:
                x, factor = normalized(x, g, norm_bias, at_x, inside, eps, K, NORM)
            let_others_start(PDL)
        if BITS == 16:
            ya = tl.sum(wa.to(tl.float32) * x[None, :], axis=1) * factor
        else:
            ya = factor * scaled_rows(wa, x, x_high, x_sums, scales, zeros, r, here, GROUPS, BITS, ZEROS, ASM)
        if BIAS:
            ya += tl.load(bias + r, mask=here, other=0.0).to(tl.float32)
        ya = activated(ya, ACT)
        if PAIR:
            if BITS == 16:
                yb = tl.sum(wb.to(tl.float32) * x[None, :], axis=1) * factor
            else:
                yb = factor * scaled_rows(wb, x, x_high, x_sums, scales, zeros, N + r, here, GROUPS, BITS, ZEROS, ASM)
            if BIAS:
                yb += tl.load(bias + N + r, mask=here, other=0.0).to(tl.float32)
            ya = ya * yb
        if ALPHA:
            ya = ya * alpha
        if PLUS:
            ya += scale * tl.sum(tl.where((turn == tile)[:, None], more, 0.0), axis=0)
        tl.store(out + r, ya.to(out.dtype.element_ty), mask=here)


def gemv(
    source: Source,
    norm: Norm | None,
    weight: Tensor | Packed,
    bias: Tensor | None,
    activation: str | None,
    pair: bool,
    plus: Tensor | None,
    divisor: int,
    alpha: float,
    out: Tensor,
    config: Gemv,
    pdl: bool,
    cores: int = 0,
) -> Tensor:
    """out = alpha f( W n(x) + bias ) + plus / divisor, for one row x = the stream; returns what the ranks agree on.

    n is the norm, if any. f is the activation, if any; of a `pair`, whose weight is the gate's rows and then the up
    projection's, f(gate) * up.

    `cores`, the GPU's multiprocessors, are needed where the stream has flags to wait for: the grid then leaves room for
    the kernels that set them.
    """
    matrix, scales, zeros, groups, form = code_arguments(weight)
    rows, width, padded = matrix.shape[0] // (1 + pair), matrix.shape[1], triton.next_power_of_2(matrix.shape[1])
    stored = form.pop("GROUP") * form["BITS"] // 8 or padded  # numbers of a group
    programs, room = config.programs, {}
    if source.flags:
        tile = config.rows * padded * matrix.element_size() * (1 + pair)
        programs, registers = beside_all_reduces(config, tile, cores, source.spared)
        room = {"maxnreg": registers}
    tiles = -(-rows // (programs * config.rows))
    saved = torch.empty_like(source.base) if source.sums else source.base
    gain, norm_bias, eps, modes = norm_arguments(norm)
    _gemv[(-(-rows // (tiles * config.rows)),)](
        *source.arguments(saved), gain, norm_bias, matrix, scales, zeros, bias, plus, out, eps, 1 / divisor, alpha,
        rows, groups, K=source.base.shape[1], WIDTH=width, BK=padded, BN=config.rows, TILES=tiles, **source.modes(),
        **modes, **form, STORED=stored,
        PAIR=pair, ACT=ACTIVATIONS[activation], BIAS=bias is not None, PLUS=plus is not None, ALPHA=alpha != 1,
        TP=triton.next_power_of_2(tiles), STAGES=config.stages, PDL=pdl, num_warps=config.warps, launch_pdl=pdl, **room,
    )  # fmt: skip
    return saved


def beside_all_reduces(config: Gemv, tile: int, cores: int, spared: int) -> tuple[int, int]:
    """How many programs may wait for an all-reduce at once, and how many registers a thread of theirs may have. `tile`:
    bytes of one; `cores`: the GPU's multiprocessors.

    A multiprocessor's 64 Ki registers and `SHARED` bytes of memory must hold all of them, with an eighth of the
    registers left for an all-reduce's blocks, which are light (see comm/one_shot.py) but would wait for ever behind a
    program that has found no place yet. A library's all-reduce has heavy blocks: there are so few programs that
    `spared` multiprocessors have none, however the others share them.
    """
    programs = min(config.programs, cores - spared) if spared else config.programs
    each = 2 if programs > cores and 2 * tile * (config.stages - 1) <= SHARED else 1
    return min(programs, each * cores - 4), min(248, 7 * 65536 // 8 // (each * config.warps * 32) // 8 * 8)


def projected(
    x: Tensor, weight: Weight, activation: str | None, pair: bool, plus: Tensor | None, divisor: int, alpha: float
) -> Tensor:
    """alpha f( x W^T + bias ) + plus / divisor with torch, for any number of rows and any storage format."""
    y = weight.multiply(x)
    y = y if activation is None else activate(y, activation, pair)
    y = y if alpha == 1 else y * alpha
    return y if plus is None else y + plus / divisor
