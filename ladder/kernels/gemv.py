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
    wait_for_all,
)
from ladder.kernels.norm import norm_arguments
from ladder.kernels.quantized.codes import code_arguments
from ladder.kernels.quantized.gemv import chunked, quantized_gemv
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, WAVE, Gemv
from ladder.layers.activation import activate
from ladder.layers.norm import Norm
from ladder.layers.weight import Packed, Weight


@triton.jit
def _gemv(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, weight, bias, plus, out,
          eps, scale, alpha, N, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
          SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFTS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
          PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr,
          TP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BK)
    inside = cols < K
    if NORM:
        g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32) + OFFSET
    x = tl.zeros(cols.shape, tl.float32)
    factor = 1.0
    turn = tl.arange(0, TP)
    more = tl.zeros([TP, BN], tl.float32)
    # the weight's tiles go through shared memory, STAGES - 1 of them in flight: also while the first tile's turn waits
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = (pid * TILES + tile) * BN + tl.arange(0, BN)
        here = r < N
        at = r.to(tl.int64)[:, None] * K + cols[None, :]
        live = here[:, None] & inside[None, :]
        wa = tl.load(weight + at, mask=live, other=0.0)
        if PAIR:
            wb = tl.load(weight + N.to(tl.int64) * K + at, mask=live, other=0.0)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            if PLUS:  # of all tiles at once, not one latency after the other
                all_r = (pid * TILES + turn)[:, None] * BN + tl.arange(0, BN)[None, :]
                more = tl.load(
                    plus + all_r, mask=(turn < TILES)[:, None] & (all_r < N), other=0.0, cache_modifier=".cg"
                ).to(tl.float32)
            x = gathered(base, first, second, drift1, drift2, saved, cols, inside, pid == 0, SUMS, DRIFTS)
            if NORM:
                x, factor = normalized(x, g, norm_bias, cols, inside, eps, K, NORM)
            let_others_start(PDL)
        ya = tl.sum(wa.to(tl.float32) * x[None, :], axis=1) * factor
        if BIAS:
            ya += tl.load(bias + r, mask=here, other=0.0).to(tl.float32)
        ya = activated(ya, ACT)
        if PAIR:
            yb = tl.sum(wb.to(tl.float32) * x[None, :], axis=1) * factor
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
    rows, padded = matrix.shape[0] // (1 + pair), triton.next_power_of_2(matrix.shape[1])
    programs, room = config.programs, {}
    if source.flags:
        tile = config.rows * padded * matrix.element_size() * (1 + pair)
        programs, registers = beside_all_reduces(config, tile, cores, source.spared)
        room = {"maxnreg": registers}
    tiles = -(-rows // (programs * config.rows))
    saved = torch.empty_like(source.base) if source.sums else source.base
    gain, norm_bias, eps, modes = norm_arguments(norm)
    common = {
        **source.modes(), **modes, **room, "K": source.base.shape[1], "BN": config.rows, "TILES": tiles, "PAIR": pair,
        "ACT": ACTIVATIONS[activation], "BIAS": bias is not None, "PLUS": plus is not None, "ALPHA": alpha != 1,
        "STAGES": config.stages, "PDL": pdl, "num_warps": config.warps, "launch_pdl": pdl,
    }  # fmt: skip
    grid, stream = (-(-rows // (tiles * config.rows)),), source.arguments(saved)
    if isinstance(weight, Packed):
        shape = chunked(weight, config, source, padded * matrix.element_size())
        numbers = matrix if shape["DIGITS"] == 0 else matrix.view(torch.int32)
        # each program's share of a multiprocessor's registers
        each = max(1, round(2 * config.programs / WAVE))
        common["maxnreg"] = min(room.get("maxnreg", 255), max(64, 2048 // (config.warps * each)))
        quantized_gemv[grid](
            *stream, gain, norm_bias, numbers, scales, zeros, bias, plus, out, eps, 1 / divisor, alpha, rows, groups,
            WIDTH=numbers.shape[1], BITS=weight.bits, ZEROS=form["ZEROS"], ASM=form["ASM"], **shape, **common,
        )  # fmt: skip
    else:
        _gemv[grid](
            *stream, gain, norm_bias, matrix, bias, plus, out, eps, 1 / divisor, alpha, rows, BK=padded,
            TP=triton.next_power_of_2(tiles), **common,
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
