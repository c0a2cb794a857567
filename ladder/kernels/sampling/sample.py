"""Draws the next token of every sequence: temperature, min-p, top-k and top-p, without sorting the vocabulary.

With the distance y_i = max(x) - x_i of a logit from the largest, a filter keeps the tokens with y_i <= t. The t of
top-k and top-p is searched for: every round counts the tokens, or adds up their masses exp(-y_i / T), below PIVOTS
values between a t that is too small and one that is large enough, until there is one token between them. Of what is
kept, the token with the largest

    -y_i / T - log(e_i),    e_i exponential random numbers of (seed, position, i),

is a sample of softmax(x / T) (Gumbel's trick). So the best of all tokens comes first: where it is one of those that
top-k and top-p keep, it is the sample and nothing is searched for. Masses are whole numbers, so that the order of
additions, and with it the number of programs and of sequences, changes no result. Tokens that are equally likely are
kept or dropped together.

Every pass over the logits is a kernel of many programs, of which the one that ends last decides what comes next.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.sampling.random import exponential_reference, exponentials

PIVOTS = 8
ROUNDS = 8  # of a search: distances are told apart to one part in 8^8
UNIT = 2.0**28  # the mass of the likeliest token
REACH = 19.5  # tokens further than that from the likeliest, in temperatures, have no mass: exp(-19.5) UNIT < 1
BLOCK, TILES = 512, 8  # a program has so many tokens, in so many tiles: a sum of TILES masses is less than 2^32
# columns of a sequence's parameters
# modes: the choice that was made stands; the likeliest of these logits; a sample; one from every rank's candidates
SKIP, ARGMAX, DRAW, CANDIDATES = range(4)
MODE, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, COLUMNS = range(9)
KERNELS = 4 + 2 * ROUNDS  # the first, the rounds of two searches, the draw, whether it is kept, the second draw


@dataclass(frozen=True)
class Scratch:
    """Where programs leave what they found, for up to `batch` sequences."""

    sums: Tensor  # [batch, kernels, pivots + 1] int64: tokens or masses, and how many programs have ended
    state: Tensor  # [batch, 8] float64: largest logit, how far is kept, the search's brackets, what is within them, ...
    found: Tensor  # [batch, programs, 2] float32

    @classmethod
    def of(cls, batch: int, vocab: int, device: torch.device) -> "Scratch":
        return cls(
            torch.zeros(batch, KERNELS, PIVOTS + 1, dtype=torch.int64, device=device),
            torch.zeros(batch, 8, dtype=torch.float64, device=device),
            torch.zeros(batch, -(-vocab // (BLOCK * TILES)), 2, device=device),
        )


@triton.jit
def _is_last(sums, PIVOTS: tl.constexpr):
    """Whether all other programs of this sequence have ended: what they wrote can be read."""
    tl.debug_barrier()
    return tl.atomic_add(sums + PIVOTS, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _begin(logits, settings, slots, sums, state, found, step, count, COLUMNS: tl.constexpr, KERNELS: tl.constexpr,
           PIVOTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The largest logit, and how far from it tokens are kept by min-p. Nothing is drawn yet."""
    part = tl.program_id(0)
    b = tl.program_id(1)
    own = settings + tl.load(slots + b) * COLUMNS
    if tl.load(own) == 0.0:
        return
    x = logits + b.to(tl.int64) * step
    state += b * 8
    found += b * tl.num_programs(0) * 2
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for tile in tl.static_range(TILES):
        here = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(x + here, mask=here < count, other=float("-inf"))
        z = tl.where(z == z, z, float("inf"))  # not a number: as bad as infinite
        most = tl.maximum(most, z)
        least = tl.minimum(least, tl.where(z > float("-inf"), z, float("inf")))
    tl.store(found + part * 2, tl.max(most, axis=0))
    tl.store(found + part * 2 + 1, tl.min(least, axis=0))
    if _is_last(sums + b * KERNELS * (PIVOTS + 1), PIVOTS):
        r = tl.arange(0, PARTS)
        inside = r < tl.num_programs(0)
        top = tl.max(tl.load(found + r * 2, mask=inside, other=float("-inf"), cache_modifier=".cg"), axis=0)
        bottom = tl.min(tl.load(found + r * 2 + 1, mask=inside, other=float("inf"), cache_modifier=".cg"), axis=0)
        min_p = tl.load(own + 4)
        bound = top - bottom
        if min_p > 0.0:
            bound = tl.minimum(bound, -tl.load(own + 1) * tl.log(min_p))
        tl.store(state, top.to(tl.float64))
        tl.store(state + 1, bound.to(tl.float64))
        tl.store(state + 5, tl.full([], 0.0, tl.float64))


