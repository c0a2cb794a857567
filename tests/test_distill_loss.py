"""The loss of distillation, and its gradient, against autograd over the formula."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ladder.train.head import Logits, chunks
from ladder.train.head import logits as module
from ladder.train.loss import (
    LossWeights,
    TopTokens,
    _add_product,
    distillation_loss,
    hidden_distance,
    next_tokens,
    top_tokens,
)
from tests.tolerance import summed

ROWS, VOCABULARY = 14, 37
TERMS = ROWS * VOCABULARY + 4  # of a loss; and on the way to each: log-softmax, exp, difference, product


def logits(seed: int) -> Tensor:
    return 3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets() -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, ROWS // 2), generator=torch.Generator().manual_seed(5))
    return next_tokens(tokens).flatten()


def naive(student: Tensor, teacher: Tensor | TopTokens | None, weights: LossWeights) -> Tensor:
    """The formula, outcome by outcome."""
    ours = student.log_softmax(-1)
    loss = weights.lm * F.cross_entropy(student, targets(), ignore_index=-100)
    if isinstance(teacher, Tensor):
        theirs = teacher.log_softmax(-1)
        loss = loss + weights.kl * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    elif teacher is not None:
        rows = []
        for row in range(ROWS):
            known = [int(token) for token in teacher.ids[row]]
            p = [teacher.log_probs[row, at].exp() for at in range(len(known))]
            q = [ours[row, token].exp() for token in known]
            p.append(1 - torch.stack(p).sum())
            q.append(1 - torch.stack(q).sum())
            rows.append(sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)))
        loss = loss + weights.kl * torch.stack(rows).mean()  # type: ignore[arg-type]
    return loss


@pytest.mark.parametrize("kind", ["logits", "top", "none"])
@pytest.mark.parametrize("weights", [LossWeights(1.0, 0.0), LossWeights(0.7, 0.3), LossWeights(0.0, 1.0)])
@pytest.mark.parametrize("at_a_time", [1, 3 * VOCABULARY, 10_000])
def test_loss_and_gradient(kind: str, weights: LossWeights, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", at_a_time)
    found_top = top_tokens(logits(2), 6)
    teacher = {"logits": logits(2), "top": TopTokens(found_top.log_probs.double(), found_top.ids), "none": None}[kind]
    ours, theirs = (logits(1).requires_grad_() for _ in range(2))
    found = 2 * distillation_loss(ours, teacher, targets(), weights)
    wanted = 2 * naive(theirs, teacher, weights)
    found.backward()
    if wanted.requires_grad:
        wanted.backward()
    pieces = -(-ROWS // max(1, at_a_time // VOCABULARY))  # whose losses, none negative, are added in float32
    assert abs(found.item() - wanted.item()) <= summed(pieces + 1, torch.float32, wanted.item())
    assert ours.grad is not None and theirs.grad is not None
    # what the top leaves is 1 minus a sum: its relative error is as much larger as it is smaller than 1
    left = smallest_rest(teacher, logits(1)) if isinstance(teacher, TopTokens) else 1.0
    assert (ours.grad - theirs.grad).abs().max() <= summed(VOCABULARY, torch.float64, 1 / left)


WIDTH = 5


def parameters(bias: bool) -> list[Tensor]:
    """What a student's head reads, its weight, and perhaps a bias."""
    draw = torch.Generator().manual_seed(7)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else []))
    return [0.7 * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def teachers(kind: str) -> tuple[Any, Any]:
    """As the loss gets it, and as the formula does."""
    hidden, weight, bias = parameters(True)
    whole = F.linear(2 * hidden, weight, bias)
    top = top_tokens(whole, 6)
    top = TopTokens(top.log_probs.double(), top.ids)
    product = Logits(2 * hidden, weight, bias, torch.float64)
    return {"whole": (whole, whole), "product": (product, whole), "top": (top, top), "none": (None, None)}[kind]


@pytest.mark.parametrize("weights", [LossWeights(1.0, 0.0), LossWeights(0.7, 0.3), LossWeights(0.0, 1.0)])
@pytest.mark.parametrize("kind", ["whole", "product", "top", "none"])
@pytest.mark.parametrize("at_a_time", [1, 5, 7, 100])  # tokens, of 14
def test_with_the_heads_product(
    at_a_time: int, kind: str, weights: LossWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gradient that is wanted is autograd's over whole logits, and none is computed that is not: of a head that
    is trained, tied to the embedding, or frozen, with a bias and without.
    """
    monkeypatch.setattr(module, "CHUNK_LOGITS", at_a_time * VOCABULARY)
    teacher, same = teachers(kind)
    ids = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(8))
    for bias, trained, tied in itertools.product([False, True], [False, True], [False, True]):
        found, wanted = (parameters(bias) for _ in range(2))
        for each in (found, wanted):
            each[0].requires_grad_()
            for weight in each[1:]:
                weight.requires_grad_(trained)
        read, read_naively = ((each[0] + each[1][ids] if tied else each[0] * 1) for each in (found, wanted))
        student = Logits(read, found[1], found[2] if bias else None, torch.float64)
        ours = 3 * distillation_loss(student, teacher, targets(), weights)
        theirs = 3 * naive(F.linear(read_naively, *wanted[1:]), same, weights)
        ours.backward()
        if theirs.requires_grad:
            theirs.backward()
        left = smallest_rest(teacher, student.cast()[:]) if isinstance(teacher, TopTokens) else 1.0
        assert abs(ours.item() - theirs.item()) <= summed(ROWS + 1, torch.float32, theirs.item())
        for one, other in zip(found, wanted, strict=True):
            assert (one.grad is None) == (not one.requires_grad)
            if one.grad is not None:
                expected = torch.zeros_like(one) if other.grad is None else other.grad
                size = max(1.0, float(expected.abs().max()))
                # sums over the vocabulary and over the tokens, of terms whose relative error is that of the rest
                assert (one.grad - expected).abs().max() <= summed(VOCABULARY + ROWS, torch.float64, 30 * size / left)


def test_gradients_of_the_heads_weight_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, of as many chunks as there are tokens: what is added is not rounded to bfloat16 each time."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    hidden, weight = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, requires_grad=True)
    wanted = torch.zeros(4096, dtype=torch.long)
    loss = distillation_loss(Logits(hidden, weight, None, torch.bfloat16), None, wanted, LossWeights(0.0, 4096.0))
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]  # in bfloat16, 0.5 more than 128 is 128


def test_chunks_are_of_one_size_where_a_divisor_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1000)
    for tokens, vocabulary, sizes in (
        (64, 10, [64]), (200, 10, [100, 100]), (128, 10, [64, 64]), (101, 10, [100, 1]), (6, 300, [3, 3]),
        (4, 5000, [1, 1, 1, 1]),
    ):  # fmt: skip
        parts = list(chunks((tokens, vocabulary), torch.device("cpu")))
        assert [part.stop - part.start for part in parts] == sizes
        assert [at for part in parts for at in range(part.start, part.stop)] == list(range(tokens))


def largest() -> float:
    """What no term exceeds: of log-probabilities and their differences."""
    return 2 * max(float(logits(seed).abs().max()) for seed in (1, 2)) + math.log(VOCABULARY)


def smallest_rest(teacher: TopTokens, logits: Tensor) -> float:
    """The least probability that the teacher or the student has outside the teacher's top."""
    student = logits.softmax(-1).gather(-1, teacher.ids)
    return float((1 - torch.stack([teacher.log_probs.exp(), student]).sum(-1)).min())


def test_half_precision_is_near_and_keeps_its_type() -> None:
    ours = logits(1).bfloat16().requires_grad_()
    found = distillation_loss(ours, logits(2).bfloat16(), targets(), LossWeights(1.0, 0.5))
    found.backward()
    wanted = naive(logits(1).bfloat16().double(), logits(2).bfloat16().double(), LossWeights(1.0, 0.5))
    assert abs(found.item() - wanted.item()) <= summed(TERMS, torch.float32, 1.5 * largest())  # the logits are exact
    assert ours.grad is not None and ours.grad.dtype == torch.bfloat16


def test_the_top_says_what_the_whole_says_the_better_the_larger_it_is() -> None:
    whole = distillation_loss(logits(1), logits(2), targets(), LossWeights(1.0, 0.0)).item()
    tops = [top_tokens(logits(2), k) for k in (1, 4, 16, VOCABULARY)]
    far = [distillation_loss(logits(1), each, targets(), LossWeights(1.0, 0.0)).item() for each in tops]
    assert far == sorted(far) and abs(far[-1] - whole) <= summed(TERMS, torch.float32, largest())


def test_streams_apart() -> None:
    """Every token counts alike, whatever its size; nothing where they are the same."""
    draw = torch.Generator().manual_seed(6)
    ours, theirs = (
        [torch.randn(2, 3, 5, dtype=torch.float64, generator=draw) * scale for scale in (1, 100)] for _ in range(2)
    )
    pairs = [
        (a, b)
        for mine, wanted in zip(ours, theirs, strict=True)
        for a, b in zip(mine.reshape(-1, 5), wanted.reshape(-1, 5), strict=True)
    ]
    expected = sum(float((a - b) @ (a - b) / (b @ b)) for a, b in pairs) / len(pairs)
    # in float32: both are rounded before their difference is taken, which may be smaller than they are
    total = sum(float((a.abs() + b.abs()).square().sum() / (b @ b)) for a, b in pairs) / len(pairs)
    assert abs(float(hidden_distance(ours, theirs)) - expected) <= summed(5 + len(pairs) + 6, torch.float32, total)
    assert hidden_distance(theirs, theirs) == 0


def test_targets_are_the_next_tokens() -> None:
    assert next_tokens(torch.tensor([[4, 5, 6], [7, 8, 9]])).tolist() == [[5, 6, -100], [8, 9, -100]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_product_is_added_in_float32() -> None:
    a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((96, 200), (96, 72)))
    total = torch.randn(200, 72, device="cuda")
    expected = total.double() + a.mT.double() @ b.double()
    _add_product(total, a.mT, b)
    assert (total - expected).norm() < 1e-5 * expected.norm()
