"""A few rows of activations times two weights at once: QKV and gate/up of a parallel layer.

Its attention and MLP read the same stream through the same norm.

The matrices lie one behind the other (`ladder.layers.weight.as_one`). A program has rows of one of them. Where gate and
up are a pair, it reads rows of both, and so a program of QKV reads rows of its first half and of its second.
"""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import (
    ACTIVATIONS,
    activated,
    gathered,
    let_others_start,
    normalized,
    product,
    wait_for_all,
    wait_for_others,
)
from ladder.kernels.gemv import beside_all_reduces
from ladder.kernels.norm import norm_arguments
from ladder.kernels.stream import Source
from ladder.kernels.table import Gemv, SmallGemm
from ladder.layers.activation import activate
from ladder.layers.norm import Norm
from ladder.layers.weight import AsOne


@triton.jit
def _gemv_both(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, weight, bias, out, eps,
               HALF, INNER, OWN, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
               SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFTS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
               PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    is_mlp = pid >= OWN  # OWN programs are QKV's
    begin = tl.where(is_mlp, pid - OWN, pid) * (TILES * BN)
    half = tl.where(is_mlp, INNER, HALF)  # rows of gate, as many as of up; of a half of QKV, or of all of it
    shift = tl.where(is_mlp, (1 + PAIR) * HALF, 0)  # QKV's rows come first, in the matrix and in `out`
    cols = tl.arange(0, BK)
    inside = cols < K
    if NORM:
        g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32) + OFFSET
    x = tl.zeros(cols.shape, tl.float32)
    factor = 1.0
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = begin + tile * BN + tl.arange(0, BN)
        here = r < half
        at = (shift + r).to(tl.int64)[:, None] * K + cols[None, :]
        live = here[:, None] & inside[None, :]
        wa = tl.load(weight + at, mask=live, other=0.0)
        if PAIR:
            wb = tl.load(weight + half.to(tl.int64) * K + at, mask=live, other=0.0)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            x = gathered(base, first, second, drift1, drift2, saved, cols, inside, pid == 0, SUMS, DRIFTS)
            if NORM:
                x, factor = normalized(x, g, norm_bias, cols, inside, eps, K, NORM)
            let_others_start(PDL)
        ya = tl.sum(wa.to(tl.float32) * x[None, :], axis=1) * factor
        if BIAS:
            ya += tl.load(bias + shift + r, mask=here, other=0.0).to(tl.float32)
        inner = activated(ya, ACT)
        if PAIR:
            yb = tl.sum(wb.to(tl.float32) * x[None, :], axis=1) * factor
            if BIAS:
                yb += tl.load(bias + shift + half + r, mask=here, other=0.0).to(tl.float32)
            inner = inner * yb
            qkv = here & (pid < OWN)
            tl.store(out + half + r, yb.to(out.dtype.element_ty), mask=qkv)
        tl.store(out + shift + r, tl.where(is_mlp, inner, ya).to(out.dtype.element_ty), mask=here)


