"""Tokens are drawn from the right distribution, and the kernels draw what the reference draws.

On a GPU the kernels are compiled and launched as in the product; without one they run in Triton's interpreter.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.engine.options import SamplingParams
from ladder.engine.sampling import Sampler
from ladder.engine.scheduler import RunningSequence, SequenceSpec
from ladder.jit import PRESENT
from ladder.kernels.launch import References
from ladder.kernels.sampling.adjust import ENDS, adjust, adjust_reference, note, note_reference
from ladder.kernels.sampling.argmax import argmax_reference, choose_reference
from ladder.kernels.sampling.candidates import (
    candidates,
    candidates_reference,
    choose_candidate,
    choose_candidate_reference,
)
from ladder.kernels.sampling.random import exponential_reference, philox_reference
from ladder.kernels.sampling.sample import (
    ARGMAX,
    CANDIDATES,
    COLUMNS,
    DRAW,
    SKIP,
    Scratch,
    kept_reference,
    sample,
    sample_reference,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
VOCAB = 128256 if GPU else 5000
# mode, temperature, top-k, top-p, min-p
KINDS = [
    (DRAW, 0.8, 0, 0.95, 0.0),
    (DRAW, 1.0, 50, 1.0, 0.0),
    (DRAW, 0.7, 20, 0.8, 0.05),
    (DRAW, 1.5, 0, 1.0, 0.1),
    (ARGMAX, 1.0, 0, 1.0, 0.0),
    (DRAW, 1.0, 0, 0.3, 0.0),
    (DRAW, 1e-20, 0, 0.9, 0.0),
    (DRAW, 2.0, 0, 1.0, 0.0),
    (SKIP, 1.0, 0, 1.0, 0.0),
    (DRAW, 1.0, 1, 0.5, 0.0),
]
triton_only = pytest.mark.skipif(not PRESENT, reason="Triton is not installed")


def test_philox_is_philox() -> None:
    """Known answers of Random123: the first two of four numbers."""
    for key, counter, answer in (
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E)),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB)),
    ):
        found = philox_reference(key, torch.tensor([counter[0]]), *counter[1:])[:2]
        assert tuple(int(x) for x in found) == answer


def test_the_random_numbers_are_exponential() -> None:
    e = exponential_reference(7, 3, torch.arange(200_000)).double()
    assert bool((e > 0).all()) and abs(float(e.mean()) - 1) < 0.01 and abs(float(e.var()) - 1) < 0.03
    # the smallest are what Gumbel's trick is about: n of them below x with probability (1 - exp(-n x)) for each n
    smallest = torch.stack([exponential_reference(seed, 0, torch.arange(2000)).min() for seed in range(500)]) * 2000
    assert abs(float(smallest.mean()) - 1) < 0.15


def drawn(f: Any, logits: Tensor, kinds: list[tuple[float, ...]], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(logits)
    params = torch.zeros(batch + 2, COLUMNS)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(batch + 2, generator=generator)[:batch]
    params[slots, :5] = torch.tensor(kinds)[:batch]
    seeds = torch.randint(2**62, (batch + 2,), generator=generator)
    given = [x.to(DEVICE) for x in (logits, params, seeds, slots, torch.arange(batch) + 7)]
    chosen, tokens, last = (torch.full((n,), -7, device=DEVICE) for n in (batch, batch, batch + 2))
    f(*given, chosen, tokens, last, Scratch.of(batch, VOCAB, DEVICE), VOCAB)
    return chosen.cpu(), tokens.cpu(), last.cpu()


@triton_only
@pytest.mark.parametrize("shift", range(4 if GPU else 2))
@pytest.mark.parametrize("copies", (1, 7) if GPU else (1,))
def test_the_kernel_draws_what_the_reference_draws(shift: int, copies: int) -> None:
    """Flat and peaked logits; a batch that gives each sequence many programs, and one that gives it few."""
    kinds, scales = KINDS * copies, torch.tensor([0.0, 0.02, 1.0, 6.0])
    logits = torch.randn(len(kinds), VOCAB + 8, generator=torch.Generator().manual_seed(1))
    logits *= scales[(torch.arange(len(kinds)) + shift) % 4, None]
    logits[:, VOCAB:] = 1e9  # not part of the vocabulary
    found, expected = (drawn(f, logits, kinds) for f in (sample, sample_reference))
    for one, other in zip(found, expected, strict=True):
        # a logarithm that is rounded otherwise may change a choice between two that are almost equal
        assert (one != other).sum() <= len(kinds) // 50
    assert (found[0][8::10] == -7).all() and (found[0][:8] >= 0).all()


@triton_only
def test_what_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(4, VOCAB)
    logits[0, 5], logits[1, 6], logits[2] = nan, inf, -inf
    logits[3], logits[3, 9] = -inf, 2.0
    for f in (sample, sample_reference):
        for kind in (KINDS[0], KINDS[4], KINDS[2]):
            chosen, tokens, _ = drawn(f, logits, [kind] * 4)
            assert chosen.tolist() == [-1, -1, -1, 9] and tokens.tolist() == [0, 0, 0, 9]


def chances(x: Tensor, temperature: float, k: int, top_p: float, min_p: float) -> Tensor:
    kept = kept_reference(x, temperature, k, top_p, min_p)
    p = torch.zeros(len(x), dtype=torch.float64)
    p[kept] = (x[kept].double() / temperature).softmax(-1)
    return p


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] == DRAW and kind[1] > 1e-6])
def test_draws_follow_the_distribution(kind: tuple[float, ...]) -> None:
    """Chi-square of 1,200 draws: at most what one in ten thousand draws of the right distribution exceeds."""
    _, temperature, k, top_p, min_p = kind
    x = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    p = chances(x, temperature, int(k), top_p, min_p)
    count = 1200
    found = torch.zeros(40, dtype=torch.float64)
    params = torch.tensor([[*kind, 1.0, 0.0, 0.0]])
    for position in range(count):
        chosen = torch.zeros(1, dtype=torch.long)
        sample_reference(
            x[None], params, torch.tensor([11]), torch.tensor([0]), torch.tensor([position]), chosen, chosen.clone(),
            torch.zeros(1, dtype=torch.long), None, 40,
        )  # fmt: skip
        found[chosen] += 1
    assert follows(found, p)


def follows(found: Tensor, p: Tensor) -> bool:
    """Whether one in ten thousand draws or more of the distribution `p` is as far from it as the counts `found`."""
    count = found.sum()
    if found[p == 0].any():
        return False
    large = p * count >= 5
    observed = torch.cat([found[large], found[~large].sum()[None]])
    expected = torch.cat([p[large], p[~large].sum()[None]]) * count
    expected, observed = expected[expected > 0], observed[expected > 0]
    degrees = len(expected) - 1
    square = float(((observed - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: the cube root is about normal; 3.72 deviations are one in ten thousand
    bound = degrees * (1 - 2 / (9 * max(1, degrees)) + 3.72 * (2 / (9 * max(1, degrees))) ** 0.5) ** 3
    return degrees == 0 or square < bound


def split(count: int, ranks: int) -> list[slice]:
    """Every rank's block of a vocabulary, as `VocabularyRows` has them."""
    step = -(-count // ranks)
    return [slice(min(rank * step, count), min((rank + 1) * step, count)) for rank in range(ranks)]


REFERENCES, BY_KERNELS = (candidates_reference, choose_candidate_reference), (candidates, choose_candidate)


def drawn_by_ranks(
    functions: tuple[Any, Any], logits: Tensor, kinds: list[tuple[float, ...]], ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `drawn` does, but every rank has a block of the logits, whose step has room for what the last rank lacks."""
    batch, vocab = logits.shape
    step = -(-vocab // ranks)
    params = torch.zeros(batch + 2, COLUMNS)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(batch + 2, generator=generator)[:batch]
    params[slots, :5] = torch.tensor(kinds)
    seeds = torch.randint(2**62, (batch + 2,), generator=generator).to(DEVICE)
    blocks = split(vocab, ranks)
    own = [torch.full((batch, step), 1e9, device=DEVICE) for _ in blocks]  # not part of the vocabulary
    for block, x in zip(blocks, own, strict=True):
        x[:, : block.stop - block.start] = logits[:, block].to(DEVICE)
    shares = [(x, block.start, block.stop - block.start) for x, block in zip(own, blocks, strict=True)]
    best = torch.cat([argmax_reference(*share) for share in shares], 1)
    tokens, last = (torch.full((n,), -7, device=DEVICE) for n in (batch, batch + 2))
    slots, params, positions = slots.to(DEVICE), params.to(DEVICE), torch.arange(batch, device=DEVICE) + 6
    chosen = choose_reference(best, tokens, positions, slots, last)
    draw, choose = functions
    given = (best, params, seeds, slots, positions, chosen)
    choose(torch.cat([draw(x, *given, *at) for x, *at in shares], 1), params, slots, chosen, tokens, last)
    return chosen.cpu(), tokens.cpu(), last.cpu()


@pytest.mark.parametrize("functions", (REFERENCES, pytest.param(BY_KERNELS, marks=triton_only)))
@pytest.mark.parametrize("ranks", (1, 3, 8))
def test_the_best_of_all_ranks_is_the_sample_of_one(functions: tuple[Any, Any], ranks: int) -> None:
    """Blocks that begin anywhere; flat and peaked logits; other modes keep the greedy choice."""
    kinds = [(DRAW, t, 0, 1.0, m) for t, m in ((0.8, 0.0), (1.0, 0.1), (1e-20, 0.0), (2.0, 0.0), (1.5, 1.0))]
    kinds += [(SKIP, 1.0, 0, 1.0, 0.0), (ARGMAX, 1.0, 0, 1.0, 0.0)]
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(2))
    logits *= torch.tensor([0.02, 2.0])[torch.arange(len(kinds)) % 2, None]
    expected = drawn(sample_reference, logits, kinds)[0]
    expected[5] = logits[5].argmax()
    modes = [(CANDIDATES if kind[0] == DRAW else kind[0], *kind[1:]) for kind in kinds]
    chosen, tokens, last = drawn_by_ranks(functions, logits, modes, ranks)
    assert torch.equal(chosen, expected) and torch.equal(tokens, expected)
    assert sorted(last.tolist()) == sorted([-7, -7, *expected.tolist()])


@pytest.mark.parametrize("functions", (REFERENCES, pytest.param(BY_KERNELS, marks=triton_only)))
def test_what_is_not_finite_on_one_rank(functions: tuple[Any, Any]) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(5, 40)
    logits[0, 5], logits[1, 36], logits[2] = nan, inf, -inf
    logits[3], logits[3, 9] = -inf, 2.0
    logits[4, 10:] = -inf
    chosen, tokens, _ = drawn_by_ranks(functions, logits, [(CANDIDATES, 0.8, 0, 1.0, 0.0)] * 5, 4)
    assert chosen.tolist()[:4] == [-1, -1, -1, 9] and 0 <= int(chosen[4]) < 10
    assert torch.equal(tokens, chosen.clamp(min=0))


@pytest.mark.parametrize("min_p", (0.0, 0.05))
def test_draws_of_two_ranks_follow_the_distribution(min_p: float) -> None:
    x = torch.randn(39, generator=torch.Generator().manual_seed(3)) * 2
    chosen, _, _ = drawn_by_ranks(REFERENCES, x.expand(1200, -1), [(CANDIDATES, 1.3, 0, 1.0, min_p)] * 1200, 2)
    found = torch.bincount(chosen, minlength=39).double()
    assert follows(found, chances(x, 1.3, 0, 1.0, min_p))
    assert not follows(found, chances(x, 0.8, 0, 1.0, min_p))  # the test can fail


def test_filters_as_in_transformers() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0)) * 3
    for temperature, k, p, least in [
        (0.7, 10, 0.9, 0.0),
        (1.5, 97, 0.5, 0.01),
        (1.0, 3, 0.99, 0.0),
        (0.3, 50, 0.2, 0.1),
    ]:
        theirs = TemperatureLogitsWarper(temperature)(torch.zeros(1, 1, dtype=torch.long), logits)
        for warper in (MinPLogitsWarper(least) if least else None, TopKLogitsWarper(k), TopPLogitsWarper(p)):
            theirs = theirs if warper is None else warper(torch.zeros(1, 1, dtype=torch.long), theirs)
        ours = chances(logits[0], temperature, k, p, least)
        torch.testing.assert_close(ours, theirs[0].double().softmax(-1), atol=1e-6, rtol=1e-5)


@triton_only
def test_adjusted_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    batch, slots = 3, torch.tensor([4, 2, 0])
    x = torch.randn(batch, VOCAB + 8, generator=generator)
    params = torch.zeros(5, COLUMNS)
    params[:, 5:] = torch.tensor([1.3, 0.5, -0.2])
    known = (
        torch.randint(9, (5, VOCAB), generator=generator) * (torch.rand(5, VOCAB, generator=generator) < 0.3)
    ).int()
    known[:, :4] |= ENDS
    bias, until, positions = torch.randn(5, VOCAB, generator=generator), torch.arange(5, 10), torch.tensor([8, 7, 5])
    for more in (None, bias):
        given = [None if y is None else y.to(DEVICE) for y in (x, params, known, more, until, slots, positions)]
        found, expected = (f(*given, VOCAB).cpu() for f in (adjust, adjust_reference))
        assert torch.equal(found.isinf(), expected.isinf()) and expected.isinf().sum(1).tolist() == [4, 0, 0]
        rest = ~expected.isinf()
        assert (found[rest] - expected[rest]).abs().max() < 1e-5
    counts = [known.clone().to(DEVICE) for _ in range(2)]
    for f, count in zip((note, note_reference), counts, strict=True):
        f(count, slots.to(DEVICE), torch.tensor([5, -1, 9]).to(DEVICE))
    assert torch.equal(*counts) and int((counts[0].cpu() - known).sum()) == 4


def test_penalties_as_in_transformers_and_vllm() -> None:
    """Repetition: prompt and output, by sign; presence and frequency: output only."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={4: 3.0})
    sampler = Sampler(2, 6, (5,), torch.device("cpu"), References())
    sampler.begin(RunningSequence(SequenceSpec(0, (0, 1), 9, params), slot=1, new=[1, 2, 2]))
    assert sampler._known is not None
    x = torch.tensor([[3.0, -3.0, 3.0, 3.0, 3.0, 3.0]])
    y = adjust_reference(
        x, sampler._params, sampler._known, sampler._bias, sampler._numbers[1], torch.tensor([1]), torch.tensor([5]), 6
    )
    assert y.tolist()[0] == pytest.approx([2.0, -4.5 - 0.75, 2.0 - 1.25, 3.0, 6.0, 3.0])


def test_no_end_before_the_least_length() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,))
    sampler = Sampler(1, 6, (5,), torch.device("cpu"), References())
    sampler.begin(RunningSequence(SequenceSpec(0, (0, 1), 9, params), slot=0))
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 3.0, 8.0]])
    sequences = [RunningSequence(SequenceSpec(0, (0, 1), 9, params), slot=0)]
    for position, token in ((2, 4), (3, 4), (4, 3)):
        chosen = torch.tensor([3])
        sampler.redo(logits, sequences, torch.tensor([0]), torch.tensor([position]), chosen.clone(), chosen)
        assert chosen.tolist() == [token]
