"""What a model is trained to lower: the distance to its teacher, and to the text.

    loss = kl_weight * KL(teacher || student) over all tokens  +  lm_weight * cross-entropy of the next token
           + hidden_weight * |stream - teacher's|^2 / |teacher's|^2 after each layer, a mean over tokens and layers

Logits are as large as tokens x vocabulary, so what is made of them is made some rows at a time, and the gradient is
made with the loss: nothing of float32 and of that size ever exists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # a target that is none
AT_A_TIME = 1 << 26  # logits that are float32 at once
Piece = Callable[..., Tensor]


@dataclass(frozen=True)
class Weights:
    """Of the three terms."""

    kl: float
    lm: float
    hidden: float = 0.0


@dataclass(frozen=True)
class Top:
    """A teacher's likeliest tokens: [rows, k] log-probabilities and ids. What is left of the probability is one more
    outcome, any other token.
    """

    logs: Tensor
    ids: Tensor

    def __getitem__(self, rows: slice) -> "Top":
        return Top(self.logs[rows], self.ids[rows])


def next_tokens(labels: Tensor) -> Tensor:
    """[batch, tokens] -> the target of each position; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def distance(
    student: Tensor, teacher: Tensor | Top | None, targets: Tensor, weights: Weights, work: Piece | None = None
) -> Tensor:
    """The loss of [rows, vocabulary] logits, a mean over the rows of each term. `work`: a compiled `piece`."""
    loss: Tensor = _Distance.apply(student, teacher, targets, weights, work or piece)  # type: ignore[no-untyped-call]
    return loss


class _Distance(torch.autograd.Function):
    """The loss and, with it, its gradient: softmax(student) - teacher, softmax(student) - one-hot."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor | Top | None, targets: Tensor, weights: Weights, work: Piece
    ) -> Tensor:
        rows = max(1, AT_A_TIME // student.shape[-1])
        counted = (targets != IGNORED).sum().clamp(min=1).double()
        total = torch.zeros((), device=student.device, dtype=torch.float32)
        gradient = torch.empty_like(student)
        for at in range(0, len(student), rows):
            here = slice(at, at + rows)
            own = teacher[here] if teacher is not None else None
            total += work(gradient[here], student[here], own, targets[here], weights, len(student), counted)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(slopes[0]), None, None, None, None  # a single number: multiplied as wide as it is


def piece(
    gradient: Tensor,
    student: Tensor,
    teacher: Tensor | Top | None,
    targets: Tensor,
    weights: Weights,
    rows: int,
    counted: Tensor,
) -> Tensor:
    """Some rows' part of the loss; its gradient by the logits, in their own type, is written into `gradient`."""
    logs = student.to(torch.promote_types(student.dtype, torch.float32)).log_softmax(-1)
    chances = logs.exp()
    loss, slope = logs.new_zeros(()), torch.zeros_like(logs)
    if weights.kl and teacher is not None:
        far, by = _kl(logs, chances, teacher)
        loss, slope = loss + far * (weights.kl / rows), slope + by * (weights.kl / rows)
    if weights.lm:
        real = targets != IGNORED
        index = targets.where(real, 0).unsqueeze(-1)
        loss = loss - (logs.gather(-1, index).squeeze(-1) * real).sum() * weights.lm / counted
        by = torch.where(torch.arange(logs.shape[-1], device=logs.device) == index, chances - 1, chances)
        slope = slope + by * real.unsqueeze(-1) * (weights.lm / counted)
    gradient.copy_(slope)
    return loss.float()


def _kl(logs: Tensor, chances: Tensor, teacher: Tensor | Top) -> tuple[Tensor, Tensor]:
    """Sum over the rows of KL(teacher || student), and its gradient by the student's logits."""
    if isinstance(teacher, Tensor):
        own = teacher.to(logs.dtype).log_softmax(-1)
        wanted = own.exp()
        return (wanted * (own - logs)).sum(), chances - wanted
    own, mine = teacher.logs.to(logs.dtype), logs.gather(-1, teacher.ids)
    wanted = own.exp()
    rest, left = _rest(wanted), _rest(mine.exp())
    far = (wanted * (own - mine)).sum() + (rest * (rest.log() - left.log())).sum()
    # of an outcome outside the top, the probability is wanted in the proportion that the student has it
    slope = chances * (1 - rest / left).unsqueeze(-1)
    return far, slope.scatter_add(-1, teacher.ids, mine.exp() * (rest / left).unsqueeze(-1) - wanted)


def _rest(chances: Tensor) -> Tensor:
    return (1 - chances.sum(-1)).clamp(min=1e-6)


def apart(streams: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """How far [batch, tokens, hidden] streams are from those that are wanted, relative to these: a mean over all."""
    far = [
        ((ours.float() - theirs.float()).square().sum(-1) / theirs.float().square().sum(-1).clamp(min=1e-12)).mean()
        for ours, theirs in zip(streams, wanted, strict=True)
    ]
    return torch.stack(far).mean()


def top(logits: Tensor, count: int) -> Top:
    """A teacher's `count` likeliest tokens of [rows, vocabulary] logits."""
    logs, ids = logits.float().log_softmax(-1).topk(count, dim=-1)
    return Top(logs, ids)
