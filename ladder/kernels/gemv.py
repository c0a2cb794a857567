"""One row of activations times a weight."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.jit import tl, triton
from ladder.kernels.device import gathered, let_others_start, wait_for_all
from ladder.kernels.stream import Source
from ladder.kernels.table import SHARED, Gemv
from ladder.layers.norm import rms


@triton.jit
def _gemv(base, first, second, drift, flag1, flag2, need, saved, gain, weight, bias, plus, out, eps, scale, N,
          K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
          FLAGS: tl.constexpr, DRIFT: tl.constexpr, NORM: tl.constexpr, PAIR: tl.constexpr, BIAS: tl.constexpr,
          PLUS: tl.constexpr, TP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BK)
    inside = cols < K
    if NORM:
        g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
    x = tl.zeros([BK], tl.float32)
    factor = 1.0
    turn = tl.arange(0, TP)
    more = tl.zeros([TP, BN], tl.float32)
    # the weight's tiles go through shared memory, STAGES - 1 of them under way: also while the first tile's turn waits
    for tile in tl.range(0, TILES, num_stages=STAGES):
        r = (pid * TILES + tile) * BN + tl.arange(0, BN)
        here = r < N
        at = r.to(tl.int64)[:, None] * K + cols[None, :]
        wa = tl.load(weight + at, mask=inside[None, :] & here[:, None], other=0.0)
        if PAIR:
            wb = tl.load(weight + N.to(tl.int64) * K + at, mask=inside[None, :] & here[:, None], other=0.0)
        if tile == 0:
            wait_for_all(flag1, flag2, need, FLAGS, PDL)
            if PLUS:  # of all tiles at once, not one latency after the other
                all_r = (pid * TILES + turn)[:, None] * BN + tl.arange(0, BN)[None, :]
                live = (turn < TILES)[:, None] & (all_r < N)
                more = tl.load(plus + all_r, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            x = gathered(base, first, second, drift, saved, cols, inside, pid == 0, SUMS, DRIFT)
            if NORM:
                factor = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
                x = x * g
            let_others_start(PDL)
        ya = tl.sum(wa.to(tl.float32) * x[None, :], axis=1) * factor
        if BIAS:
            ya += tl.load(bias + r, mask=here, other=0.0).to(tl.float32)
        if PAIR:
            yb = tl.sum(wb.to(tl.float32) * x[None, :], axis=1) * factor
            if BIAS:
                yb += tl.load(bias + N + r, mask=here, other=0.0).to(tl.float32)
            ya = ya * tl.sigmoid(ya) * yb
        if PLUS:
            ya += scale * tl.sum(tl.where((turn == tile)[:, None], more, 0.0), axis=0)
        tl.store(out + r, ya.to(out.dtype.element_ty), mask=here)


def gemv(
    source: Source,
    norm: tuple[Tensor, float] | None,
    weight: Tensor,
    bias: Tensor | None,
    pair: bool,
    plus: Tensor | None,
    divisor: int,
    out: Tensor,
    config: Gemv,
    pdl: bool,
    cores: int = 0,
) -> Tensor:
    """out = f( W n(x) + bias ) + plus / divisor, for one row x = the stream; returns what the ranks agree on.

    n(x) = x / sqrt(mean(x^2) + eps) * gain with a norm (gain, eps), else x. f is the identity; for a `pair`, whose
    weight is the gate's rows and then the up projection's, silu(gate) * up.

    `cores`, the GPU's multiprocessors, are needed where the stream has flags to wait for: the grid then leaves room for
    the kernels that set them.
    """
    rows, width = weight.shape[0] // (1 + pair), weight.shape[1]
    programs, room = config.programs, {}
    if source.flags:
        ring = config.rows * triton.next_power_of_2(width) * weight.element_size() * (1 + pair) * (config.stages - 1)
        programs, registers = beside_sums(programs, config.warps, ring, cores)
        room = {"maxnreg": registers}
    tiles = -(-rows // (programs * config.rows))
    saved = torch.empty_like(source.base) if source.sums else source.base
    gain, eps = norm if norm is not None else (None, 0.0)
    _gemv[(-(-rows // (tiles * config.rows)),)](
        *source.arguments(saved), gain, weight, bias, plus, out, eps, 1 / divisor, rows,
        K=width, BK=triton.next_power_of_2(width), BN=config.rows, TILES=tiles, **source.modes(),
        NORM=norm is not None, PAIR=pair, BIAS=bias is not None, PLUS=plus is not None,
        TP=triton.next_power_of_2(tiles), STAGES=config.stages, PDL=pdl, num_warps=config.warps, launch_pdl=pdl, **room,
    )  # fmt: skip
    return saved


def beside_sums(programs: int, warps: int, ring: int, cores: int) -> tuple[int, int]:
    """How many programs may wait for a sum at once, and how many registers a thread of theirs may have.

    A multiprocessor's 64 Ki registers and `SHARED` bytes of memory must hold all of them (`ring` bytes each), with an
    eighth of the registers left for a sum's blocks, which are light (see comm/one_shot.py) but would wait for ever
    behind a program that has found no place yet.
    """
    each = 2 if programs > cores and 2 * ring <= SHARED else 1
    return min(programs, each * cores - 4), min(248, 7 * 65536 // 8 // (each * warps * 32) // 8 * 8)


def gemv_twin(
    source: Source,
    norm: tuple[Tensor, float] | None,
    weight: Tensor,
    bias: Tensor | None,
    pair: bool,
    plus: Tensor | None,
    divisor: int,
    out: Tensor,
) -> Tensor:
    """The same with torch, for any number of rows."""
    agreed, x = source.total()
    y = F.linear(x if norm is None else rms(x, *norm), weight, bias)
    if pair:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    out.copy_(y if plus is None else y + plus / divisor)
    return agreed
