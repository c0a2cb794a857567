"""Random numbers of a token: a function of a request's seed, a position and a token, and of nothing else.

Philox 4x32 of ten rounds (Salmon et al., 2011), whose four numbers are those of four neighbouring tokens: the seed is
its key, these tokens and the position are its counter. So a sample
depends neither on the batch nor on the number of ranks, and is the same when it is drawn again.
"""

import torch
from torch import Tensor

from ladder.jit import tl, triton

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS, _KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
SMALL = 2.0**-10  # below, -log(1 - v) is its series: the logarithm would round 1 - v


@triton.jit
def exponentials(seed, position, first, QUARTER: tl.constexpr):
    """-log(1 - v) with a v that is uniform between 0 and 1 for each of 4 QUARTER tokens from `first` on, which is a
    multiple of four; small ones are as exact as large ones.
    """
    group = first // 4 + tl.arange(0, QUARTER)
    zero = group * 0
    r0, r1, r2, r3 = tl.philox(seed, group, position + zero, zero, zero)
    # as in the order of the tokens: the four of a group are neighbours
    bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.where(v < 0.0009765625, v * (1.0 + v * (0.5 + v * 0.3333333333333333)), -tl.log(1.0 - v))


def exponential_reference(seed: int, position: int, tokens: Tensor) -> Tensor:
    """The same for `tokens` [n], in float32."""
    words = torch.stack(philox_reference(seed, tokens.long() // 4, position))
    v = (words.gather(0, (tokens.long() % 4)[None])[0].float() + 0.5) * 2.0**-32
    v = v.clamp(max=1 - 2.0**-24)
    return torch.where(v < SMALL, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v))


def philox_reference(seed: int, c0: Tensor, c1: int, c2: int = 0, c3: int = 0) -> list[Tensor]:
    """The four numbers of every counter (c0, c1, c2, c3), in int64."""
    counter = [c0, *(torch.full_like(c0, c) for c in (c1, c2, c3))]
    keys = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_2, low_2) = (
            ((x * factor) >> 32 & _MASK, x * factor & _MASK)
            for x, factor in zip(counter[::2], _MULTIPLIERS, strict=True)
        )
        counter = [high_2 ^ counter[1] ^ keys[0], low_2, high_0 ^ counter[3] ^ keys[1], low_0]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEYS, strict=True)]
    return counter
