"""Codes as an operand of a matrix product: they become numbers in the threads that hand them to the tensor cores.

Every number is computed from its own code alone, four neighbouring ones with the same instructions, so nothing is moved
between threads, whatever they have of the matrix.
"""

from ladder.jit import tl, triton
from ladder.kernels.quantized.codes import eight_bits


@triton.jit
def four_bits(code, zero, HIGH: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr):
    """The numbers of the low halves of bytes, or of the high ones, less their zeros."""
    if ASM and tl.bfloat16 == KIND:  # 0x4300 | code is 128 + code; the fma subtracts 128 + zero
        less = -(128 + zero).to(tl.float32).to(tl.bfloat16)
        if HIGH:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t, u, v; mov.b32 v, 0x3F803F80; shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;
                prmt.b32 u, t, 0x43434343, 0x4140; fma.rn.bf16x2 $0, u, v, $3;
                prmt.b32 u, t, 0x43434343, 0x4342; fma.rn.bf16x2 $1, u, v, $4; }""",
                "=&r,=r,r,r,r",
                [code, less],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t, u, v; mov.b32 v, 0x3F803F80; and.b32 t, $2, 0x0F0F0F0F;
                prmt.b32 u, t, 0x43434343, 0x4140; fma.rn.bf16x2 $0, u, v, $3;
                prmt.b32 u, t, 0x43434343, 0x4342; fma.rn.bf16x2 $1, u, v, $4; }""",
                "=&r,=r,r,r,r",
                [code, less],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
    else:
        return (((code >> (4 * HIGH)) & 15).to(tl.int32) - zero).to(KIND)


@triton.jit
def eight(code, FP8: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr):
    """The numbers of codes of 8 bits: of fp8, or integers."""
    if ASM and tl.bfloat16 == KIND and FP8:  # as in `eight_bits`, in bfloat16's places
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t, u, v, w; mov.b32 v, 0x7B807B80; mov.b32 w, 0x80008000;
            prmt.b32 t, $2, 0, 0x3120; shl.b32 u, t, 4; and.b32 u, u, 0x07F007F0; shl.b32 s, t, 8;
            and.b32 s, s, 0x80008000; or.b32 u, u, s; fma.rn.bf16x2 $0, u, v, w;
            shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0; and.b32 t, t, 0x80008000; or.b32 u, u, t;
            fma.rn.bf16x2 $1, u, v, w; }""",
            "=&r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif ASM and tl.bfloat16 == KIND:
        # 0x4300 | its lower seven bits is 128 + these; the fma subtracts 128 or, of negative ones, 256
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v; mov.b32 v, 0x3F803F80;
            prmt.b32 t, $2, 0x43434343, 0x4140; and.b32 u, t, 0xFF80FF80; or.b32 u, u, 0x80008000;
            and.b32 t, t, 0xFF7FFF7F; fma.rn.bf16x2 $0, t, v, u;
            prmt.b32 t, $2, 0x43434343, 0x4342; and.b32 u, t, 0xFF80FF80; or.b32 u, u, 0x80008000;
            and.b32 t, t, 0xFF7FFF7F; fma.rn.bf16x2 $1, t, v, u; }""",
            "=&r,=r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return eight_bits(code, FP8, ASM).to(KIND)
