"""A quantized matrix as it is: for prompts, which the library's products compute, and for more rows than ours take."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.quantized.codes import code_arguments, eight_bits, zero_points
from ladder.layers.weight import RUN, Packed

ROWS, COLUMNS = 4, 1024  # stored numbers of a tile


@triton.jit
def _four_bits(pair, ASM: tl.constexpr):
    """The codes of 4 bits in the low and in the high halves of bytes, 0 to 15, as numbers of float32."""
    if ASM:  # as the lowest byte of 2^23, see `eight_bits`
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u; and.b32 t, $8, 0x0F0F0F0F; shr.b32 u, $8, 4; and.b32 u, u, 0x0F0F0F0F;
            prmt.b32 $0, t, 0x4B000000, 0x7650; prmt.b32 $1, t, 0x4B000000, 0x7651;
            prmt.b32 $2, t, 0x4B000000, 0x7652; prmt.b32 $3, t, 0x4B000000, 0x7653;
            prmt.b32 $4, u, 0x4B000000, 0x7650; prmt.b32 $5, u, 0x4B000000, 0x7651;
            prmt.b32 $6, u, 0x4B000000, 0x7652; prmt.b32 $7, u, 0x4B000000, 0x7653; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [pair],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        return low - 8388608.0, high - 8388608.0
    else:
        return (pair & 15).to(tl.float32), (pair >> 4).to(tl.float32)


@triton.jit
def _dequantize(codes, scales, zeros, out, N, WIDTH, GROUPS, BITS: tl.constexpr, GROUP: tl.constexpr,
                ZEROS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr,
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
        low, high = _four_bits(code, ASM)
        zero = zero_points(zeros, own, live, ZEROS)
        first = at + cols // RUN * (2 * RUN) + cols % RUN
        tl.store(first, ((low - zero) * scale).to(out.dtype.element_ty), mask=here)
        tl.store(first + RUN, ((high - zero) * scale).to(out.dtype.element_ty), mask=here)
    else:
        tl.store(at + cols, (eight_bits(code, FP8, ASM) * scale).to(out.dtype.element_ty), mask=here)


def dequantize(weight: Packed, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs], computed in float32."""
    codes, scales, zeros, groups, form = code_arguments(weight)
    rows, width = codes.shape
    out = torch.empty(rows, weight.inputs, dtype=dtype, device=codes.device)
    _dequantize[(-(-rows // ROWS), -(-width // COLUMNS))](
        codes, scales, zeros, out, rows, width, groups, **form, RUN=RUN, BN=ROWS, BK=COLUMNS, num_warps=4
    )
    return out
