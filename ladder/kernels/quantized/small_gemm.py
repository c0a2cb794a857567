"""A few rows of activations times a quantized weight.

The columns of a tile are cut into slices, one for each warp, which multiplies all of the tile's rows by them, so a code
becomes a number in one thread only; at the end the slices' results are added up.

A tensor core wants of 32 columns two groups of four from each of four neighbouring threads, in whatever order the
weight and the activations agree upon. Here a thread has up to 16 bytes of codes that follow each other, which it reads
from shared memory at once, and of the activations what belongs to them.
"""

from ladder.jit import tl, triton
from ladder.kernels.device import let_others_start, product, wait_for_others, write_products
from ladder.kernels.quantized.codes import zero_points
from ladder.kernels.quantized.operand import eight, four_bits


@triton.jit
def _in_order(numbers, WORDS: tl.constexpr):
    """[slices, rows, bytes], a number of each byte, in the product's order, in which four neighbouring threads have
    WORDS words of codes each, one thread's behind another's.
    """
    slices: tl.constexpr = numbers.shape[0]
    rows: tl.constexpr = numbers.shape[1]
    width: tl.constexpr = numbers.shape[2]
    if WORDS == 1:
        return numbers
    else:  # a product's group of four has halves of two words
        found = numbers.reshape(slices, rows, width // (16 * WORDS), 4, WORDS // 2, 2, 2, 2)
        return found.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(slices, rows, width)


@triton.jit
def _times(numbers, xs, y, WORDS: tl.constexpr, IEEE: tl.constexpr):
    """y + numbers xs^T, [slices, rows of the weight, of x]; xs [slices * rows of x, bytes]"""
    xs = xs.reshape(y.shape[0], y.shape[2], xs.shape[1])
    return product(_in_order(numbers, WORDS), _in_order(xs, WORDS).permute(0, 2, 1), y, IEEE)


@triton.jit
def _added_up(y):
    """[slices, ...] over the slices: of two halves, which the same threads have, and so on."""
    if y.shape[0] == 1:
        return y.reshape(y.shape[1], y.shape[2])
    else:
        one, other = y.reshape(2, y.shape[0] // 2, y.shape[1], y.shape[2]).permute(1, 2, 3, 0).split()
        return _added_up(one + other)


@triton.jit
def quantized_small_gemm(x, weight, scales, zeros, bias, plus, out, scale, alpha, M, N, K: tl.constexpr,
                         MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
                         PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, PLUS: tl.constexpr,
                         ALPHA: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
                         BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FP8: tl.constexpr,
                         ASM: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """`small_gemm` of bytes of codes, MB rows of x. BK: columns of a slice, all of one group."""
    packed: tl.constexpr = 8 // BITS  # codes in a byte
    width: tl.constexpr = BK // packed  # bytes of a row in a slice
    words: tl.constexpr = min(4, width // 16)  # 32-bit words of codes that a thread has at once
    depth: tl.constexpr = K // SPLITS
    groups: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    tile = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * depth
    outputs: tl.constexpr = BN // 2 if PAIR else BN
    # one slice's rows behind another's; of a pair the first half of them has those of the gate
    j = tl.arange(0, SLICES * BN)
    r = tile * outputs + j % outputs
    here = (r < N)[:, None]
    byte = (j // BN * width)[:, None] + tl.arange(0, width)[None, :]
    line = (r + j % BN // outputs * N).to(tl.int64)[:, None]
    codes = weight + line * (K // packed) + split * (depth // packed) + byte
    m = tl.arange(0, SLICES * MB)[:, None]
    low = tl.arange(0, width)[None, :]
    column = m // MB * BK + low + low // RUN * (RUN * (packed - 1))
    m = tl.program_id(2) * MB + m % MB
    lines = x + m * K + begin + column
    live = m < M
    # [rows, slices]: scales and zeros of a row's groups follow each other
    j = tl.arange(0, BN)[:, None]
    r = tile * outputs + j % outputs
    own = (r + j // outputs * N).to(tl.int64) * groups
    piece = tl.arange(0, SLICES)[None, :]
    y = tl.zeros([SLICES, BN, MB], tl.float32)
    wait_for_others(PDL)
    let_others_start(PDL)
    for at in tl.range(0, depth, SLICES * BK, num_stages=STAGES):
        inside = here
        known = live
        known_high = live
        exists = r < N
        if depth % (SLICES * BK) != 0:
            inside = here & (at + byte * packed < depth)
            known = live & (at + column < depth)
            known_high = live & (at + column + RUN < depth)
            exists = exists & (at + piece * BK < depth)
        code = tl.load(codes + at // packed, mask=inside, other=0)
        xs = tl.load(lines + at, mask=known, other=0.0)
        group = own
        if GROUP == BK:
            group = own + (begin + at) // GROUP + piece
        elif GROUP > 0:
            group = own + (begin + at + piece * BK) // GROUP
        some = y
        if GROUP > 0:
            some = tl.zeros(y.shape, tl.float32)
            factor = tl.load(scales + group, mask=exists, other=0.0).to(tl.float32).permute(1, 0)
        code = code.reshape(SLICES, BN, width)
        if BITS == 8:
            some = _times(eight(code, FP8, ASM, xs.dtype), xs, some, words, IEEE)
        else:
            high = tl.load(lines + at + RUN, mask=known_high, other=0.0)
            zero = zero_points(zeros, group, exists, ZEROS).permute(1, 0)[:, :, None]
            some = _times(four_bits(code, zero, 0, ASM, xs.dtype), xs, some, words, IEEE)
            some = _times(four_bits(code, zero, 1, ASM, xs.dtype), high, some, words, IEEE)
        if GROUP > 0:
            y += some * factor[:, :, None]
        else:
            y = some
    total = _added_up(y)
    if GROUP == 0:
        total = total * tl.load(scales + own, mask=r < N, other=0.0).to(tl.float32)
    write_products(
        total, bias, plus, out, scale, alpha, tile, split, tl.program_id(2) * MB, M, N, PAIR, ACT, BIAS, PLUS, ALPHA
    )
