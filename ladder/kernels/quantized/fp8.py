"""Many rows of activations times fp8 weights, both operands in fp8 (e4m3), added up in float32.

Of each row x, or of each group of its inputs where the weights' groups have scales of their own:

    s = max |x| / 448,   q[i] = x[i] / s, rounded to e4m3
    y[o] = sum_g s[g] scale[o, g] sum_{i in g} q[i] code[o, i]

A group with anything that is not finite has the scale NaN, and so has its row's result. Products with one scale for a
row are the library's, those of groups are ours.
"""

import torch
from torch import Tensor

from ladder.config.quantization import FP8_GROUP as GROUP
from ladder.jit import tl, triton
from ladder.kernels.device import cached
from ladder.kernels.table import MOST
from ladder.layers.weight import Packed

WORD = 16  # the library's products are of whole words of so many bytes
TOGETHER = 2048  # inputs of groups that a program quantizes
NEAR = 8  # tiles of rows whose programs follow each other: they read the same weights from the cache
ROWS, COLUMNS, STAGES = 128, 128, 4  # of a tile of the result; tiles of both operands that are under way
SCALES = 8 * 1024  # bytes of shared memory that are left for the scales


def takes_fp8(x: Tensor, weight: Packed) -> bool:
    """Whether the product of these rows is one of fp8 numbers, on a chip that has those. Few rows stay as they are:
    their time is that of reading the weights.
    """
    if not weight.activations or x.dtype is not torch.bfloat16 or len(x) <= MOST:
        return False
    outputs, inputs = weight.codes.shape
    if weight.scales.shape[1] == 1:
        return outputs % WORD == 0 and inputs % WORD == 0
    return weight.group == GROUP


@triton.jit
def _quantize_rows(x, codes, scales, STRIDE, M, K, GROUP: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr):
    """GROUP: inputs of a group, BG groups by BK inputs to a program; 0: the whole row is one."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BG + tl.arange(0, BG)[:, None]
    at = group * GROUP + tl.arange(0, BK)[None, :]
    value = tl.load(x + row * STRIDE + at, mask=at < K, other=0.0).to(tl.float32)
    # as integers they have the same order, and what is not finite is more than all that is
    largest = tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    finite = largest < 0x7F800000
    most = tl.where(finite, tl.maximum(largest.to(tl.float32, bitcast=True), 1e-30), 448.0)  # zeros stay zeros
    code = tl.where(finite, value, 0.0) * tl.div_rn(448.0, most)
    tl.store(codes + row * K + at, cached(code, tl.float8e4nv).to(tl.float8e4nv), mask=at < K)
    scale = tl.where(finite, tl.div_rn(most, 448.0), float("nan"))
    tl.store(scales + group.to(tl.int64) * M + row, scale, mask=group * GROUP < K)


def quantize_rows(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Codes [rows, inputs], and scales of float32, [groups, rows]. `group`: inputs that share a scale; 0: all."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    groups = -(-inputs // group) if group else 1
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    width = group or triton.next_power_of_2(inputs)
    many = max(1, TOGETHER // group) if group else 1
    warps = min(32, max(1, many * width // 1024))
    _quantize_rows[(rows, -(-groups // many))](
        x, codes, scales, x.stride(0), rows, inputs, GROUP=group, BG=many, BK=width, num_warps=warps
    )
    return codes, scales


@triton.jit
def _product_of_groups(x, weight, xs, ws, out, M, N, K, GROUPS, EVEN: tl.constexpr, ALIKE: tl.constexpr,
                       BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NEAR: tl.constexpr,
                       STAGES: tl.constexpr):  # fmt: skip
    """A tile of the result: of each group the sum of the codes' products, times the scales of row and output. EVEN:
    all groups are whole; ALIKE: the tile's outputs share a scale.
    """
    tile = tl.program_id(0)
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (NEAR * across) * NEAR
    high = tl.minimum(down - first, NEAR)
    m = (first + tile % (NEAR * across) % high) * BM + tl.arange(0, BM)
    begin = tile % (NEAR * across) // high * BN
    n = begin + tl.arange(0, BN)
    # beyond the last row, and the last output, that one is read again, and not written
    row, output = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BK)
    lines, columns = x + row[:, None] * K + k[None, :], weight + output[None, :] * K + k[:, None]
    y = tl.zeros([BM, BN], tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        if EVEN:
            a, b = tl.load(lines + group * BK), tl.load(columns + group * BK)
        else:
            inside = group * BK + k < K
            a = tl.load(lines + group * BK, mask=inside[None, :], other=0.0)
            b = tl.load(columns + group * BK, mask=inside[:, None], other=0.0)
        scale = tl.load(xs + group * M + row)
        if ALIKE:
            y += tl.dot(a, b) * (scale * tl.load(ws + begin.to(tl.int64) * GROUPS + group))[:, None]
        else:
            y += tl.dot(a, b) * (scale[:, None] * tl.load(ws + output * GROUPS + group)[None, :])
    there = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + there, y.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _stages(rows: int, device: torch.device) -> int:
    """As many as fit into shared memory, beside what the scales take."""
    if device.type != "cuda":
        return STAGES
    chip = torch.cuda.get_device_properties(device)
    room: int = getattr(chip, "shared_memory_per_block_optin", chip.shared_memory_per_block) - SCALES
    return max(2, min(STAGES, room // ((rows + COLUMNS) * GROUP)))


def fp8_product(x: Tensor, weight: Packed, out: Tensor | None = None) -> Tensor:
    """x W^T, [rows, outputs], in x's dtype."""
    (rows, inputs), outputs = x.shape, len(weight.codes)
    groups = weight.scales.shape[1]
    codes, scales = quantize_rows(x, GROUP if groups > 1 else 0)
    out = x.new_empty(rows, outputs) if out is None else out
    if groups == 1:
        of_rows, of_outputs = scales.view(rows, 1), weight.scales.view(1, outputs)
        # not the fast sums: those are kept in the tensor cores, in far fewer bits than float32 has
        return torch._scaled_mm(
            codes, weight.codes.t(), of_rows, of_outputs, out_dtype=x.dtype, use_fast_accum=False, out=out
        )
    high = ROWS if rows > ROWS else ROWS // 2
    _product_of_groups[(-(-rows // high) * -(-outputs // COLUMNS),)](
        codes, weight.codes, scales, weight.scales, out, rows, outputs, inputs, groups, EVEN=inputs % GROUP == 0,
        ALIKE=weight.rows % COLUMNS == 0, BM=high, BN=COLUMNS, BK=GROUP, NEAR=NEAR, STAGES=_stages(high, x.device),
        num_warps=8 if high == ROWS else 4,
    )  # fmt: skip
    return out
