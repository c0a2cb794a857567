"""The loss of distillation: KL from a teacher, and the language-model loss.

    loss = kl_weight * KL(teacher || student) over all tokens  +  lm_weight * cross-entropy of the next token
           + hidden_weight * |stream - teacher's|^2 / |teacher's|^2 after each layer, a mean over tokens and layers

With a share `reverse` of the reverse KL, the divergence is (1 - reverse) * KL(teacher || student) + reverse *
KL(student || teacher). By the logits z of a token their gradients are, with s and t the probabilities of both,

    KL(t || s)    s - t
    KL(s || t)    s * (log s - log t - KL(s || t))

Logits are as large as tokens x vocabulary, so they are processed some tokens at a time, and the gradient is computed
with the loss. Given what the head reads, and its weights (`Logits`), no tensor of that size ever exists: some tokens'
logits of student and teacher are computed, the loss and its gradient by them, and from it the gradients by the head's
input and weights. Given whole logits, no float32 tensor of that size exists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.hf.measures import kl_terms
from ladder.train.head.logits import Logits, chunks

IGNORED = -100  # target of a position that has none


@dataclass(frozen=True)
class LossWeights:
    """Of the three terms."""

    kl: float
    lm: float
    hidden: float = 0.0
    reverse: float = 0.0  # share of the reverse KL, which `TopTokens` do not say
    targets_only: bool = False  # the KL of positions that have a target, not of all


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest tokens: [tokens, k] log-probabilities and ids. What is left of the probability is one more
    outcome, any other token.
    """

    log_probs: Tensor
    ids: Tensor

    def __getitem__(self, tokens: slice) -> "TopTokens":
        return TopTokens(self.log_probs[tokens], self.ids[tokens])


def next_tokens(labels: Tensor) -> Tensor:
    """[batch, tokens] -> the target of each position; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


Wanted = Tensor | TopTokens | Logits  # a teacher's, of which some tokens' can be taken


def distillation_loss(
    student: Tensor | Logits,
    teacher: Wanted | None,
    targets: Tensor,
    weights: LossWeights,
    chunk: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The loss of [tokens, vocabulary] logits, a mean over tokens of each term. `chunk`: a compiled `loss_chunk`."""
    rest, chunk = (teacher, targets, weights), chunk or loss_chunk
    loss: Tensor
    if isinstance(student, Logits):
        own = student.hidden, student.weight, student.bias
        loss = _FusedLoss.apply(*own, student.dtype, *rest, chunk)  # type: ignore[no-untyped-call]
    else:
        loss = _DistillationLoss.apply(student, *rest, chunk)  # type: ignore[no-untyped-call]
    return loss


