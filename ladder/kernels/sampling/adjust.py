"""Penalties, bias and a least length, applied to logits before a token is chosen from them."""

import torch
from torch import Tensor

from ladder.jit import tl, triton
from ladder.kernels.sampling.sample import COLUMNS, FREQUENCY, PRESENCE, REPETITION

# what is known of a token of a sequence: it is in the prompt; it was generated, this often; it ends the text
PROMPT, ONCE, ENDS = 1, 2, 1 << 30


@triton.jit
def _adjust(logits, out, settings, known, bias, until, slots, positions, step, count, COLUMNS: tl.constexpr,
            BIAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(slots + b)
    own = settings + slot * COLUMNS
    repetition = tl.load(own + 5)
    presence = tl.load(own + 6)
    frequency = tl.load(own + 7)
    early = tl.load(positions + b) < tl.load(until + slot)
    x = tl.load(logits + b.to(tl.int64) * step + i, mask=inside, other=0.0)
    about = tl.load(known + slot.to(tl.int64) * count + i, mask=inside, other=0)
    often = (about & 1073741823) >> 1
    seen = (about & 1073741823) > 0
    x = tl.where(seen, tl.where(x > 0.0, x / repetition, x * repetition), x)
    x -= frequency * often.to(tl.float32) + presence * (often > 0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + slot.to(tl.int64) * count + i, mask=inside, other=0.0)
    x = tl.where(early & (about >= 1073741824), float("-inf"), x)
    tl.store(out + b.to(tl.int64) * count + i, x, mask=inside)


def adjust(
    logits: Tensor,
    params: Tensor,
    known: Tensor,
    bias: Tensor | None,
    until: Tensor,
    slots: Tensor,
    positions: Tensor,
    count: int,
) -> Tensor:
    """The first `count` logits of every sequence, [batch, count], after repetition, presence and frequency penalties,
    the bias, and without tokens that would end it before it has reached the position `until`.

    `known` [slots, count] int32, `bias` [slots, count], `until` [slots] and `params` are those of `slots` [batch].
    """
    out = logits.new_empty(len(logits), count)
    _adjust[(triton.cdiv(count, 2048), len(logits))](
        logits, out, params, known, params if bias is None else bias, until, slots, positions, logits.stride(0), count,
        COLUMNS=COLUMNS, BIAS=bias is not None, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return out


def adjust_reference(
    logits: Tensor,
    params: Tensor,
    known: Tensor,
    bias: Tensor | None,
    until: Tensor,
    slots: Tensor,
    positions: Tensor,
    count: int,
) -> Tensor:
    """The same with torch."""
    x, about = logits[:, :count].float(), known[slots]
    repetition, presence, frequency = (params[slots, column, None] for column in (REPETITION, PRESENCE, FREQUENCY))
    often = (about & (ENDS - 1)) // ONCE
    x = torch.where((about & (ENDS - 1)) > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * often - presence * (often > 0)
    if bias is not None:
        x = x + bias[slots]
    early = (positions < until[slots])[:, None]
    return x.masked_fill(early & (about >= ENDS), float("-inf"))


@triton.jit
def _note(known, slots, chosen, count):
    b = tl.program_id(0)
    token = tl.load(chosen + b)
    at = known + tl.load(slots + b).to(tl.int64) * count + token
    if token >= 0:
        tl.store(at, tl.load(at) + 2)


def note(known: Tensor, slots: Tensor, chosen: Tensor) -> None:
    """Count the tokens [batch] that were chosen for `slots`, none where they are -1."""
    _note[(len(slots),)](known, slots, chosen, known.shape[1], num_warps=1)


def note_reference(known: Tensor, slots: Tensor, chosen: Tensor) -> None:
    for slot, token in zip(slots.tolist(), chosen.tolist(), strict=True):
        if token >= 0:
            known[slot, token] += ONCE
