"""Random numbers of a token: a function of a request's seed, a position and a token, and of nothing else.

Philox 4x32 of ten rounds (Salmon et al., 2011): the seed is its key, token and position are its counter. So a sample
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
def exponential(seed, position, token):
    """-log(1 - v) for a v that is uniform between 0 and 1; small ones are as exact as large ones."""
    zero = token * 0
    high, low, _, _ = tl.philox(seed, token, position + zero, zero, zero)
    v = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)
    return tl.where(v < 0.0009765625, v * (1.0 + v * (0.5 + v * 0.3333333333333333)), -tl.log(1.0 - v))


def exponential_reference(seed: int, position: int, tokens: Tensor) -> Tensor:
    """The same for `tokens` [n], in float32."""
    high, low = philox_reference(seed, tokens.long(), position)
    v = (high.float() + (low.float() + 0.5) * 2.0**-32) * 2.0**-32
    v = v.clamp(max=1 - 2.0**-24)
    return torch.where(v < SMALL, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v))


def philox_reference(seed: int, c0: Tensor, c1: int, c2: int = 0, c3: int = 0) -> tuple[Tensor, Tensor]:
    """The first two of the four numbers of every counter (c0, c1, c2, c3), in int64."""
    counter = [c0, *(torch.full_like(c0, c) for c in (c1, c2, c3))]
    keys = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_2, low_2) = (
            ((x * factor) >> 32 & _MASK, x * factor & _MASK)
            for x, factor in zip(counter[::2], _MULTIPLIERS, strict=True)
        )
        counter = [high_2 ^ counter[1] ^ keys[0], low_2, high_0 ^ counter[3] ^ keys[1], low_0]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEYS, strict=True)]
    return counter[0], counter[1]
