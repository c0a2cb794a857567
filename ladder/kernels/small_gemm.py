"""A few rows of activations times a weight."""

from typing import Any

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, let_others_start, product, wait_for_others, write_products
from ladder.kernels.quantized.codes import code_arguments
from ladder.kernels.quantized.small_gemm import quantized_small_gemm
from ladder.kernels.table import SmallGemm
from ladder.layers.weight import RUN, Packed

ACCUMULATORS = 128  # of the products of a quantized weight that fit into a thread's registers


@triton.jit
def _small_gemm(x, weight, bias, plus, out, scale, alpha, M, N, K: tl.constexpr, MB: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EARLY: tl.constexpr, SPLITS: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr,
                BIAS: tl.constexpr, PLUS: tl.constexpr, ALPHA: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
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
    rows = weight + line.to(tl.int64)[:, None] * K + split * depth
    lines = x + m[None, :] * K + split * depth
    y = tl.zeros([BN, MB], tl.float32)
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
    write_products(y, bias, plus, out, scale, alpha, tile, split, 0, M, N, PAIR, ACT, BIAS, PLUS, ALPHA)


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
    outputs, splits = out.shape[2], config.splits
    assert out.shape[0] == splits and (splits == 1 or (activation is None and plus is None))
    modes: dict[str, Any] = {
        "K": width, "BN": config.rows, "SPLITS": splits, "PAIR": pair, "ACT": ACTIVATIONS[activation],
        "BIAS": bias is not None, "PLUS": plus is not None, "ALPHA": alpha != 1, "STAGES": config.stages,
        "IEEE": x.dtype is torch.float32, "PDL": pdl, "num_warps": config.warps, "launch_pdl": pdl,
    }  # fmt: skip
    tiles = -(-outputs * (1 + pair) // config.rows)
    ending = (bias, plus, out, 1 / divisor, alpha, rows, outputs)
    padded = triton.next_power_of_2(rows)
    if isinstance(weight, Tensor):
        block, depth = max(16, padded), config.depth
        _small_gemm[tiles, splits](x, weight, *ending, MB=block, BK=depth, EARLY=config.early, **modes)
        return
    codes, scales, zeros, _, form = code_arguments(weight)
    codes = codes if weight.bits == 4 else codes.view(torch.int8)
    depth = min(config.depth, form["GROUP"] or config.depth)
    # a group's sums are kept beside those of all
    block = min(max(8, padded), 32 * ACCUMULATORS // config.rows // (1 + (form["GROUP"] > 0)))
    quantized_small_gemm[tiles, splits, -(-rows // block)](
        x, codes, scales, zeros, *ending, MB=block, BK=depth, SLICES=config.warps, RUN=RUN, **form, **modes
    )
