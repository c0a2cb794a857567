"""Codes as an operand of a matrix product: they become numbers in the threads that hand them to the tensor cores.

A word holds four codes of 8 bits, or eight of 4. Of 16 inputs the four words lie with four neighbouring threads, and
each of those gives a product of 16 inputs two pairs of numbers, eight inputs apart:

    input 4 q + 2 h + e of the weight, in word q, is input 8 h + 2 q + e of the product

The other operand is read in that order (`input_places`), so no code changes threads. Of 4 bits the low halves of four
words are 16 inputs, and their high halves the next 16.
"""

from ladder.jit import tl, triton
from ladder.kernels.quantized.codes import eight_bits


@triton.jit
def input_places(k):
    """Which inputs of the weight are the product's inputs k."""
    return k // 16 * 16 + k // 2 % 4 * 4 + k // 8 % 2 * 2 + k % 2


@triton.jit
def _four_bits(words, zero, ASM: tl.constexpr, KIND: tl.constexpr):
    """The numbers of words of 4 bits, [rows, inputs in the product's order], less their zeros, [rows, 1]."""
    if ASM and tl.bfloat16 == KIND:  # 0x4300 | code is 128 + code; the fma subtracts 128 + zero
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v; mov.b32 v, 0x3F803F80; and.b32 t, $8, 0x0F0F0F0F;
            prmt.b32 u, t, 0x43434343, 0x4140; fma.rn.bf16x2 u, u, v, $9; mov.b32 {$0, $1}, u;
            prmt.b32 u, t, 0x43434343, 0x4342; fma.rn.bf16x2 u, u, v, $9; mov.b32 {$2, $3}, u;
            shr.b32 t, $8, 4; and.b32 t, t, 0x0F0F0F0F;
            prmt.b32 u, t, 0x43434343, 0x4140; fma.rn.bf16x2 u, u, v, $9; mov.b32 {$4, $5}, u;
            prmt.b32 u, t, 0x43434343, 0x4342; fma.rn.bf16x2 u, u, v, $9; mov.b32 {$6, $7}, u; }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, zero * 0x10001 - 0x3CFF3D00],  # a pair of -(128 + zero)
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        a, b = ((words & 15) - zero).to(KIND), ((words >> 8 & 15) - zero).to(KIND)
        c, d = ((words >> 16 & 15) - zero).to(KIND), ((words >> 24 & 15) - zero).to(KIND)
        e, f = ((words >> 4 & 15) - zero).to(KIND), ((words >> 12 & 15) - zero).to(KIND)
        g, h = ((words >> 20 & 15) - zero).to(KIND), ((words >> 28 & 15) - zero).to(KIND)
    low = tl.join(tl.join(a, b), tl.join(c, d))  # [rows, words, 2 (e), 2 (h)]
    high = tl.join(tl.join(e, f), tl.join(g, h))
    rows: tl.constexpr = words.shape[0]
    count: tl.constexpr = words.shape[1]
    found = tl.join(low, high).reshape(rows, count // 4, 4, 2, 2, 2)
    return found.permute(0, 1, 5, 4, 2, 3).reshape(rows, count * 8)


@triton.jit
def _eight_bits(words, FP8: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr):
    """The numbers of words of 8 bits (of fp8, or integers), [rows, inputs in the product's order]."""
    if ASM and tl.bfloat16 == KIND and FP8:  # as in `eight_bits`, in bfloat16's places
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v, w; mov.b32 v, 0x7B807B80; mov.b32 w, 0x80008000;
            prmt.b32 t, $4, 0, 0x1404; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0; and.b32 t, t, 0x80008000;
            or.b32 u, u, t; fma.rn.bf16x2 u, u, v, w; mov.b32 {$0, $1}, u;
            prmt.b32 t, $4, 0, 0x3424; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0; and.b32 t, t, 0x80008000;
            or.b32 u, u, t; fma.rn.bf16x2 u, u, v, w; mov.b32 {$2, $3}, u; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=1,
        )
    elif (
        ASM and tl.bfloat16 == KIND
    ):  # 0x4300 | its lower seven bits is 128 + these; the fma subtracts 128 or, of negative ones, 256
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v; mov.b32 v, 0x3F803F80;
            prmt.b32 t, $4, 0x43434343, 0x4140; and.b32 u, t, 0xFF80FF80; or.b32 u, u, 0x80008000;
            and.b32 t, t, 0xFF7FFF7F; fma.rn.bf16x2 t, t, v, u; mov.b32 {$0, $1}, t;
            prmt.b32 t, $4, 0x43434343, 0x4342; and.b32 u, t, 0xFF80FF80; or.b32 u, u, 0x80008000;
            and.b32 t, t, 0xFF7FFF7F; fma.rn.bf16x2 t, t, v, u; mov.b32 {$2, $3}, t; }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        a, b = _byte(words, 0, FP8, ASM, KIND), _byte(words, 1, FP8, ASM, KIND)
        c, d = _byte(words, 2, FP8, ASM, KIND), _byte(words, 3, FP8, ASM, KIND)
    rows: tl.constexpr = words.shape[0]
    count: tl.constexpr = words.shape[1]
    found = tl.join(tl.join(a, b), tl.join(c, d)).reshape(rows, count // 4, 4, 2, 2)
    return found.permute(0, 1, 4, 2, 3).reshape(rows, count * 4)


@triton.jit
def _byte(words, BYTE: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr):
    return eight_bits((words >> (8 * BYTE)).to(tl.int8), FP8, ASM).to(KIND)


@triton.jit
def operand(words, zero, BITS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr):
    """Words of codes, [rows, words], as numbers, [rows, inputs in the product's order]. Codes of 4 bits have a zero,
    [rows].
    """
    if BITS == 4:
        return _four_bits(words, zero[:, None], ASM, KIND)
    else:
        return _eight_bits(words, FP8, ASM, KIND)
