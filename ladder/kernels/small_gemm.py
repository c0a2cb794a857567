"""A few rows of activations times a weight."""

from typing import Any

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, let_others_start, product, wait_for_others, write_products
from ladder.kernels.quantized.codes import code_arguments
from ladder.kernels.quantized.small_gemm import quantized_small_gemm
from ladder.kernels.table import SHARED, SmallGemm, power_up_to
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
    shared: int = SHARED,
) -> None:
    """out[s] = alpha f( x_s W_s^T + bias ) + plus / divisor, x [rows, inputs] and W cut into `splits` along the inputs.

    f as in `gemv`. out is [splits, rows, outputs], to be added up by its reader; only one split can have an activation
    or a `plus`. The first has the bias. `shared`: bytes of a multiprocessor for what a program has under way.
    """
    rows, width = x.shape
    outputs, splits = out.shape[2], config.splits
    assert out.shape[0] == splits and (splits == 1 or (activation is None and plus is None))
    modes: dict[str, Any] = {
        "K": width, "BN": config.rows, "SPLITS": splits, "PAIR": pair, "ACT": ACTIVATIONS[activation],
        "BIAS": bias is not None, "PLUS": plus is not None, "ALPHA": alpha != 1,
        "IEEE": x.dtype is torch.float32, "PDL": pdl, "num_warps": config.warps, "launch_pdl": pdl,
    }  # fmt: skip
    tiles = -(-outputs * (1 + pair) // config.rows)
    ending = (bias, plus, out, 1 / divisor, alpha, rows, outputs)
    if isinstance(weight, Tensor):
        block = max(16, triton.next_power_of_2(rows))
        _small_gemm[tiles, splits](
            x, weight, *ending, MB=block, BK=config.depth, EARLY=config.early, STAGES=config.stages, **modes
        )
        return
    codes, scales, zeros, _, form = code_arguments(weight)
    codes = codes if weight.bits == 4 else codes.view(torch.int8)
    block, depth, stages = fitting(config, weight.bits, form["GROUP"], rows, x.element_size(), shared)
    quantized_small_gemm[tiles, splits, -(-rows // block)](
        x, codes, scales, zeros, *ending, MB=block, BK=depth, STAGES=stages, SLICES=config.warps, RUN=RUN, **form,
        **modes,
    )  # fmt: skip


def fitting(config: SmallGemm, bits: int, group: int, rows: int, size: int, shared: int) -> tuple[int, int, int]:
    """Of a quantized weight: the rows of activations that a program has, the columns of a slice, and the stages. As the
    configuration has them where registers and `shared` bytes hold that; activations have `size` bytes.
    """
    depth = min(config.depth, group or config.depth)
    # a group's sums are kept beside those of all
    block = min(max(8, power_up_to(2 * rows - 1)), 32 * ACCUMULATORS // config.rows // (1 + (group > 0)))
    while True:
        of_codes = config.warps * depth * bits // 8  # bytes of a row, and numbers that are multiplied at once
        tile = of_codes * config.rows + config.warps * depth * block * size
        operands = of_codes * (config.rows + block) * size if size == 4 else 0  # float32's are in shared memory, too
        stages = min(config.stages, 1 + (shared - operands) // tile)
        if stages >= 2:
            return block, depth, stages
        if block > 8:
            block //= 2
        elif depth > 32:
            depth //= 2
        else:
            return block, depth, 2
