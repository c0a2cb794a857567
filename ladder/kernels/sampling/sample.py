"""Draws the next token of every sequence: temperature, min-p, top-k and top-p, without sorting the vocabulary.

With the distance y_i = max(x) - x_i of a logit from the largest, a filter keeps the tokens with y_i <= t. The t of
top-k and top-p is searched for: every round counts the tokens, or adds up their masses exp(-y_i / T), below PIVOTS
values between a t that is too small and one that is large enough, until there is one token between them. Of what is
kept, the token with the largest

    -y_i / T - log(e_i),    e_i exponential random numbers of (seed, position, i),

is a sample of softmax(x / T) (Gumbel's trick). Masses are whole numbers, so that the order of additions, and with it
the number of programs and of sequences, changes no result. Tokens that are equally likely are kept or dropped together.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.sampling.random import exponential_reference, exponentials

PIVOTS = 8
ROUNDS = 16  # 8^16 is more than the distances that float32 can tell apart
UNIT = 2.0**28  # the mass of the likeliest token
REACH = (
    19.5  # tokens that are further from the likeliest, in units of the temperature, have no mass: exp(-19.5) UNIT < 1
)
FOLD = 8  # tiles whose masses are added up in 32 bits: FOLD UNIT is less than 2^32
PROGRAMS = 128  # in all, at most: they wait for each other, so the chip must hold all of them at once
# columns of a sequence's parameters
SKIP, ARGMAX, DRAW = 0, 1, 2  # modes: the choice that was made stands; the likeliest of these logits; a sample
MODE, TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, COLUMNS = range(9)


@dataclass(frozen=True)
class Scratch:
    """Where the programs of a sequence leave what they found, for up to `batch` sequences."""

    sums: Tensor  # [batch, 2 filters, rounds, pivots] tokens or masses, int64
    arrived: Tensor  # [batch] int32
    found: Tensor  # [batch, programs, 4] float32: largest and smallest logit; best score, its token

    @classmethod
    def of(cls, batch: int, device: torch.device) -> "Scratch":
        shape = (batch, 2, ROUNDS, PIVOTS)
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            torch.zeros(batch, PROGRAMS, 4, device=device),
        )


@triton.jit
def _meet(arrived, goal):
    """Go on when `goal` programs have come: what they wrote before can be read."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(arrived, 0, sem="acq_rel", scope="gpu") < goal:
        pass
    tl.debug_barrier()