@triton.jit
def _small_gemm_both(x, weight, bias, out, M, HALF, INNER, OWN, K: tl.constexpr, MB: tl.constexpr, BN: tl.constexpr,
                     BK: tl.constexpr, EARLY: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
                     STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    is_mlp = pid >= OWN
    half = tl.where(is_mlp, INNER, HALF)
    shift = tl.where(is_mlp, (1 + PAIR) * HALF, 0)
    j = tl.arange(0, BN)
    outputs: tl.constexpr = BN // 2 if PAIR else BN
    r = tl.where(is_mlp, pid - OWN, pid) * outputs + j % outputs
    line = shift + r + j // outputs * half
    m = tl.arange(0, MB)
    k = tl.arange(0, BK)
    here = (r < half)[:, None]
    live = (m < M)[None, :]
    lines = x + m[None, :] * K
    rows = weight + line.to(tl.int64)[:, None] * K
    y = tl.zeros([BN, MB], tl.float32)
    if EARLY > 0:
        e = tl.arange(0, EARLY)
        early = tl.load(rows + e[None, :], mask=here, other=0.0)
    wait_for_others(PDL)
    let_others_start(PDL)
    if EARLY > 0:
        early_x = tl.load(lines + e[:, None], mask=live, other=0.0)
        y = product(early, early_x, y, IEEE)
    for at in tl.range(EARLY, K, BK, num_stages=STAGES):
        inside = at + k < K
        xs = tl.load(lines + (at + k)[:, None], mask=inside[:, None] & live, other=0.0)
        w = tl.load(rows + (at + k)[None, :], mask=here & inside[None, :], other=0.0)
        y = product(w, xs, y, IEEE)
    if BIAS:
        y += tl.load(bias + line, mask=r < half, other=0.0).to(tl.float32)[:, None]
    width = tl.where(is_mlp, INNER, (1 + PAIR) * HALF)  # of a row of QKV's, or of the MLP's behind them
    start = out + M * shift
    if PAIR:
        one, other = y.reshape(2, outputs, MB).permute(1, 2, 0).split()
        r = tl.where(is_mlp, pid - OWN, pid) * outputs + tl.arange(0, outputs)
        there = m[None, :] * width + r[:, None]
        kept = (r < half)[:, None] & live
        tl.store(start + half + there, other.to(out.dtype.element_ty), mask=kept & (pid < OWN))
        one = tl.where(is_mlp, activated(one, ACT) * other, one)
        tl.store(start + there, one.to(out.dtype.element_ty), mask=kept)
    else:
        y = tl.where(is_mlp, activated(y, ACT), y)
        tl.store(start + m[None, :] * width + r[:, None], y.to(out.dtype.element_ty), mask=here & live)


def gemv_both(
    source: Source,
    norm: Norm | None,
    both: AsOne,
    activation: str,
    pair: bool,
    config: Gemv,
    pdl: bool,
    cores: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """For one row x = the stream: W1 n(x) + bias, [1, outputs]; f( W2 n(x) + bias ), [1, inner]; and what the ranks
    agree on. n, f and `pair` as in `gemv`, and so is `cores`.
    """
    half, inner = _halves(both, pair)
    width, padded = both.matrix.shape[1], triton.next_power_of_2(both.matrix.shape[1])
    programs, room = config.programs, {}
    if source.flags:
        tile = config.rows * padded * both.matrix.element_size() * (1 + pair)
        programs, registers = beside_all_reduces(config, tile, cores, source.spared)
        room = {"maxnreg": registers}
    tiles, own, others = _shared(-(-half // config.rows), -(-inner // config.rows), programs)
    out = source.base.new_empty((1 + pair) * half + inner)
    saved = torch.empty_like(source.base) if source.sums else source.base
    gain, norm_bias, eps, modes = norm_arguments(norm)
    _gemv_both[(own + others,)](
        *source.arguments(saved), gain, norm_bias, both.matrix, both.bias, out, eps, half, inner, own, K=width,
        BK=padded, BN=config.rows, TILES=tiles, **source.modes(), **modes, PAIR=pair, ACT=ACTIVATIONS[activation],
        BIAS=both.bias is not None, STAGES=config.stages, PDL=pdl, num_warps=config.warps, launch_pdl=pdl, **room,
    )  # fmt: skip
    return *_parted(out, 1, both.first), saved


def small_gemm_both(
    x: Tensor, both: AsOne, activation: str, pair: bool, config: SmallGemm, pdl: bool
) -> tuple[Tensor, Tensor]:
    """W1 x + bias, [rows, outputs], and f( W2 x + bias ), [rows, inner], for x [rows, inputs]."""
    half, inner = _halves(both, pair)
    rows, width = x.shape
    assert config.splits == 1
    outputs = config.rows // (1 + pair)
    own, others = -(-half // outputs), -(-inner // outputs)
    out = x.new_empty(rows * ((1 + pair) * half + inner))
    _small_gemm_both[(own + others,)](
        x, both.matrix, both.bias, out, rows, half, inner, own, K=width, MB=max(16, triton.next_power_of_2(rows)),
        BN=config.rows, BK=config.depth, EARLY=config.early, PAIR=pair, ACT=ACTIVATIONS[activation],
        BIAS=both.bias is not None, STAGES=config.stages, IEEE=x.dtype is torch.float32, PDL=pdl,
        num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip
    return _parted(out, rows, both.first)


def both_reference(x: Tensor, both: AsOne, activation: str, pair: bool) -> tuple[Tensor, Tensor]:
    """The same with torch, as one product, for any number of rows."""
    y = torch.nn.functional.linear(x, both.matrix, both.bias)
    return y[:, : both.first], activate(y[:, both.first :], activation, pair)


def _halves(both: AsOne, pair: bool) -> tuple[int, int]:
    """Rows of a half of the first matrix, or of all of it; and of the gate, or of all that it is without one."""
    assert both.first % (1 + pair) == 0, "heads have an even number of dimensions"
    return both.first // (1 + pair), (len(both.matrix) - both.first) // (1 + pair)


def _shared(own: int, others: int, programs: int) -> tuple[int, int, int]:
    """How many tiles a program takes so that there are at most so many programs, and how many those of each matrix are.
    A program has tiles of one matrix only.
    """
    tiles = -(-(own + others) // max(2, programs))
    while -(-own // tiles) + -(-others // tiles) > max(2, programs):
        tiles += 1
    return tiles, -(-own // tiles), -(-others // tiles)


def _parted(out: Tensor, rows: int, first: int) -> tuple[Tensor, Tensor]:
    return out[: rows * first].view(rows, first), out[rows * first :].view(rows, -1)
