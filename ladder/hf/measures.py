"""Measures on a text: a model's perplexity, and how far it is from a source model.

A text is one sequence of tokens t[0..N]. Position i reads t[0..i] of its window and predicts t[i+1]:

    window   inputs               targets
    0        t[0]   .. t[W-1]     t[1]   .. t[W]
    1        t[W]   .. t[2W-1]    t[W+1] .. t[2W]
    ...      the last window is as short as the text leaves it, and runs unpadded

So every token but the first is predicted exactly once, and no window sees another one's tokens. Where texts of the
model begin with a token of their own (`begin`), every window's first input is that one, as the model was trained. All
three measures are means over these N positions.

Standard errors: tokens of one window depend on each other, windows are taken as independent. A mean over tokens is
the ratio (sum over windows of the windows' sums) / (sum of their lengths); each window's share in its deviation is
kept (`units`), so that two models on the same windows are compared by their windows' differences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil, exp, floor, hypot, isfinite, log10, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ladder.config.early import LONGEST, check_window
from ladder.config.fields import read_text
from ladder.errors import LadderError
from ladder.perf.memory import check_host
from ladder.progress import Progress

GROUPS = 200  # of the jackknife, at most: it calls what it is given once for each
Score = Callable[[list[Tensor], Tensor], Tensor]  # (each model's logits [window, vocab], targets) -> sums


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error: None where there is but one independent unit."""

    value: float
    stderr: float | None
    n: int  # tokens or items behind it
    units: Tensor | None = None  # each independent unit's share in the deviation of the value; they sum to 0

    @classmethod
    def of(cls, value: float, units: Tensor, n: int) -> "Estimate":
        return cls(value, _error(units), n, units)

    @classmethod
    def ratio(cls, sums: Tensor, counts: Tensor) -> "Estimate":
        """The mean of what `sums` are sums of, `counts` at a time."""
        total = float(counts.sum())
        mean = float(sums.sum()) / total
        return cls.of(mean, (sums - mean * counts) / total, round(total))

    @classmethod
    def mean(cls, items: Sequence[Any]) -> "Estimate":
        """Of independent items."""
        numbers = torch.tensor([float(item) for item in items], dtype=torch.float64)
        return cls.ratio(numbers, torch.ones_like(numbers))

    @classmethod
    def jackknife(cls, items: Sequence[Any], aggregate: Callable[[list[Any]], float]) -> "Estimate":
        """Any function of independent items: how much it moves without each group of them."""
        groups = min(len(items), GROUPS)
        rest = [[item for at, item in enumerate(items) if at % groups != group] for group in range(groups)]
        moved = torch.tensor([float(aggregate(some)) for some in rest] if groups > 1 else [0.0], dtype=torch.float64)
        return cls.of(float(aggregate(list(items))), (moved.mean() - moved) * (groups - 1) / groups, len(items))

    def through(self, function: Callable[[float], float], slope: float) -> "Estimate":
        """A smooth function of the value, its slope there given: the delta method."""
        units = None if self.units is None else self.units * slope
        return replace(self, value=function(self.value), units=units, stderr=scaled(self.stderr, abs(slope)))

    def exp(self) -> "Estimate":
        """The perplexity, of a mean negative log-likelihood."""
        value = perplexity_of(self.value)
        return self.through(lambda _: value, value)

    def minus(self, other: "Estimate") -> tuple[float, float | None, bool]:
        """The difference, its standard error, and whether that is paired: of the differences unit by unit."""
        difference = self.value - other.value
        if self.units is not None and other.units is not None and self.units.shape == other.units.shape:
            return difference, _error(self.units - other.units), True
        if self.stderr is None or other.stderr is None:
            return difference, None, False
        return difference, hypot(self.stderr, other.stderr), False


class Distance(NamedTuple):
    """One pass over a text with a model and its source."""

    perplexity: Estimate  # the model's
    kl: Estimate  # KL(source || model), nats per token
    agreement: Estimate  # share of positions where both hold the same token for the likeliest


