"""The last stage of `ladder adapt`: steps on text that the model samples itself, compared with its original.

Of each sequence the first tokens are kept, and the model under its wiring samples the others, at temperature 1. The
loss of a position whose next token was sampled, with s the model's and t the original's distribution of that token, is

    kl_weight * (reverse_kl * KL(s || t)  +  (1 - reverse_kl) * KL(t || s))

a mean over these positions; other terms of the loss do not count in these steps. Its gradient is that of the
distributions; that the text itself depends on the weights is left out, as in GKD (arXiv 2306.13649).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.hf.continuations import sampled
from ladder.train.loss import IGNORED, LossWeights
from ladder.train.options import PROMPT, REVERSE_KL, AdaptOptions, TrainingOptions


@dataclass(frozen=True)
class OnPolicy:
    """Which steps these are, and what is learned in them."""

    first: int  # the first of them: steps before it are as always
    prompt: int  # tokens of a sequence that are kept
    weights: LossWeights
    seed: int

    @classmethod
    def of(cls, options: AdaptOptions, training: TrainingOptions, rising: int) -> "OnPolicy":
        """By the options of a run, in whose first `rising` steps staleness rises."""
        count = max(1, round(options.on_policy * training.steps))
        reverse = REVERSE_KL if options.reverse_kl is None else options.reverse_kl
        weights = LossWeights(options.kl_weight, 0.0, reverse=reverse, targets_only=True)
        first = max(rising, training.steps - count)
        return cls(first, options.on_policy_prompt or PROMPT, weights, training.seed)

    def share(self, begin: int, end: int) -> float:
        """Of the steps from `begin` up to `end`."""
        return max(0, end - max(begin, self.first)) / max(1, end - begin)

    def generator(self, step: int, rank: int, device: torch.device) -> torch.Generator:
        """Random numbers of a step on a rank, again the same after a resumption."""
        drawn = torch.Generator().manual_seed(self.seed)
        seeds = torch.randint(2**62, (step + 1,), generator=drawn)
        return torch.Generator(device).manual_seed((int(seeds[step]) + rank) % 2**63)

    def targets(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> the next token of each position, where it was sampled."""
        found = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        found[:, : self.prompt - 1] = IGNORED
        return found

    def sampled(self, model: Any, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """[batch, tokens] with everything behind the prompts sampled. The end of a text is a token as any other: what
        follows it is another text, as in the data.
        """
        prompts = tokens[:, : self.prompt]
        shape = len(tokens), tokens.shape[1] - prompts.shape[1]
        draws = torch.rand(shape, dtype=torch.float64, device=tokens.device, generator=generator)
        with _evaluated(model):
            return torch.cat([prompts, sampled(model, prompts, draws)], 1)


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Without gradients and, as the lengths differ from pass to pass, without what was compiled for others."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(training)