@triton.jit
def _check(logits, settings, slots, sums, state, step, count, KERNEL: tl.constexpr, COLUMNS: tl.constexpr,
           KERNELS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Whether top-k and top-p keep what was drawn: fewer than k tokens, and less than top-p of the mass, are nearer."""
    part = tl.program_id(0)
    b = tl.program_id(1)
    own = settings + tl.load(slots + b) * COLUMNS
    state += b * 8
    top = tl.load(state).to(tl.float32)
    if (tl.load(own) != 2.0) | (top == float("inf")) | (top == float("-inf")):
        return
    temperature = tl.load(own + 1)
    k = tl.load(own + 2)
    top_p = tl.load(own + 3)
    rate = -1.4426950408889634 / temperature
    whole = tl.minimum(tl.load(state + 1).to(tl.float32), 19.5 * temperature)
    drawn = tl.load(state + 4).to(tl.float32)
    x = logits + b.to(tl.int64) * step
    tokens = tl.zeros([BLOCK], tl.uint32)
    nearer = tl.zeros([BLOCK], tl.uint32)
    within = tl.zeros([BLOCK], tl.uint32)
    for tile in tl.static_range(TILES):
        here = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        y = top - tl.load(x + here, mask=here < count, other=float("-inf"))
        m = tl.where(y <= whole, (tl.exp2(y * rate) * 268435456.0).to(tl.uint32), 0).to(tl.uint32)
        tokens += (y < drawn).to(tl.uint32)
        nearer += tl.where(y < drawn, m, 0).to(tl.uint32)
        within += m
    sums += (b * KERNELS + KERNEL) * (PIVOTS + 1)
    tl.atomic_add(sums, tl.sum(tokens.to(tl.int64), axis=0), sem="relaxed", scope="gpu")
    tl.atomic_add(sums + 1, tl.sum(nearer.to(tl.int64), axis=0), sem="relaxed", scope="gpu")
    tl.atomic_add(sums + 2, tl.sum(within.to(tl.int64), axis=0), sem="relaxed", scope="gpu")
    if _is_last(sums, PIVOTS):
        limited = (k > 0.0) & (k < count)
        kept = (limited == 0) | (tl.load(sums, cache_modifier=".cg").to(tl.float64) < k.to(tl.float64))
        nearer_mass = tl.load(sums + 1, cache_modifier=".cg")
        # with a top-k, the share is that of the tokens that it keeps: at least of those up to the one that was drawn
        own_mass = (tl.exp2(drawn * rate) * 268435456.0).to(tl.int64)
        mass = tl.where(limited, nearer_mass + own_mass, tl.load(sums + 2, cache_modifier=".cg"))
        need = tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
        kept = kept & ((top_p >= 1.0) | (nearer_mass < need))
        tl.store(state + 5, kept.to(tl.float64))


@triton.jit
def _round(logits, settings, slots, sums, state, step, count, number, ROUNDS: tl.constexpr, COLUMNS: tl.constexpr,
           KERNELS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
           COUNT: tl.constexpr):  # fmt: skip
    """One round of the search for the smallest distance within which there are k tokens (COUNT) or top-p of the mass.
    The state has: the largest logit, what is kept; from where to where the search goes, what is within these two, and
    what is needed.
    """
    part = tl.program_id(0)
    b = tl.program_id(1)
    state += b * 8
    if tl.load(state + 5) > 0.0:  # there is nothing to search for
        return
    own = settings + tl.load(slots + b) * COLUMNS
    temperature = tl.load(own + 1)
    k = tl.load(own + 2)
    top_p = tl.load(own + 3)
    top = tl.load(state).to(tl.float32)
    wanted = (tl.load(own) == 2.0) & (top > float("-inf")) & (top < float("inf"))
    wanted = wanted & (k > 0.0) & (k < count) if COUNT else wanted & (top_p < 1.0)
    begins = number == 0
    found = (number > 0) & (tl.load(state + 7) > 0.0)
    if found | (wanted == 0):
        return
    rate = -1.4426950408889634 / temperature  # exp(-y / T) is 2^(y rate)
    whole = tl.load(state + 1).to(tl.float32)
    whole = whole if COUNT else tl.minimum(whole, 19.5 * temperature)
    lo = tl.where(begins, -1.0, tl.load(state + 2).to(tl.float32))  # nothing is as near as -1
    hi = tl.where(begins, whole, tl.load(state + 3).to(tl.float32))
    below = tl.where(begins, 0.0, tl.load(state + 4)).to(tl.int64)
    need = tl.where(begins, k.to(tl.float64), tl.load(state + 6)).to(tl.int64)
    j = tl.arange(0, PIVOTS)
    near = tl.maximum(lo, 0.0)
    pivots = tl.where(j == PIVOTS - 1, hi, near + (hi - near) * ((j + 1.0) / PIVOTS))
    x = logits + b.to(tl.int64) * step
    some = tl.zeros([BLOCK, PIVOTS], tl.uint32)
    for tile in tl.static_range(TILES):
        here = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        y = top - tl.load(x + here, mask=here < count, other=float("-inf"))
        inside = y[:, None] <= pivots[None, :]
        if COUNT:
            some += inside.to(tl.uint32)
        else:
            m = (tl.exp2(y * rate) * 268435456.0).to(tl.uint32)
            some += tl.where(inside, m[:, None], 0).to(tl.uint32)
    sums += (b * KERNELS + 1 + number + (0 if COUNT else ROUNDS)) * (PIVOTS + 1)
    tl.atomic_add(sums + j, tl.sum(some.to(tl.int64), axis=0), sem="relaxed", scope="gpu")
    if _is_last(sums, PIVOTS):
        all = tl.load(sums + j, cache_modifier=".cg")
        if not COUNT:
            share = (tl.max(all, axis=0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            need = tl.where(begins, share, need)
        # where even the last pivot is not enough, everything within it is kept
        enough = (all >= need) | (j == PIVOTS - 1)
        upto = tl.min(tl.where(enough, all, 9223372036854775807), axis=0)
        below = tl.max(tl.where(enough, below, all), axis=0)
        lo = tl.max(tl.where(enough, lo, pivots), axis=0)
        hi = tl.min(tl.where(enough, pivots, hi), axis=0)
        one = tl.full([], 1, tl.int64)  # what a token within hi adds at least
        if not COUNT:
            one = tl.maximum((tl.exp2(hi * rate) * 268435456.0).to(tl.int64), 1)
        tl.store(state + 1, hi.to(tl.float64))
        tl.store(state + 2, lo.to(tl.float64))
        tl.store(state + 3, hi.to(tl.float64))
        tl.store(state + 4, below.to(tl.float64))
        tl.store(state + 6, need.to(tl.float64))
        tl.store(state + 7, (upto - below < 2 * one).to(tl.float64))


@triton.jit
def _draw(logits, settings, seeds, slots, positions, chosen, tokens, last, sums, state, found, step, count,
          KERNEL: tl.constexpr, COLUMNS: tl.constexpr, KERNELS: tl.constexpr, PIVOTS: tl.constexpr,
          BLOCK: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The best of what is kept, and its distance from the likeliest."""
    part = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    own = settings + slot * COLUMNS
    mode = tl.load(own)
    if (mode == 0.0) | (tl.load(state + b * 8 + 5) > 0.0):
        return
    temperature = tl.load(own + 1)
    seed = tl.load(seeds + slot)
    position = tl.load(positions + b).to(tl.int32)
    top = tl.load(state + b * 8).to(tl.float32)
    bound = tl.load(state + b * 8 + 1).to(tl.float32)
    finite = (top < float("inf")) & (top > float("-inf"))
    x = logits + b.to(tl.int64) * step
    found += b * tl.num_programs(0) * 2
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.full([BLOCK], 2147483647, tl.int32)
    if finite:
        for tile in tl.static_range(TILES):
            first = (part * TILES + tile) * BLOCK
            here = first + tl.arange(0, BLOCK)
            y = top - tl.load(x + here, mask=here < count, other=float("-inf"))
            score = -y
            if mode == 2.0:
                score = -y / temperature - tl.log(exponentials(seed, position, first, BLOCK // 4))
                score = tl.where(y <= bound, score, float("-inf"))
            score = tl.where(y < float("inf"), score, float("-inf"))
            which = tl.where(score > best, here, which)  # the first of equals stays
            best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    tl.store(found + part * 2, highest)
    tl.store(found + part * 2 + 1, tl.min(tl.where(best == highest, which, 2147483647), axis=0).to(tl.float32))
    if _is_last(sums + (b * KERNELS + KERNEL) * (PIVOTS + 1), PIVOTS):
        r = tl.arange(0, PARTS)
        inside = r < tl.num_programs(0)
        scores = tl.load(found + r * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
        ids = tl.load(found + r * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        winner = tl.min(tl.where(inside & (scores == tl.max(scores, axis=0)), r, PARTS), axis=0)
        token = tl.sum(tl.where(r == winner, ids, 0.0), axis=0).to(tl.int64)
        tl.store(chosen + b, tl.where(finite, token, -1))
        token = tl.where(finite, token, 0)
        tl.store(tokens + b, token)
        tl.store(last + slot, token)
        if finite:
            tl.store(state + b * 8 + 4, (top - tl.load(x + token)).to(tl.float64))
        tl.store(state + b * 8 + 5, (mode == 1.0).to(tl.float64))


def sample(
    logits: Tensor,
    params: Tensor,
    seeds: Tensor,
    slots: Tensor,
    positions: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    last: Tensor,
    scratch: Scratch | None,
    count: int,
    searches: tuple[bool, bool] = (True, True),
) -> None:
    """A token of every sequence whose mode is not SKIP, from the first `count` of its `logits` [batch, step], float32:
    into `chosen` [batch], -1 where they are not finite; into `tokens` [batch] and `last` [slots], 0 there.

    `params` [slots, COLUMNS] and `seeds` [slots] are those of `slots` [batch]; `positions` [batch]: the new tokens'.
    `searches`: whether some sequence has a top-k, and whether one has a top-p.
    """
    assert scratch is not None
    sums, state, found = scratch.sums, scratch.state, scratch.found
    batch, step = len(logits), logits.stride(0)
    grid = (triton.cdiv(count, BLOCK * TILES), batch)
    shape = {"COLUMNS": COLUMNS, "KERNELS": KERNELS, "PIVOTS": PIVOTS, "BLOCK": BLOCK, "TILES": TILES, "num_warps": 4}
    parts = triton.next_power_of_2(grid[0])
    sums[:batch].zero_()
    _begin[grid](logits, params, slots, sums, state, found, step, count, PARTS=parts, **shape)
    given = (logits, params, seeds, slots, positions, chosen, tokens, last, sums, state, found, step, count)
    _draw[grid](*given, KERNELS - 3, PARTS=parts, **shape)
    if not any(searches):
        return
    _check[grid](logits, params, slots, sums, state, step, count, KERNELS - 2, **shape)
    for counts, wanted in zip((True, False), searches, strict=True):
        for number in range(ROUNDS if wanted else 0):
            _round[grid](
                logits, params, slots, sums, state, step, count, number, ROUNDS=ROUNDS, COUNT=counts, **shape
            )  # fmt: skip
    _draw[grid](*given, KERNELS - 1, PARTS=parts, **shape)


def sample_reference(
    logits: Tensor,
    params: Tensor,
    seeds: Tensor,
    slots: Tensor,
    positions: Tensor,
    chosen: Tensor,
    tokens: Tensor,
    last: Tensor,
    scratch: Scratch | None,
    count: int,
    searches: tuple[bool, bool] = (True, True),
) -> None:
    """The same with torch, one sequence after the other."""
    for b, slot in enumerate(slots.tolist()):
        mode, temperature, k, top_p, min_p = params[slot, :REPETITION].tolist()
        if mode == SKIP:
            continue
        x = logits[b, :count].float()
        token = -1
        if bool(x.max().isfinite()):  # NaN wins every comparison here
            token = int(x.argmax())
            if mode == DRAW:
                kept = kept_reference(x, temperature, int(k), top_p, min_p)
                noise = exponential_reference(int(seeds[slot]), int(positions[b]), kept)
                scores = -(x.max() - x[kept]) / temperature - noise.log()
                token = int(kept[scores.argmax()])
        chosen[b] = token
        tokens[b] = last[slot] = max(token, 0)


def kept_reference(x: Tensor, temperature: float, k: int, top_p: float, min_p: float) -> Tensor:
    """The tokens that the filters keep, in order."""
    y = x.max() - x
    bound = float("inf")
    if min_p > 0:
        bound = -temperature * math.log(min_p)
    if 0 < k < len(y):
        bound = min(bound, float(y.kthvalue(k).values))
    if top_p < 1:
        near = y[y <= min(bound, REACH * temperature)].sort().values
        masses = ((near * (-1 / math.log(2) / temperature)).exp2() * UNIT).long().cumsum(0)
        need = int(float(masses[-1]) * top_p)
        bound = float(near[int(torch.searchsorted(masses, need))])  # the first whose mass with all before it is enough
    return ((y <= bound) & y.isfinite()).nonzero()[:, 0]