class _DistillationLoss(torch.autograd.Function):
    """The loss and, with it, its gradient: softmax(student) - teacher, softmax(student) - one-hot."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Wanted | None,
        targets: Tensor,
        weights: LossWeights,
        chunk: Callable[..., Tensor],
    ) -> Tensor:
        counted = (targets != IGNORED).sum().clamp(min=1).double()
        total = torch.zeros((), device=student.device, dtype=torch.float32)
        gradient = torch.empty_like(student)
        for here in chunks(student.shape, student.device):
            part = teacher[here] if teacher is not None else None
            total += chunk(gradient[here], student[here], part, targets[here], weights, len(student), counted)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(slopes[0]), None, None, None, None  # a scalar: multiplied in the gradient's own dtype


class _FusedLoss(torch.autograd.Function):
    """The same with the head's product, logits = hidden weight^T + bias; by G, the gradient by some tokens' logits:

    d hidden = G weight,    d weight = sum over chunks of G^T hidden,    d bias = sum of G

    The sums are float32 at least, whatever the dtype of the products is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        teacher: Wanted | None,
        targets: Tensor,
        weights: LossWeights,
        chunk: Callable[..., Tensor],
    ) -> Tensor:
        own = Logits(hidden, weight, bias, dtype).cast()
        counted = (targets != IGNORED).sum().clamp(min=1).double()
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        needed, wide = ctx.needs_input_grad, torch.promote_types(dtype, torch.float32)
        by_hidden = torch.empty_like(own.hidden) if needed[0] else None
        by_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        by_bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for here in chunks(own.shape, hidden.device):
                logits, part = own[here], teacher[here] if teacher is not None else None
                slope = torch.empty_like(logits)
                total += chunk(slope, logits, part, targets[here], weights, len(hidden), counted)
                if by_hidden is not None:
                    torch.mm(slope, own.weight, out=by_hidden[here])
                if by_weight is not None:
                    _add_product(by_weight, slope.mT, own.hidden[here])
                if by_bias is not None:
                    by_bias += slope.sum(0, dtype=wide)
        gradients = ((by_hidden, hidden), (by_weight, weight), (by_bias, bias))
        ctx.save_for_backward(*(None if by is None or of is None else by.to(of.dtype) for by, of in gradients))
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if gradient is None else gradient.mul_(slopes[0]) for gradient in ctx.saved_tensors)
        return *found, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b"""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":  # whose product has float32 results of bfloat16 factors
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def loss_chunk(
    gradient: Tensor,
    student: Tensor,
    teacher: Tensor | TopTokens | None,
    targets: Tensor,
    weights: LossWeights,
    tokens: int,
    counted: Tensor,
) -> Tensor:
    """The part of the loss of some of the `tokens`; its gradient by the logits, in their dtype, goes to `gradient`."""
    log_probs = wide_log_probs(student)
    probs = log_probs.exp()
    loss, slope = log_probs.new_zeros(()), torch.zeros_like(log_probs)
    if weights.kl and teacher is not None:
        each: Any = weights.kl / tokens
        kl, by = _kl(log_probs, probs, teacher, weights.reverse)
        if weights.targets_only:
            real = targets != IGNORED
            kl, by, each = kl.where(real, 0), by.where(real.unsqueeze(-1), 0), weights.kl / counted
        loss, slope = loss + kl.sum() * each, slope + by * each
    if weights.lm:
        real = targets != IGNORED
        index = targets.where(real, 0).unsqueeze(-1)
        loss = loss - (log_probs.gather(-1, index).squeeze(-1) * real).sum() * weights.lm / counted
        by = torch.where(torch.arange(log_probs.shape[-1], device=log_probs.device) == index, probs - 1, probs)
        slope = slope + by * real.unsqueeze(-1) * (weights.lm / counted)
    gradient.copy_(slope)
    return loss.float()


def _kl(log_probs: Tensor, probs: Tensor, teacher: Tensor | TopTokens, reverse: float) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of each token, with a share of the reverse one, and its gradient by the student's
    logits.
    """
    if isinstance(teacher, Tensor):
        wanted = teacher.to(log_probs.dtype).log_softmax(-1)
        if not reverse:
            return kl_terms(wanted, log_probs).sum(-1), probs - wanted.exp()
        terms = kl_terms(log_probs, wanted)
        back = terms.sum(-1)
        kl, slope = reverse * back, reverse * (terms - probs * back.unsqueeze(-1))
        if reverse < 1:
            kl = kl + (1 - reverse) * kl_terms(wanted, log_probs).sum(-1)
            slope = slope + (1 - reverse) * (probs - wanted.exp())
        return kl, slope
    assert not reverse, "the likeliest tokens do not say what the reverse KL asks for"
    wanted, own = teacher.log_probs.to(log_probs.dtype), log_probs.gather(-1, teacher.ids)
    wanted_rest, own_rest = _rest(wanted.exp()), _rest(own.exp())
    kl = kl_terms(wanted, own).sum(-1) + wanted_rest * (wanted_rest.log() - own_rest.log())
    # a token outside the top is wanted with the share of the rest that the student gives it
    ratio = wanted_rest / own_rest
    slope = probs * (1 - ratio).unsqueeze(-1)
    return kl, slope.scatter_add(-1, teacher.ids, own.exp() * ratio.unsqueeze(-1) - wanted.exp())


def wide_log_probs(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _rest(probs: Tensor) -> Tensor:
    return (1 - probs.sum(-1)).clamp(min=1e-6)


def hidden_distance(streams: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Squared distance of [batch, tokens, hidden] streams to the wanted ones, relative to these: a mean over all."""
    distances = [
        ((ours.float() - theirs.float()).square().sum(-1) / theirs.float().square().sum(-1).clamp(min=1e-12)).mean()
        for ours, theirs in zip(streams, wanted, strict=True)
    ]
    return torch.stack(distances).mean()


def top_tokens(logits: Tensor, count: int) -> TopTokens:
    """A teacher's `count` likeliest tokens of [tokens, vocabulary] logits."""
    log_probs, ids = wide_log_probs(logits).topk(count, dim=-1)
    return TopTokens(log_probs, ids)
