"""Quantized weights in matrix kernels: codes become numbers in registers, and each group's sum is scaled once.

sum_i w[o, i] x[i] = sum_g scale[o, g] ( sum_{i in g} code[o, i] x[i] - zero[o, g] sum_{i in g} x[i] )
"""

from typing import Any

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.layers.weight import RUN, Packed

CHUNK = 16  # bytes of a row that a thread reads at once


@triton.jit
def eight_bits(code, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes of 8 bits as numbers of this type."""
    if tl.int8 == code.dtype and tl.float32 == KIND and ASM:
        # the lowest byte of 2^23, which counts ones there: conversions of integers are slow
        found = tl.inline_asm_elementwise(
            """{ .reg .b32 t; xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7650; prmt.b32 $1, t, 0x4B000000, 0x7651;
            prmt.b32 $2, t, 0x4B000000, 0x7652; prmt.b32 $3, t, 0x4B000000, 0x7653; }""",
            "=r,=r,=r,=r,r",
            [code],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        return found - 8388736.0  # 2^23 + 128
    elif tl.int8 == code.dtype and tl.bfloat16 == KIND and ASM:  # 128 + the lower seven bits, less 128 or 256
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, a, b; prmt.b32 t, $2, 0x43434343, 0x4140; prmt.b32 u, $2, 0x43434343, 0x4342;
            and.b32 a, t, 0xFF7FFF7F; and.b32 b, t, 0xFF80FF80; sub.bf16x2 $0, a, b;
            and.b32 a, u, 0xFF7FFF7F; and.b32 b, u, 0xFF80FF80; sub.bf16x2 $1, a, b; }""",
            "=r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif tl.float8e4nv == code.dtype and tl.bfloat16 == KIND and ASM:  # its bits in bf16's places, times 2^120
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, a, b, c; mov.b32 c, 0x7B807B80; prmt.b32 t, $2, 0, 0x1404; prmt.b32 u, $2, 0, 0x3424;
            shr.b32 a, t, 4; and.b32 a, a, 0x07F007F0; and.b32 b, t, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $0, a, c;
            shr.b32 a, u, 4; and.b32 a, a, 0x07F007F0; and.b32 b, u, 0x80008000; or.b32 a, a, b;
            mul.bf16x2 $1, a, c; }""",
            "=r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return code.to(KIND)


@triton.jit
def four_bits(pair, KIND: tl.constexpr, ASM: tl.constexpr):
    """The codes of 4 bits in the low and in the high halves of bytes, 0 to 15, as numbers of this type."""
    if tl.float32 == KIND and ASM:  # as above
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
    elif tl.bfloat16 == KIND and ASM:  # the lowest byte of 128
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u; and.b32 t, $4, 0x0F0F0F0F; shr.b32 u, $4, 4; and.b32 u, u, 0x0F0F0F0F;
            prmt.b32 $0, t, 0x43434343, 0x4140; prmt.b32 $1, t, 0x43434343, 0x4342;
            prmt.b32 $2, u, 0x43434343, 0x4140; prmt.b32 $3, u, 0x43434343, 0x4342; }""",
            "=r,=r,=r,=r,r",
            [pair],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low - 128.0, high - 128.0
    else:
        return (pair & 15).to(KIND), (pair >> 4).to(KIND)


@triton.jit
def zero_points(zeros, at, live, ZEROS: tl.constexpr):
    """The zeros of 4-bit codes, 8 where they have none of their own."""
    if ZEROS:
        return tl.load(zeros + at, mask=live, other=0).to(tl.float32)
    else:
        return tl.where(live, 8.0, 0.0)


def code_arguments(weight: Tensor | Packed) -> tuple[Tensor, Tensor | None, Tensor | None, int, dict[str, Any]]:
    """As the kernels take a weight: its stored numbers, scales, zeros, groups of a row; and its constants."""
    if isinstance(weight, Tensor):
        return weight, None, None, 1, {"BITS": 16, "GROUP": 0, "ZEROS": False, "RUN": 1, "ASM": False}
    groups = weight.scales.shape[1]
    modes = {"BITS": weight.bits, "GROUP": weight.group if groups > 1 else 0, "ZEROS": weight.zeros is not None}
    nvidia = weight.codes.is_cuda and torch.version.hip is None
    return weight.codes, weight.scales, weight.zeros, groups, {**modes, "RUN": RUN, "ASM": nvidia}
