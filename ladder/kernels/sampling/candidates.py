"""Draws from a vocabulary of which every rank has a block: each rank gives candidates, and all ranks take the best.

A sample of softmax(x / T) is the token with the largest

    -y_i / T - log(e_i),    y_i = max(x) - x_i,    e_i exponential random numbers of (seed, position, i)

(see sample.py), and the largest of all is the largest of the ranks' largest. The maximum of x over all ranks is known
from their argmaxes. With it min-p can be applied, too: it keeps the tokens with y_i <= -T log(min-p). So a score is
what it would be on a single rank, and so is the sample.
"""

import math

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.sampling.random import exponential_reference, exponentials
from ladder.kernels.sampling.sample import BLOCK, CANDIDATES, COLUMNS, REPETITION, TILES


@triton.jit
def _candidates(logits, best, settings, seeds, slots, positions, chosen, out, step, first, count, SIZE: tl.constexpr,
                SP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    own = settings + slot * COLUMNS
    if (tl.load(own) != 3.0) | (tl.load(chosen + b) < 0):
        return
    rank = tl.arange(0, SP)
    top = tl.max(tl.load(best + (b * SIZE + rank) * 2, mask=rank < SIZE, other=float("-inf")), axis=0)
    temperature = tl.load(own + 1)
    min_p = tl.load(own + 4)
    bound = tl.full([], float("inf"), tl.float32)
    if min_p > 0.0:
        bound = -temperature * tl.log(min_p)
    seed = tl.load(seeds + slot)
    position = tl.load(positions + b).to(tl.int32)
    x = logits + b.to(tl.int64) * step
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.full([BLOCK], 2147483647, tl.int32)
    for tile in tl.static_range(TILES):
        begin = first // 4 * 4 + (part * TILES + tile) * BLOCK  # random numbers are made for four tokens at once
        here = begin + tl.arange(0, BLOCK)
        inside = (here >= first) & (here < first + count)
        y = top - tl.load(x + (here - first), mask=inside, other=float("-inf")).to(tl.float32)
        score = -y / temperature - tl.log(exponentials(seed, position, begin, BLOCK // 4))
        score = tl.where((y <= bound) & (y < float("inf")), score, float("-inf"))
        which = tl.where(score > highest, here, which)  # the first of equals stays
        highest = tl.maximum(highest, score)
    most = tl.max(highest, axis=0)
    out += (b * tl.num_programs(0) + part) * 2
    tl.store(out, most)
    tl.store(out + 1, tl.min(tl.where(highest == most, which, 2147483647), axis=0).to(tl.float32))


def candidates(
    logits: Tensor,
    best: Tensor,
    params: Tensor,
    seeds: Tensor,
    slots: Tensor,
    positions: Tensor,
    chosen: Tensor,
    first: int,
    count: int,
) -> Tensor:
    """[batch, 2 x parts]: the score and the number of the best token in each part of this rank's block, of every
    sequence whose mode is CANDIDATES. A score of -inf: there is none. The block are the first `count` of `logits`
    [batch, step], tokens `first` and following; there are as many parts on all ranks.

    `best` [batch, 2 x ranks]: every rank's argmax; `chosen` [batch]: the greedy choice from them, -1 where it is not
    finite, and then there is nothing to draw. For the others, see `sample`.
    """
    parts, size = triton.cdiv(logits.shape[1] + 3, BLOCK * TILES), best.shape[1] // 2
    out = torch.empty(len(logits), 2 * parts, device=logits.device)
    _candidates[(parts, len(logits))](
        logits, best, params, seeds, slots, positions, chosen, out, logits.stride(0), first, count, SIZE=size,
        SP=triton.next_power_of_2(size), COLUMNS=COLUMNS, BLOCK=BLOCK, TILES=TILES, num_warps=4,
    )  # fmt: skip
    return out


def candidates_reference(
    logits: Tensor,
    best: Tensor,
    params: Tensor,
    seeds: Tensor,
    slots: Tensor,
    positions: Tensor,
    chosen: Tensor,
    first: int,
    count: int,
) -> Tensor:
    """The same with torch, one sequence after the other, and one part."""
    out = torch.tensor([float("-inf"), float(first)], device=logits.device).repeat(len(logits), 1)
    for b, slot in enumerate(slots.tolist()):
        mode, temperature, _, _, min_p = params[slot, :REPETITION].tolist()
        if mode != CANDIDATES or chosen[b] < 0:
            continue
        y = best[b, 0::2].max() - logits[b, :count].float()
        bound = -temperature * math.log(min_p) if min_p > 0 else float("inf")
        kept = ((y <= bound) & y.isfinite()).nonzero()[:, 0]
        if len(kept):
            noise = exponential_reference(int(seeds[slot]), int(positions[b]), first + kept)
            score, winner = (-y[kept] / temperature - noise.log()).max(dim=0)
            out[b] = torch.stack((score, (first + kept[winner]).float()))
    return out


@triton.jit
def _choose_candidate(found, settings, slots, chosen, tokens, last, COUNT: tl.constexpr, CP: tl.constexpr,
                      COLUMNS: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    if (tl.load(settings + slot * COLUMNS) != 3.0) | (tl.load(chosen + b) < 0):
        return
    i = tl.arange(0, CP)
    scores = tl.load(found + (b * COUNT + i) * 2, mask=i < COUNT, other=float("-inf"))
    ids = tl.load(found + (b * COUNT + i) * 2 + 1, mask=i < COUNT, other=0.0)
    winner = tl.min(tl.where(scores == tl.max(scores, axis=0), i, CP), axis=0)
    token = tl.sum(tl.where(i == winner, ids, 0.0), axis=0).to(tl.int64)
    tl.store(chosen + b, token)
    tl.store(tokens + b, token)
    tl.store(last + slot, token)


def choose_candidate(
    found: Tensor, params: Tensor, slots: Tensor, chosen: Tensor, tokens: Tensor, last: Tensor
) -> None:
    """The best of all ranks' candidates [batch, 2 x candidates], the first of equals, of every sequence whose mode is
    CANDIDATES: into `chosen` [batch], unless -1 is there, `tokens` [batch] and `last` [slots].
    """
    count = found.shape[1] // 2
    _choose_candidate[(len(found),)](
        found, params, slots, chosen, tokens, last, COUNT=count, CP=triton.next_power_of_2(count), COLUMNS=COLUMNS,
        num_warps=1,
    )  # fmt: skip


def choose_candidate_reference(
    found: Tensor, params: Tensor, slots: Tensor, chosen: Tensor, tokens: Tensor, last: Tensor
) -> None:
    token = found[:, 1::2].gather(1, found[:, 0::2].argmax(dim=1, keepdim=True))[:, 0].long()
    drawn = (params[slots, 0] == CANDIDATES) & (chosen >= 0)
    chosen.copy_(token.where(drawn, chosen))
    tokens.copy_(token.where(drawn, tokens))
    last[slots] = tokens
