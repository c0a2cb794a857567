"""The argmax of this rank's block of the logits; the greedy choice from every rank's."""

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


@triton.jit
def _choose(best, chosen, tokens, positions, slots, last, SIZE: tl.constexpr, SP: tl.constexpr, PDL: tl.constexpr):
    b = tl.program_id(0)
    rank = tl.arange(0, SP)
    inside = rank < SIZE
    wait_for_others(PDL)
    values = tl.load(best + (b * SIZE + rank) * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(best + (b * SIZE + rank) * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
    odd = tl.sum((values != values).to(tl.int32), axis=0)
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    first = tl.min(tl.where(values == top, rank, SP), axis=0)
    token = tl.sum(tl.where(rank == first, ids, 0.0), axis=0).to(tl.int64)
    finite = (odd == 0) & (top > float("-inf")) & (top < float("inf"))
    tl.store(chosen + b, tl.where(finite, token, -1))
    tl.store(tokens + b, tl.where(finite, token, 0))
    tl.store(last + tl.load(slots + b), tl.where(finite, token, 0))
    tl.store(positions + b, tl.load(positions + b) + 1)


def choose(best: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor, pdl: bool) -> Tensor:
    """The greedy choice [batch] from every rank's argmax, [batch, 2 x ranks]; -1 where it is not finite.

    `tokens` and `positions` become those of the next step, and the tokens go to the `slots` [batch] of `last`, too.
    """
    chosen = torch.empty_like(tokens)
    size = best.shape[1] // 2
    _choose[(len(best),)](
        best, chosen, tokens, positions, slots, last, SIZE=size, SP=triton.next_power_of_2(size), PDL=pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip
    return chosen


def choose_reference(best: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor) -> Tensor:
    values, ids = best[:, 0::2], best[:, 1::2]
    rank = values.argmax(dim=1, keepdim=True)  # NaN wins, and of equals the first
    finite = values.gather(1, rank)[:, 0].isfinite()
    token = ids.gather(1, rank)[:, 0].long()
    tokens.copy_(token.where(finite, 0))
    last[slots] = tokens
    positions.add_(1)
    return token.where(finite, -1)
