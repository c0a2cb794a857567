"""The argmax of this rank's block of the logits."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.device import wait_for_others


@triton.jit
def _argmax(logits, out, step, first, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    odd = tl.zeros([BLOCK], tl.int32)
    wait_for_others(PDL)
    for begin in tl.range(0, count, BLOCK, num_stages=3):
        here = begin + i
        x = tl.load(logits + b.to(tl.int64) * step + here, mask=here < count, other=float("-inf"), cache_modifier=".cg")
        x = x.to(tl.float32)
        odd += (x != x).to(tl.int32)
        at = tl.where(x > top, here, at)  # the first of equals stays
        top = tl.maximum(top, x)
    highest = tl.max(top, axis=0)
    index = tl.min(tl.where(top == highest, at, 2147483647), axis=0)
    value = tl.where(tl.sum(odd, axis=0) > 0, float("nan"), highest)
    tl.store(out + b * 2, value)
    tl.store(out + b * 2 + 1, (index + first).to(tl.float32))


def argmax(logits: Tensor, first: int, count: int, pdl: bool) -> Tensor:
    """[batch, 2]: max_i logits[i] over the first `count`, NaN if one of them is, and first + the lowest such i.

    Numbers of tokens are whole in float32 up to 2^24, the largest vocabulary there may be.
    """
    out = torch.empty(len(logits), 2, device=logits.device)
    _argmax[(len(logits),)](
        logits, out, logits.shape[1], first, count, BLOCK=4096, PDL=pdl, num_warps=8, launch_pdl=pdl
    )
    return out


def argmax_reference(logits: Tensor, first: int, count: int) -> Tensor:
    if not count:
        return torch.tensor([[float("-inf"), float(first)]], device=logits.device).repeat(len(logits), 1)
    value, index = logits[:, :count].float().max(dim=-1)
    return torch.stack((value, (index + first).float()), dim=-1)
