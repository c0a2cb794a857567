"""What a model writes, beside what its source writes: greedy continuations, and samples that the source reads.

N prompts of P tokens are taken evenly over a text, and each is continued by L tokens, in two ways:

    greedily                  greedy_match: share of the prompts where all L tokens are the source's
                              greedy_prefix: mean number of tokens before the first that is another one, at most L
    sampled, temperature 1    written_perplexity: the source's, of the L tokens that the model has written
                              written_distinct: share of distinct runs of 4 tokens among those of a continuation, a mean

What a model writes greedily can repeat itself, which every source finds likely: therefore its perplexity is that of
samples. A model that has become too certain of itself still writes what the source finds likelier than the source's own
samples, so both a higher and a lower perplexity than the source's own is a difference; `written_distinct` tells a
repetition from it.

An end of text ends nothing: all continuations are of the same length, and what follows the end counts as in a text of
several documents. A prompt's samples are drawn with the same random numbers whatever the batch and the model, so models
that are alike write alike. Standard errors take prompts as independent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ladder.errors import LadderError
from ladder.hf.measures import Estimate, check_logits, check_vocabularies, evaluating, nll
from ladder.progress import Progress

RUN = 4  # tokens of the runs of which the distinct ones are counted
Choose = Callable[[Tensor, int], Tensor]  # (logits [prompts, vocab] after a number of new tokens) -> the next ones


class Written(NamedTuple):
    """What a model writes, beside what its source writes after the same prompts."""

    greedy_match: Estimate
    greedy_prefix: Estimate
    written_perplexity: Estimate
    written_distinct: Estimate


def prompts_of(tokens: Sequence[int] | Tensor, count: int, length: int = 64, begin: int | None = None) -> Tensor:
    """[count, length] prompts, evenly over a text, none sharing a token with another. `begin`: what every text of the
    model begins with, which stands in the place of each one's first token.
    """
    text = torch.as_tensor(tokens, dtype=torch.long)
    if count < 1 or length < 1:
        raise LadderError(f"{count} prompts of {length} tokens: both must be at least 1")
    if count * length > len(text):
        raise LadderError(
            f"{count} prompts of {length} tokens are more than the text's {len(text)}: take fewer or shorter ones"
        )
    starts = torch.arange(count) * len(text) // count
    prompts = text[starts[:, None] + torch.arange(length)]
    if begin is not None:
        prompts[:, 0] = begin
    return prompts


class Continuations:
    """A source's continuations of prompts, with which those of other models are compared."""

    def __init__(
        self,
        source: Any,
        prompts: Tensor,
        new_tokens: int = 64,
        *,
        batch: int = 8,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """The source writes its greedy ones. `prompts`: [prompts, tokens]; `batch`: of them at a time, which changes no
        value but by rounding; `seed` of the samples.
        """
        if new_tokens < 1 or batch < 1:
            raise LadderError(f"{new_tokens} new tokens, {batch} prompts at a time: both must be at least 1")
        self._source, self._prompts, self._batch = source, prompts, batch
        generator = torch.Generator().manual_seed(seed % 2**63)
        self._draws = torch.rand(len(prompts), new_tokens, dtype=torch.float64, generator=generator)
        check_logits([source], min(batch, len(prompts)), prompts.shape[1] + new_tokens)
        with evaluating([source]):
            self._greedy = self._each_batch(lambda prompts, draws: [greedy(source, prompts, new_tokens)], progress)[0]

    def of(self, model: Any, progress: Progress | None = None) -> Written:
        """How those of a model compare. It and the source are in memory together."""
        check_vocabularies(model, self._source)

        def write(prompts: Tensor, draws: Tensor) -> list[Tensor]:
            written = sampled(model, prompts, draws)
            return [greedy(model, prompts, draws.shape[1]), written, self._surprise(prompts, written)]

        with evaluating([model, self._source]):
            chosen, written, surprise = self._each_batch(write, progress)
        length = written.shape[1]
        prefixes = (chosen == self._greedy).long().cumprod(1).sum(1)
        return Written(
            greedy_match=Estimate.mean((prefixes == length).tolist()),
            greedy_prefix=Estimate.mean(prefixes.tolist()),
            written_perplexity=Estimate.ratio(surprise, torch.full_like(surprise, length)).exp(),
            written_distinct=Estimate.mean([distinct(line) for line in written.tolist()]),
        )

    def _each_batch(self, compute: Callable[[Tensor, Tensor], list[Tensor]], progress: Progress | None) -> list[Tensor]:
        """What is computed of (prompts, draws), all batches together."""
        found: list[list[Tensor]] = []
        pairs = zip(self._prompts.split(self._batch), self._draws.split(self._batch), strict=True)
        for index, (prompts, draws) in enumerate(pairs):
            found.append([each.cpu() for each in compute(prompts, draws)])
            if progress is not None:
                progress(index * self._batch + len(prompts), len(self._prompts), "continuations")
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def _surprise(self, prompts: Tensor, written: Tensor) -> Tensor:
        """Each continuation's negative log-likelihood by the source, in one pass and in nats."""
        device = self._source.device
        lines = torch.cat([prompts.to(device), written.to(device)], 1)
        logits = self._source(input_ids=lines[:, :-1], use_cache=False).logits[:, -written.shape[1] :]
        wide = torch.promote_types(logits.dtype, torch.float32)
        targets = written.to(logits.device)
        return torch.stack([nll(logits[row].to(wide).log_softmax(-1), targets[row]) for row in range(len(lines))])


def greedy(model: Any, prompts: Tensor, length: int) -> Tensor:
    """[prompts, length] the likeliest tokens, one after the other."""
    return _written(model, prompts, length, lambda logits, step: logits.argmax(-1))


def sampled(model: Any, prompts: Tensor, draws: Tensor) -> Tensor:
    """[prompts, length] tokens drawn at temperature 1, by uniform random numbers `draws` [prompts, length]: each is the
    first whose probability, summed with those of all ids below it, is above the number.
    """

    def choose(logits: Tensor, step: int) -> Tensor:
        sums = logits.double().softmax(-1).cumsum(-1)
        wanted = draws[:, step : step + 1].to(sums.device) * sums[:, -1:]
        found = torch.searchsorted(sums, wanted, right=True)[:, 0]
        return found.clamp(max=logits.shape[-1] - 1)  # of logits that are not finite

    return _written(model, prompts, draws.shape[1], choose)


def distinct(line: Sequence[int]) -> float:
    """Share of distinct runs of tokens among a line's; of a shorter line all is one run."""
    runs = [tuple(line[at : at + RUN]) for at in range(max(1, len(line) - RUN + 1))]
    return len(set(runs)) / len(runs)


def _written(model: Any, prompts: Tensor, length: int, choose: Choose) -> Tensor:
    """New tokens [prompts, length]; by the model's cache, where it has one."""
    line, cache = prompts.to(model.device), None
    for step in range(length):
        output = model(input_ids=line if cache is None else line[:, -1:], past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        line = torch.cat([line, choose(output.logits[:, -1], step).to(line.device)[:, None]], 1)
    return line[:, prompts.shape[1] :]