@triton.jit
def _count(x, begin, end, top, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """How many tokens are within each of the pivots."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK, PIVOTS], tl.int32)
    for at in range(begin, end, BLOCK):
        here = at + i
        y = top - tl.load(x + here, mask=here < end, other=float("-inf"), cache_modifier=".cg")
        count += (y[:, None] <= pivots[None, :]).to(tl.int32)
    return tl.sum(count, axis=0).to(tl.int64)


@triton.jit
def _weigh(x, begin, end, top, rate, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, FOLD: tl.constexpr):
    """The mass within each of the pivots. A few tiles are added up in 32 bits, which they cannot exceed."""
    i = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK, PIVOTS], tl.int64)
    for group in range(begin, end, FOLD * BLOCK):
        some = tl.zeros([BLOCK, PIVOTS], tl.uint32)
        for tile in tl.static_range(FOLD):
            here = group + tile * BLOCK + i
            y = top - tl.load(x + here, mask=here < end, other=float("-inf"), cache_modifier=".cg")
            m = (tl.exp2(y * rate) * 268435456.0).to(tl.uint32)
            some += tl.where(y[:, None] <= pivots[None, :], m[:, None], 0).to(tl.uint32)
        mass += some.to(tl.int64)
    return tl.sum(mass, axis=0)


@triton.jit
def _search(x, begin, end, top, temperature, sums, arrived, met, hi, share, k, PROGRAMS: tl.constexpr,
            BLOCK: tl.constexpr, PIVOTS: tl.constexpr, ROUNDS: tl.constexpr, FOLD: tl.constexpr,
            COUNT: tl.constexpr):  # fmt: skip
    """The smallest distance up to `hi` within which there are `k` tokens (COUNT) or `share` of the mass within `hi`;
    and how often the programs have met.
    """
    j = tl.arange(0, PIVOTS)
    rate = -1.4426950408889634 / temperature  # exp(-y / T) is 2^(y rate)
    lo = -1.0  # nothing is so near
    below = tl.full([], 0, tl.int64)  # what is within lo
    upto = tl.full([], 9223372036854775807, tl.int64)  # and within hi
    need = tl.full([], 0, tl.int64) + k
    number = 0
    one = tl.full([], 1, tl.int64)  # what a token within hi adds at least
    while (number < ROUNDS) & (upto - below >= 2 * one):
        least = tl.maximum(lo, 0.0)
        pivots = tl.where(j == PIVOTS - 1, hi, least + (hi - least) * ((j + 1.0) / PIVOTS))
        if COUNT:
            mine = _count(x, begin, end, top, pivots, BLOCK, PIVOTS)
        else:
            mine = _weigh(x, begin, end, top, rate, pivots, BLOCK, PIVOTS, FOLD)
        tl.atomic_add(sums + number * PIVOTS + j, mine, sem="relaxed", scope="gpu")
        met += 1
        _meet(arrived, met * PROGRAMS)
        all = tl.load(sums + number * PIVOTS + j, cache_modifier=".cg")
        if not COUNT:
            if number == 0:
                need = (tl.max(all, axis=0).to(tl.float64) * share.to(tl.float64)).to(tl.int64)
        # where even the last pivot is not enough, everything within it is kept
        enough = (all >= need) | (j == PIVOTS - 1)
        upto = tl.min(tl.where(enough, all, 9223372036854775807), axis=0)
        below = tl.max(tl.where(enough, below, all), axis=0)
        lo = tl.max(tl.where(enough, lo, pivots), axis=0)
        hi = tl.min(tl.where(enough, pivots, hi), axis=0)
        if not COUNT:
            one = tl.maximum((tl.exp2(hi * rate) * 268435456.0).to(tl.int64), 1)
        number += 1
    return hi, met


@triton.jit
def _sample(logits, settings, seeds, slots, positions, chosen, tokens, last, sums, arrived, found, step, count,
            COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
            PIVOTS: tl.constexpr, ROUNDS: tl.constexpr, FOLD: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    own = settings + slot * COLUMNS
    mode = tl.load(own)
    if mode == 0.0:
        return
    temperature = tl.load(own + 1)
    k = tl.load(own + 2).to(tl.int32)
    top_p = tl.load(own + 3)
    min_p = tl.load(own + 4)
    seed = tl.load(seeds + slot)
    position = tl.load(positions + b).to(tl.int32)
    x = logits + b.to(tl.int64) * step
    arrived += b
    found += b * MOST * 4
    share = tl.cdiv(tl.cdiv(count, PROGRAMS), BLOCK) * BLOCK
    begin = tl.minimum(part * share, count)
    end = tl.minimum(begin + share, count)
    i = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for at in range(begin, end, BLOCK):
        here = at + i
        z = tl.load(x + here, mask=here < end, other=float("-inf"), cache_modifier=".cg")
        z = tl.where(z == z, z, float("inf"))  # not a number: as bad as infinite
        most = tl.maximum(most, z)
        least = tl.minimum(least, tl.where(z > float("-inf"), z, float("inf")))
    tl.store(found + part * 4, tl.max(most, axis=0))
    tl.store(found + part * 4 + 1, tl.min(least, axis=0))
    _meet(arrived, PROGRAMS)
    met = 1
    r = tl.arange(0, MOST)
    top = tl.max(tl.load(found + r * 4, mask=r < PROGRAMS, other=float("-inf"), cache_modifier=".cg"), axis=0)
    bottom = tl.min(tl.load(found + r * 4 + 1, mask=r < PROGRAMS, other=float("inf"), cache_modifier=".cg"), axis=0)
    finite = (top < float("inf")) & (top > float("-inf"))
    bound = float("inf")
    if (mode == 2.0) & finite:
        if min_p > 0.0:
            bound = -temperature * tl.log(min_p)
        if (k > 0) & (k < count):
            hi = tl.minimum(bound, top - bottom)
            bound, met = _search(x, begin, end, top, temperature, sums + b * 2 * ROUNDS * PIVOTS, arrived, met, hi,
                                 top_p, k, PROGRAMS, BLOCK, PIVOTS, ROUNDS, FOLD, True)  # fmt: skip
        if top_p < 1.0:
            hi = tl.minimum(bound, 19.5 * temperature)
            bound, met = _search(x, begin, end, top, temperature, sums + (b * 2 + 1) * ROUNDS * PIVOTS, arrived, met,
                                 hi, top_p, 0, PROGRAMS, BLOCK, PIVOTS, ROUNDS, FOLD, False)  # fmt: skip
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.full([BLOCK], 2147483647, tl.int32)
    if finite:
        for at in range(begin, end, BLOCK):
            here = at + i
            y = top - tl.load(x + here, mask=here < end, other=float("-inf"), cache_modifier=".cg")
            score = -y
            if mode == 2.0:
                score = -y / temperature - tl.log(exponentials(seed, position, at, BLOCK // 4))
            score = tl.where((y <= bound) & (y < float("inf")), score, float("-inf"))
            which = tl.where(score > best, here, which)  # the first of equals stays
            best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    tl.store(found + part * 4 + 2, highest)
    tl.store(found + part * 4 + 3, tl.min(tl.where(best == highest, which, 2147483647), axis=0).to(tl.float32))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == (met + 1) * PROGRAMS - 1:
        scores = tl.load(found + r * 4 + 2, mask=r < PROGRAMS, other=float("-inf"), cache_modifier=".cg")
        ids = tl.load(found + r * 4 + 3, mask=r < PROGRAMS, other=0.0, cache_modifier=".cg")
        first = tl.min(tl.where(scores == tl.max(scores, axis=0), r, MOST), axis=0)
        token = tl.sum(tl.where(r == first, ids, 0.0), axis=0).to(tl.int64)
        tl.store(chosen + b, tl.where(finite, token, -1))
        token = tl.where(finite, token, 0)
        tl.store(tokens + b, token)
        tl.store(last + slot, token)


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
    cores: int = PROGRAMS,
) -> None:
    """A token of every sequence whose mode is not SKIP, from the first `count` of its `logits` [batch, step], float32:
    into `chosen` [batch], -1 where they are not finite; into `tokens` [batch] and `last` [slots], 0 there.

    `params` [slots, COLUMNS] and `seeds` [slots] are those of `slots` [batch]; `positions` [batch]: the new tokens'.
    `cores`: the GPU's multiprocessors, each of which has room for a program.
    """
    assert scratch is not None
    batch = len(logits)
    programs = 1 if _interpreted() else max(1, min(min(PROGRAMS, cores) // batch, triton.cdiv(count, 2048)))
    scratch.sums[:batch].zero_()
    scratch.arrived[:batch].zero_()
    _sample[(programs, batch)](
        logits, params, seeds, slots, positions, chosen, tokens, last, scratch.sums, scratch.arrived,
        scratch.found, logits.stride(0), count, COLUMNS=COLUMNS, PROGRAMS=programs, MOST=PROGRAMS,
        BLOCK=2048, PIVOTS=PIVOTS, ROUNDS=ROUNDS, FOLD=FOLD, num_warps=16,
    )  # fmt: skip


def _interpreted() -> bool:
    """Triton's interpreter runs one program after the other: they cannot wait for each other."""
    return bool(triton.knobs.runtime.interpret)


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
