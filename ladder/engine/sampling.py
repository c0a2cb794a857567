"""Sampling: how the next token is chosen."""

import torch
from torch import Tensor

from ladder.engine.options import SamplingParams


class Sampler:
    """Chooses one request's tokens, with random numbers of its own: a result does not depend on other requests."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: Tensor) -> int | None:
        """`logits` [vocab] -> the next token; None where they are not finite."""
        if not bool(logits.max().isfinite()):  # NaN wins every comparison here
            return None
        if self._params.temperature == 0:
            return int(logits.argmax())
        logits = logits.double().cpu()
        # the largest becomes 0, so that no temperature can make it infinite; in float64 none divides by zero
        chances = filtered((logits - logits.max()) / self._params.temperature, self._params.top_k, self._params.top_p)
        return int(torch.multinomial(chances, 1, generator=self._generator))


def filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """softmax(logits) of the `top_k` likeliest, of these the smallest set that reaches `top_p`, scaled to 1."""
    order = logits.argsort(descending=True, stable=True)
    kept = logits[order][: top_k or None].softmax(-1)
    before = kept.cumsum(-1) - kept  # the probability of everything likelier
    inside = before < top_p
    inside[0] = True  # also for a top_p that rounds to zero
    kept = kept.where(inside, 0)
    return torch.zeros_like(logits).scatter(0, order[: len(kept)], kept / kept.sum())
