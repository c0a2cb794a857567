"""How kernels read a quantized weight: its codes become numbers in registers, and each group's sum is scaled once.

sum_i w[o, i] x[i] = sum_g scale[o, g] sum_{i in g} ( code[o, i] - zero[o, g] ) x[i]
"""

from typing import Any

import torch
from torch import Tensor

from ladder.devices import converts_fp8
from ladder.jit import tl, triton
from ladder.layers.weight import Packed

CHUNK = 16  # bytes of a row that a thread reads at once


@triton.jit
def zero_points(zeros, group, live, ZEROS: tl.constexpr):
    """The zeros of 4-bit codes: 8 where the weight has none of its own."""
    if ZEROS:
        return tl.load(zeros + group, mask=live, other=0).to(tl.int32)
    else:
        return tl.full(live.shape, 8, tl.int32)  # a constant: nothing is moved between threads


@triton.jit
def eight_bits(code, FP8: tl.constexpr, ASM: tl.constexpr):
    """Codes of 8 bits (of fp8, or integers) as numbers of float32."""
    if tl.int8 != code.dtype:
        return code.to(tl.float32)
    elif FP8:  # exponent and mantissa in float32's places; 2^120 is the difference of the exponents' biases
        bits = code.to(tl.int32)
        return ((bits & -2147483648) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif ASM:  # as the lowest byte of 2^23, a float32 in which it counts ones: converting integers is slow
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
    else:
        return code.to(tl.float32)


def code_arguments(weight: Tensor | Packed) -> tuple[Tensor, Tensor | None, Tensor | None, int, dict[str, Any]]:
    """As the kernels take a weight: its stored numbers, scales, zeros, groups of a row; and its constants. Chips that
    do not convert fp8 are given its bits.
    """
    if isinstance(weight, Tensor):
        return weight, None, None, 1, {"BITS": 16, "GROUP": 0, "ZEROS": False, "FP8": False, "ASM": False}
    groups = weight.scales.shape[1]
    modes = {"BITS": weight.bits, "GROUP": weight.group if groups > 1 else 0, "ZEROS": weight.zeros is not None}
    modes["FP8"] = weight.codes.dtype is torch.float8_e4m3fn
    modes["ASM"] = weight.codes.is_cuda and torch.version.hip is None
    codes = weight.codes if converts_fp8(weight.codes.device) or not modes["FP8"] else weight.codes.view(torch.int8)
    return codes, weight.scales, weight.zeros, groups, modes
