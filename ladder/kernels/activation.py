"""Activations for prefill, between the library's matrix products."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import ACTIVATIONS, activated


@triton.jit
def _activate(x, out, width, stride, PAIR: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    y = activated(tl.load(x + row * stride + i, mask=here, other=0.0).to(tl.float32), ACT)
    if PAIR:
        y *= tl.load(x + row * stride + width + i, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, y.to(out.dtype.element_ty), mask=here)


def activate_rows(x: Tensor, activation: str, pair: bool) -> Tensor:
    """activation(x) of every row; of a `pair`, activation(gate) * up for rows x = (gate, up). Rows may be parts of
    longer ones.
    """
    rows, width = x.shape[0], x.shape[1] // (1 + pair)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _activate[(rows, -(-width // 1024))](
        x, out, width, x.stride(0), PAIR=pair, ACT=ACTIVATIONS[activation], BLOCK=1024, num_warps=4
    )
    return out