def perplexity(
    model: Any,
    tokens: Sequence[int] | Tensor,
    *,
    window: int | None = None,
    batch: int = 8,
    begin: int | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """exp of the mean negative log-likelihood of a text's tokens.

    `window`: tokens that a position may look back on, its own included; the model's context, but at most 1024, if not
    given. `batch`: windows at a time. It changes no value.
    """

    def score(logits: list[Tensor], targets: Tensor) -> Tensor:
        return nll(logits[0].log_softmax(-1), targets)[None]

    sums, counts = _walk([model], tokens, window, batch, begin, score, progress)
    return Estimate.ratio(sums[:, 0], counts).exp()


def distance(
    model: Any,
    source: Any,
    tokens: Sequence[int] | Tensor,
    *,
    window: int | None = None,
    batch: int = 8,
    begin: int | None = None,
    progress: Progress | None = None,
) -> Distance:
    """How far a model is from its source on a text, and the model's perplexity on the way. One batch at a time."""
    check_vocabularies(model, source)
    sums, counts = _walk([model, source], tokens, window, batch, begin, compare, progress)
    nll_mean, kl, agreement = (Estimate.ratio(column, counts) for column in sums.unbind(1))
    return Distance(nll_mean.exp(), kl, agreement)


def check_vocabularies(model: Any, source: Any) -> None:
    """Refuse two models whose logits are of different tokens."""
    vocabularies = [_text_config(each).vocab_size for each in (model, source)]
    if vocabularies[0] != vocabularies[1]:
        raise LadderError(
            f"the model has {vocabularies[0]} tokens, its source {vocabularies[1]}: their vocabularies must be equal"
        )


def compare(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Sums over a window, of the [tokens, vocabulary] logits of a model and its source: the targets' negative
    log-likelihood, KL(source || model), and positions where both have the same likeliest token.
    """
    model, source = (each.log_softmax(-1) for each in logits)
    same = model.argmax(-1) == source.argmax(-1)
    return torch.stack([nll(model, targets), kl_terms(source, model).sum(-1).double().sum(), same.double().sum()])


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (log p - log q) of each outcome; their sum is KL(p || q). What p rules out adds nothing."""
    return (log_p.exp() * (log_p - log_q)).masked_fill(log_p.isneginf(), 0)


def nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    """The targets' negative log-likelihood, a sum."""
    return -log_probs.gather(-1, targets[:, None]).double().sum()


def perplexity_of(nats: float) -> float:
    """Of so many nats per token; infinite beyond what a double holds."""
    return exp(nats) if nats < 700 else nats * float("inf")


def read(path: Path) -> str:
    """A file of text that is not empty."""
    words = read_text(path)
    if not words.strip():
        raise LadderError(f"{path} is empty")
    return words


def begin_of(tokenizer: Any) -> int | None:
    """The token that this tokenizer puts before every text, if it does."""
    bare, dressed = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    return dressed[0] if len(dressed) > len(bare) and dressed[1 : 1 + len(bare)] == bare else None


def shown(value: float | None, stderr: float | None, sign: str = "") -> str:
    """Both to the second digit of the error."""
    if value is None:
        return ""
    if not stderr:
        return f"{value:{sign}.5g}"
    digits = max(0, 1 - floor(log10(stderr)))
    return f"{value:{sign}.{digits}f} ± {stderr:.{digits}f}"


def context_of(config: Any) -> int | None:
    """The most tokens that a model of this config can read; None: any number."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def checked_window(config: Any, window: int | None) -> int:
    """The window to use for a model of this config."""
    context = context_of(config)
    check_window(window, context)
    return min(context or LONGEST, LONGEST) if window is None else window


def scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def _error(units: Tensor) -> float | None:
    count = len(units)
    found = sqrt(count / (count - 1) * float(units.square().sum())) if count > 1 else None
    return found if found is not None and isfinite(found) else None


def _text_config(model: Any) -> Any:
    return model.config.get_text_config()


def _walk(
    models: list[Any],
    tokens: Sequence[int] | Tensor,
    window: int | None,
    batch: int,
    begin: int | None,
    score: Score,
    progress: Progress | None,
) -> tuple[Tensor, Tensor]:
    """Each window's sums [windows, scores], and its length [windows]."""
    text = torch.as_tensor(tokens, dtype=torch.long)
    if text.dim() != 1 or len(text) < 2:
        raise LadderError(f"a text of {text.numel()} tokens predicts nothing: at least 2 are needed")
    if batch < 1:
        raise LadderError(f"batch is {batch} windows: at least 1 is needed")
    vocabulary = _text_config(models[0]).vocab_size
    if int(text.max()) >= vocabulary or int(text.min()) < 0:
        raise LadderError(f"the text's tokens go up to {int(text.max())}, the model has {vocabulary}")
    length = min(checked_window(model.config, window) for model in models)
    total = ceil((len(text) - 1) / length)
    check_logits(models, min(batch, total), length)
    sums: list[Tensor] = []
    counts: list[int] = []
    with evaluating(models):
        for inputs, targets in _batches(text, length, batch, begin):
            sums += _one_batch(models, inputs, targets, score)
            counts += [inputs.shape[1]] * len(inputs)
            if progress is not None:
                progress(len(counts), total, "text")
    return torch.stack(sums).cpu(), torch.tensor(counts, dtype=torch.float64)


def check_logits(models: Sequence[Any], rows: int, length: int) -> None:
    """Refuse a batch whose logits do not fit into memory: [rows, length, vocabulary] of each model, and a copy."""
    model = models[0]
    if model.device.type != "cpu":
        return
    each = rows * length * _text_config(model).vocab_size * model.dtype.itemsize
    ways = "give a smaller --batch" if rows > 1 else "give shorter sequences"
    check_host(f"logits of {rows} sequences of {length} tokens", (len(models) + 1) * each, ways)


def _batches(text: Tensor, window: int, batch: int, begin: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), both [windows, tokens]; a shorter last window comes alone."""
    inputs, targets = text[:-1].clone(), text[1:]
    if begin is not None:
        inputs[::window] = begin
    full = len(inputs) // window * window
    pairs = (side[:full].view(-1, window).split(batch) for side in (inputs, targets))
    if full:
        yield from zip(*pairs, strict=True)
    if full < len(inputs):
        yield inputs[None, full:], targets[None, full:]


def _one_batch(models: list[Any], inputs: Tensor, targets: Tensor, score: Score) -> list[Tensor]:
    """The logits are freed on return, and converted to float32 one window at a time."""
    logits = [model(input_ids=inputs.to(model.device), use_cache=False).logits for model in models]
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    return [
        score([each[row].to(device, dtype) for each in logits], targets[row].to(device)) for row in range(len(inputs))
    ]


@contextmanager
def evaluating(models: list[Any]) -> Iterator[None]:
    """No gradients, no dropout; afterwards as before."""
    with ExitStack() as stack:
        for model in models:
            stack.callback(model.train, model.training)
            model.eval()
        stack.enter_context(torch.inference_mode())
        yield
