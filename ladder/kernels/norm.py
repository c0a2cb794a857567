"""Residual add and norm: for prefill, and for decode steps of more than one sequence."""

from typing import Any

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import LAYER, RMS, gathered, let_others_start, normalized, wait_for_all
from ladder.kernels.stream import Source
from ladder.layers.norm import Norm


@triton.jit
def _add_norm(base, first, second, drift1, drift2, flag1, flag2, need, saved, gain, norm_bias, out, eps,
              K: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr, FLAGS: tl.constexpr, DRIFTS: tl.constexpr,
              NORM: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    cols = tl.arange(0, BK)
    inside = cols < K
    at = tl.program_id(0).to(tl.int64) * K + cols
    if NORM:
        g = tl.load(gain + cols, mask=inside, other=0.0).to(tl.float32) + OFFSET
    wait_for_all(flag1, flag2, need, FLAGS, PDL)
    let_others_start(PDL)  # not before: a kernel that starts too early could keep an all-reduce out
    x = gathered(base, first, second, drift1, drift2, saved, at, inside, True, SUMS, DRIFTS)
    if NORM:
        x, factor = normalized(x, g, norm_bias, cols, inside, eps, K, NORM)
        x = x * factor
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


def norm_arguments(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float, dict[str, int]]:
    """As the kernels take a norm: gain, bias, eps; and its constants."""
    if norm is None:
        return None, None, 0.0, {"NORM": 0, "OFFSET": 0}
    kind = LAYER if norm.centered else RMS
    return norm.weight, norm.bias, norm.eps, {"NORM": kind, "OFFSET": norm.offset}


def add_norm(source: Source, norm: Norm | None, pdl: bool) -> tuple[Tensor, Tensor]:
    """n(x) for every row x of the stream, and what the ranks agree on."""
    rows, width = source.base.shape
    out = torch.empty_like(source.base)
    saved = torch.empty_like(source.base) if source.sums else source.base
    gain, norm_bias, eps, modes = norm_arguments(norm)
    more: dict[str, Any] = {**source.modes(), **modes}
    _add_norm[(rows,)](
        *source.arguments(saved), gain, norm_bias, out, eps, K=width, BK=triton.next_power_of_2(width), **more,
        PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out, saved


def add_norm_reference(source: Source, norm: Norm | None) -> tuple[Tensor, Tensor]:
    agreed, x = source.total()
    return x if norm is None else norm(x), agreed
