"""A row of activations times integer codes, in integers.

Of each group of inputs the row becomes fixed-point numbers, whose digits have eight bits as the codes have:

    x[i] = step q[i] + rounding,   q[i] = d0[i] + 256 d1[i] (+ 65536 d2[i]),   step = max |x| / (the largest such q)
    sum_i code[i] x[i] = step (sum_i code[i] d0[i] + 256 sum_i code[i] d1[i] + ...)

One instruction multiplies four codes by four digits and adds the products up, so no code becomes a number of its own.
Two digits round x by 2^-16 of its group's largest number, far less than bfloat16 rounds a result; float32 has three.
"""

import torch

from ladder.jit import tl, triton
from ladder.kernels.quantized.codes import CHUNK
from ladder.layers.weight import RUN

INPUTS = 128  # that share a step where a row's scale is one
assert RUN == CHUNK  # of 4 bits a chunk's low halves are neighbouring inputs, and so are its high halves


def digits(dtype: torch.dtype) -> int:
    """How many digits a row of this type becomes."""
    return 3 if dtype is torch.float32 else 2


@triton.jit
def four_products(codes, digits, more, ASM: tl.constexpr):
    """more + the sum of the products of four signed bytes in words."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, digits, more], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            up: tl.constexpr = 24 - 8 * byte
            more += ((codes << up) >> 24) * ((digits << up) >> 24)
        return more


@triton.jit
def _magnitude(x):
    """|x| as an integer: they have the same order, and what is not finite is more than all that is."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def row_steps(x, high, STEP: tl.constexpr, DIGITS: tl.constexpr):
    """The step of each chunk of a row, [DEEP, LANES]: that of its group of STEP chunks. Of a group with anything that
    is not finite it is NaN: no digit can say that.
    """
    deep: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1]
    # 0x7F7F; 0x7F7F7F, less what the division may add
    most: tl.constexpr = 32639.0 if DIGITS == 2 else 8355000.0
    largest = tl.max(tl.maximum(_magnitude(x), _magnitude(high)), axis=2)
    if STEP > 1:
        largest = tl.max(largest.reshape(deep, lanes // STEP, STEP), axis=2, keep_dims=True)
        largest = tl.broadcast_to(largest, [deep, lanes // STEP, STEP]).reshape(deep, lanes)
    step = tl.maximum(largest.to(tl.float32, bitcast=True), 1e-30) / most
    return tl.where(largest < 0x7F800000, step, float("nan"))


@triton.jit
def _word(q, DIGIT: tl.constexpr, DIGITS: tl.constexpr):
    """A digit of four neighbouring numbers in the bytes of a word."""
    places = 8 * tl.arange(0, 4)[None, None, None, :]
    found = tl.sum(((q >> (8 * DIGIT)) & 255) << places, axis=3)
    if DIGIT < DIGITS - 1:  # all but the last have 128 added
        found = found ^ -2139062144  # 0x80808080
    return found


@triton.jit
def _two_words(q):
    """Both digits of four neighbouring numbers, each digit's bytes in the first one's place, zeros in the others'. A
    thread has all four, one after the other.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t, u; prmt.b32 t, $8, $9, 0x5140; prmt.b32 u, $10, $11, 0x5140;
        prmt.b32 $0, t, u, 0x5410; xor.b32 $0, $0, 0x80808080; prmt.b32 $4, t, u, 0x7632;
        mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0; }""",
        "=&r,=r,=r,=r,=&r,=r,=r,=r,r,r,r,r",
        [q],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def row_digits(x, step, DIGITS: tl.constexpr, ASM: tl.constexpr):
    """[DEEP, LANES, 16] in whole steps: three digits (the third may be none of its own), [DEEP, LANES, 4] words; and
    how many steps each chunk's are together, [DEEP, LANES]. Zeros where the step is NaN.
    """
    deep: tl.constexpr = x.shape[0]
    lanes: tl.constexpr = x.shape[1]
    each = tl.where(step == step, 1.0 / step, 0.0)[:, :, None]
    whole = tl.where((step == step)[:, :, None], x, 0.0) * each
    if DIGITS == 2:  # + 3 * 2^22, which has them, rounded, as its lowest bits; + 128, for the second digit's sake
        q = (whole + 12583040.0).to(tl.int32, bitcast=True)
        total = tl.sum(q - 0x4B400080, axis=2)
    else:
        q = tl.floor(whole + 0.5).to(tl.int32)
        total = tl.sum(q, axis=2)
        q += 32896  # 0x8080
    q = q.reshape(deep, lanes, 4, 4)
    if DIGITS == 2 and ASM:
        first, second = _two_words(q)
        first, second = tl.sum(first, axis=3), tl.sum(second, axis=3)
    else:
        first, second = _word(q, 0, DIGITS), _word(q, 1, DIGITS)
    # joined, both go to the threads that need them at once
    first, second = tl.join(first, second).split()
    third = first
    if DIGITS == 3:
        third = _word(q, 2, DIGITS)
    return first, second, third, total


@triton.jit
def chunk_sums(codes, l0, l1, h0, h1, BITS: tl.constexpr):
    """Codes times two digits, added up over each chunk's four words: the sum in the first one's place, zeros in the
    others'. A thread has all four, one after the other.
    """
    if BITS == 4:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b; mov.b32 a, 0; mov.b32 b, 0;
            and.b32 t, $4, 0x0F0F0F0F; dp4a.s32.s32 a, t, $8, a; dp4a.s32.s32 b, t, $12, b;
            shr.b32 t, $4, 4; and.b32 t, t, 0x0F0F0F0F; dp4a.s32.s32 a, t, $16, a; dp4a.s32.s32 b, t, $20, b;
            and.b32 t, $5, 0x0F0F0F0F; dp4a.s32.s32 a, t, $9, a; dp4a.s32.s32 b, t, $13, b;
            shr.b32 t, $5, 4; and.b32 t, t, 0x0F0F0F0F; dp4a.s32.s32 a, t, $17, a; dp4a.s32.s32 b, t, $21, b;
            and.b32 t, $6, 0x0F0F0F0F; dp4a.s32.s32 a, t, $10, a; dp4a.s32.s32 b, t, $14, b;
            shr.b32 t, $6, 4; and.b32 t, t, 0x0F0F0F0F; dp4a.s32.s32 a, t, $18, a; dp4a.s32.s32 b, t, $22, b;
            and.b32 t, $7, 0x0F0F0F0F; dp4a.s32.s32 a, t, $11, a; dp4a.s32.s32 b, t, $15, b;
            shr.b32 t, $7, 4; and.b32 t, t, 0x0F0F0F0F; dp4a.s32.s32 a, t, $19, a; dp4a.s32.s32 b, t, $23, b;
            shl.b32 b, b, 8; add.s32 $0, a, b; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [codes, l0, l1, h0, h1],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; mov.b32 a, 0; mov.b32 b, 0;
            dp4a.s32.s32 a, $4, $8, a; dp4a.s32.s32 b, $4, $12, b; dp4a.s32.s32 a, $5, $9, a;
            dp4a.s32.s32 b, $5, $13, b; dp4a.s32.s32 a, $6, $10, a; dp4a.s32.s32 b, $6, $14, b;
            dp4a.s32.s32 a, $7, $11, a; dp4a.s32.s32 b, $7, $15, b;
            shl.b32 b, b, 8; add.s32 $0, a, b; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [codes, l0, l1],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )


@triton.jit
def chunk_products(codes, digits, BITS: tl.constexpr, DIGITS: tl.constexpr, ASM: tl.constexpr, WHOLE: tl.constexpr):
    """Codes [DEEP, rows, LANES, 4 words] times the digits of x: each chunk's whole steps, [DEEP, rows, LANES].

    ASM: in the GPU's own instructions. WHOLE: a thread has all words of a chunk, one after the other.
    """
    l0, l1, l2, h0, h1, h2 = digits
    l0, l1, l2 = l0[:, None, :, :], l1[:, None, :, :], l2[:, None, :, :]
    h0, h1, h2 = h0[:, None, :, :], h1[:, None, :, :], h2[:, None, :, :]
    if ASM and WHOLE and DIGITS == 2:
        return tl.sum(chunk_sums(codes, l0, l1, h0, h1, BITS), axis=3).to(tl.float32)
    else:
        none = tl.zeros(codes.shape, tl.int32)
        low, high = codes, codes
        if BITS == 4:
            low, high = codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
        first = four_products(low, l0, none, ASM)
        found = four_products(low, l1, none, ASM)
        if BITS == 4:
            first, found = four_products(high, h0, first, ASM), four_products(high, h1, found, ASM)
        if DIGITS == 2:
            return tl.sum(first + (found << 8), axis=3).to(tl.float32)
        else:  # all at once they may not fit into 32 bits
            third = four_products(low, l2, none, ASM)
            if BITS == 4:
                third = four_products(high, h2, third, ASM)
            upper = tl.sum(found + (third << 8), axis=3).to(tl.float32)
            return upper * 256.0 + tl.sum(first, axis=3).to(tl.float32)
