"""A few rows of activations times a weight."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, activated, let_others_start, product, wait_for_others
from ladder.kernels.quantized.codes import code_arguments, eight_bits, four_bits, zero_points
from ladder.kernels.table import SmallGemm
from ladder.layers.weight import Packed


@triton.jit
def _times_codes(y, codes, lines, scales, zeros, own, first, here, live, DEPTH: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, IEEE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                 ZEROS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Rows of codes, whose scales begin at `own`, times the inputs from `first` on; a tile is of one group."""
    kind: tl.constexpr = lines.dtype.element_ty
    packed: tl.constexpr = 8 // BITS  # codes in a stored number
    stored = tl.arange(0, BK // packed)
    x_sums = tl.zeros([y.shape[1]], tl.float32)
    for at in tl.range(0, DEPTH // packed, BK // packed, num_stages=STAGES):
        column = at + stored
        inside = column < DEPTH // packed
        code = tl.load(codes + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        some = y
        if GROUP > 0:
            some = tl.zeros(y.shape, tl.float32)
        if BITS == 4:
            at_low = (column // RUN * (2 * RUN) + column % RUN)[:, None]
            low = tl.load(lines + at_low, mask=inside[:, None] & live, other=0.0)
            high = tl.load(lines + at_low + RUN, mask=inside[:, None] & live, other=0.0)
            code_low, code_high = four_bits(code, kind, ASM)
            some = product(code_high, high, product(code_low, low, some, IEEE), IEEE)
            sums = tl.sum(low.to(tl.float32), axis=0) + tl.sum(high.to(tl.float32), axis=0)
        else:
            xs = tl.load(lines + column[:, None], mask=inside[:, None] & live, other=0.0)
            some = product(eight_bits(code, kind, ASM), xs, some, IEEE)
        if GROUP > 0:
            group = own + (first + at * packed) // GROUP
            if BITS == 4:
                some -= zero_points(zeros, group, here, ZEROS)[:, None] * sums[None, :]
            y += some * tl.load(scales + group, mask=here, other=0.0).to(tl.float32)[:, None]
        else:
            y = some
            if BITS == 4:
                x_sums += sums
    if GROUP == 0:
        if BITS == 4:
            y -= zero_points(zeros, own, here, ZEROS)[:, None] * x_sums[None, :]
        y = y * tl.load(scales + own, mask=here, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def _small_gemm(x, weight, scales, zeros, bias, plus, out, scale, alpha, M, N, GROUPS, K: tl.constexpr,
            MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SPLITS: tl.constexpr,
            PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr,
            STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
            ZEROS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    j = tl.arange(0, BN)
    outputs: tl.constexpr = BN // 2 if PAIR else BN
    r = tile * outputs + j % outputs
    line = r + j // outputs * N  # of a pair, the tile's first half has rows of the gate, the second those of the other
    m = tl.arange(0, MB)
    k = tl.arange(0, BK)
    here = (r < N)[:, None]
    live = (m < M)[None, :]
    depth: tl.constexpr = K // SPLITS
    lines = x + m[None, :] * K + split * depth
    y = tl.zeros([BN, MB], tl.float32)
    if BITS < 16:
        wait_for_others(PDL)
        let_others_start(PDL)
        codes = weight + line.to(tl.int64)[:, None] * (K * BITS // 8) + split * (depth * BITS // 8)
        own = line.to(tl.int64) * GROUPS
        y = _times_codes(
            y, codes, lines, scales, zeros, own, split * depth, r < N, live, depth, BK, STAGES, IEEE, BITS, GROUP,
            ZEROS, RUN, ASM,
        )  # fmt: skip
    else:
        rows = weight + line.to(tl.int64)[:, None] * K + split * depth
        if EARLY > 0:
            e = tl.arange(0, EARLY)
            early = tl.load(rows + e[None, :], mask=here, other=0.0)
        wait_for_others(PDL)
        let_others_start(PDL)
        if EARLY > 0:
            early_x = tl.load(lines + e[:, None], mask=live, other=0.0)
            y = product(early, early_x, y, IEEE)
        for at in tl.range(EARLY, depth, BK, num_stages=STAGES):
            inside = at + k < depth
            xs = tl.load(lines + (at + k)[:, None], mask=inside[:, None] & live, other=0.0)
            w = tl.load(rows + (at + k)[None, :], mask=here & inside[None, :], other=0.0)
            y = product(w, xs, y, IEEE)
    if BIAS:
        if split == 0:
            y += tl.load(bias + line, mask=r < N, other=0.0).to(tl.float32)[:, None]
    if PAIR:
        gate, up = y.reshape(2, outputs, MB).permute(1, 2, 0).split()
        y = activated(gate, ACT) * up
        r = tile * outputs + tl.arange(0, outputs)
        here = (r < N)[:, None]
    else:
        y = activated(y, ACT)
    if ALPHA:
        y = y * alpha
    there = (split * M + m)[None, :] * N + r[:, None]
    if PLUS:
        y += scale * tl.load(plus + there, mask=here & live, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + there, y.to(out.dtype.element_ty), mask=here & live)


def small_gemm(
    x: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None,
    activation: str | None,
    pair: bool,
    plus: Tensor | None,
    divisor: int,
    alpha: float,
    out: Tensor,
    config: SmallGemm,
    pdl: bool,
) -> None:
    """out[s] = alpha f( x_s W_s^T + bias ) + plus / divisor, x [rows, inputs] and W cut into `splits` along the inputs.

    f as in `gemv`. out is [splits, rows, outputs], to be added up by its reader; only one split can have an activation
    or a `plus`. The first has the bias.
    """
    rows, width = x.shape
    matrix, scales, zeros, groups, form = code_arguments(weight)
    outputs = matrix.shape[0] // (1 + pair)
    depth = min(config.depth, form["GROUP"] or config.depth)  # of a tile: of one group
    assert out.shape[0] == config.splits and (config.splits == 1 or (activation is None and plus is None))
    _small_gemm[(-(-matrix.shape[0] // config.rows), config.splits)](
        x, matrix, scales, zeros, bias, plus, out, 1 / divisor, alpha, rows, outputs, groups,
        K=width, MB=max(16, triton.next_power_of_2(rows)), BN=config.rows, BK=depth, EARLY=config.early,
        SPLITS=config.splits, PAIR=pair, ACT=ACTIVATIONS[activation], BIAS=bias is not None, PLUS=plus is not None,
        ALPHA=alpha != 1, STAGES=config.stages, IEEE=x.dtype is torch.float32, PDL=pdl, num_warps=config.warps,
        launch_pdl=pdl, **form,
    )  # fmt: skip
