"""A quantized matrix as it is: for prompts, which the library's products compute, and for more rows than ours take."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.quantized.codes import code_arguments, eight_bits, four_bits, zero_points
from ladder.layers.weight import Packed

ROWS, COLUMNS = 4, 1024  # stored numbers of a tile


@triton.jit
def _dequantize(codes, scales, zeros, out, N, WIDTH, GROUPS, BITS: tl.constexpr, GROUP: tl.constexpr,
                ZEROS: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    packed: tl.constexpr = 8 // BITS  # codes in a stored number
    stored: tl.constexpr = GROUP // packed if GROUP > 0 else BK  # numbers of a group
    # [rows, groups, numbers of a group]
    r = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None, None]
    group = tl.arange(0, BK // stored)[None, :, None]
    cols = tl.program_id(1) * BK + group * stored + tl.arange(0, stored)[None, None, :]
    here = (r < N) & (cols < WIDTH)
    own = r.to(tl.int64) * GROUPS + group * (GROUP > 0)
    live = (r < N) & (group >= 0)
    if GROUP > 0:
        own += tl.program_id(1) * (BK // stored)
        live = live & (tl.program_id(1) * (BK // stored) + group < GROUPS)
    scale = tl.load(scales + own, mask=live, other=0.0).to(tl.float32)
    code = tl.load(codes + r.to(tl.int64) * WIDTH + cols, mask=here, other=0.0)
    at = out + r.to(tl.int64) * (WIDTH * packed)
    if BITS == 4:
        low, high = four_bits(code, tl.float32, ASM)
        zero = zero_points(zeros, own, live, ZEROS)
        first = at + cols // RUN * (2 * RUN) + cols % RUN
        tl.store(first, ((low - zero) * scale).to(out.dtype.element_ty), mask=here)
        tl.store(first + RUN, ((high - zero) * scale).to(out.dtype.element_ty), mask=here)
    else:
        tl.store(at + cols, (eight_bits(code, tl.float32, ASM) * scale).to(out.dtype.element_ty), mask=here)


def dequantize(weight: Packed, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs], computed in float32."""
    codes, scales, zeros, groups, form = code_arguments(weight)
    rows, width = codes.shape
    out = torch.empty(rows, weight.inputs, dtype=dtype, device=codes.device)
    _dequantize[(-(-rows // ROWS), -(-width // COLUMNS))](
        codes, scales, zeros, out, rows, width, groups, **form, BN=ROWS, BK=COLUMNS, num_warps=4
    )
    return out
