"""Residual add and RMSNorm of whole rows."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import gathered, let_others_start, wait_for_all
from ladder.kernels.stream import Source
from ladder.layers.norm import rms


@triton.jit
def _add_norm(base, first, second, drift, flag1, flag2, need, saved, gain, out, eps,
              K: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFT: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    cols = tl.arange(0, BK)
    inside = cols < K
    at = tl.program_id(0).to(tl.int64) * K + cols
    g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_all(flag1, flag2, need, FLAGS, PDL)
    let_others_start(PDL)  # not before: who is let in early could keep a sum out
    x = gathered(base, first, second, drift, saved, at, inside, True, SUMS, DRIFT)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * g
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


def add_norm(source: Source, gain: Tensor, eps: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """n(x) = x / sqrt(mean(x^2) + eps) * gain for every row x of the stream, and what the ranks agree on."""
    rows, width = source.base.shape
    out = torch.empty_like(source.base)
    saved = torch.empty_like(source.base) if source.sums else source.base
    _add_norm[(rows,)](
        *source.arguments(saved), gain, out, eps, K=width, BK=triton.next_power_of_2(width), **source.modes(),
        PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out, saved


def add_norm_twin(source: Source, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    agreed, x = source.total()
    return rms(x, gain, eps), agreed
