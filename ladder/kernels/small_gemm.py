"""A few rows of activations times a weight."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, activated, let_others_start, product, wait_for_others
from ladder.kernels.quantized.codes import code_arguments, zero_points
from ladder.kernels.quantized.operand import input_places, operand
from ladder.kernels.table import SmallGemm
from ladder.layers.weight import Packed


@triton.jit
def _times_codes(y, words, lines, scales, zeros, own, first, here, live, DEPTH: tl.constexpr, BK: tl.constexpr,
                 STAGES: tl.constexpr, IEEE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                 ZEROS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Rows of words of codes, whose scales begin at `own`, times the inputs from `first` on; a tile is of one group,
    whose scales and zeros are asked for a tile ahead.
    """
    kind: tl.constexpr = lines.dtype.element_ty
    per: tl.constexpr = 32 // BITS  # codes in a word
    word = tl.arange(0, BK // per)[None, :]
    k = input_places(tl.arange(0, BK))[:, None]
    group = own
    if GROUP > 0:
        group += first // GROUP
    scale = tl.load(scales + group, mask=here, other=0.0)
    zero = zero_points(zeros, group, here, ZEROS)
    for at in tl.range(0, DEPTH, BK, num_stages=STAGES):
        if DEPTH % BK == 0:
            code = tl.load(words + (at // per + word), mask=here[:, None], other=0)
            xs = tl.load(lines + (at + k), mask=live, other=0.0)
        else:
            code = tl.load(words + (at // per + word), mask=here[:, None] & (at // per + word < DEPTH // per), other=0)
            xs = tl.load(lines + (at + k), mask=(at + k < DEPTH) & live, other=0.0)
        if GROUP > 0:
            group = own + (first + at + BK) // GROUP
            there = here & (at + BK < DEPTH)
            next_scale = tl.load(scales + group, mask=there, other=0.0)
            next_zero = zero_points(zeros, group, there, ZEROS)
            some = product(operand(code, zero, BITS, FP8, ASM, kind), xs, tl.zeros(y.shape, tl.float32), IEEE)
            y += some * scale.to(tl.float32)[:, None]
            scale, zero = next_scale, next_zero
        else:
            y = product(operand(code, zero, BITS, FP8, ASM, kind), xs, y, IEEE)
    if GROUP == 0:
        y = y * scale.to(tl.float32)[:, None]
    return y


@triton.jit
def _small_gemm(x, weight, scales, zeros, bias, plus, out, scale, alpha, M, N, GROUPS, K: tl.constexpr,
            MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SPLITS: tl.constexpr,
            PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr,
            STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
            ZEROS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
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
        words = weight + line.to(tl.int64)[:, None] * (K * BITS // 32) + split * (depth * BITS // 32)
        own = line.to(tl.int64) * GROUPS
        y = _times_codes(
            y, words, lines, scales, zeros, own, split * depth, r < N, live, depth, BK, STAGES, IEEE, BITS, GROUP,
            ZEROS, FP8, ASM,
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
    if isinstance(weight, Packed):
        matrix = matrix.view(torch.int32)
    assert out.shape[0] == config.splits and (config.splits == 1 or (activation is None and plus is None))
    _small_gemm[(-(-matrix.shape[0] // config.rows), config.splits)](
        x, matrix, scales, zeros, bias, plus, out, 1 / divisor, alpha, rows, outputs, groups,
        K=width, MB=max(16, triton.next_power_of_2(rows)), BN=config.rows, BK=depth, EARLY=config.early,
        SPLITS=config.splits, PAIR=pair, ACT=ACTIVATIONS[activation], BIAS=bias is not None, PLUS=plus is not None,
        ALPHA=alpha != 1, STAGES=config.stages, IEEE=x.dtype is torch.float32, PDL=pdl, num_warps=config.warps,
        launch_pdl=pdl, **form,
    )  # fmt: skip
