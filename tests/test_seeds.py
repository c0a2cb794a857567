"""The same seed gives the same tokens: alone, in any batch, at any TP degree, after a preemption and after a shared
beginning; and log-probabilities are the model's.
"""

import pytest
import torch
from torch import Tensor

from ladder.checkpoint import Random, load
from ladder.comm.base import Comm, Pending, Solo
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.engine.model_runner import AddSequence, ModelRunner, NewToken
from ladder.engine.options import SamplingParams
from ladder.engine.scheduler import SequenceSpec
from ladder.kernels.launch import Kernels, References
from ladder.layers.cache import BLOCK, RESERVED
from ladder.model import Decoder
from tests.graphs import recorded

CONFIG = ModelConfig.named("tiny").rewired("ladder")
LIMIT = 40
PROMPTS = [tuple(range(1, 20)), (5, 17, 9), tuple(range(200, 260)), tuple(range(200, 250)), (7,) * 33, (30, 31), (8, 9)]
KINDS = [
    SamplingParams(LIMIT),
    SamplingParams(LIMIT, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(LIMIT, temperature=1.0, top_k=20, seed=2, logprobs=3),
    SamplingParams(LIMIT, temperature=1.2, min_p=0.05, seed=3, repetition_penalty=1.2, frequency_penalty=0.2),
    SamplingParams(LIMIT, repetition_penalty=1.1, min_tokens=5, logit_bias={3: 2.0}),
    SamplingParams(LIMIT, temperature=1.0, seed=4),
    SamplingParams(LIMIT, temperature=1.5, min_p=0.02, seed=5),
]
GREEDY, CANDIDATES, WHOLE = [0], [5, 6], [1, 2, 3, 4]  # which of them need no more than a rank's best tokens


def specs(order: list[int]) -> list[SequenceSpec]:
    return [SequenceSpec(id, PROMPTS[id], LIMIT, KINDS[id]) for id in order]


def run(
    comm: Comm,
    order: list[int],
    slots: int = 8,
    blocks: int | None = None,
    captured: bool = False,
    chunk: int = 64,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[dict[int, list[int]], int]:
    """The tokens of every sequence, and how often one was preempted."""
    model = load(Decoder(CONFIG, comm, device, dtype), Random(5, 0.15))
    blocks = None if blocks is None else RESERVED + blocks
    launch = None if not captured else References() if device == "cpu" else Kernels.on(torch.device(device))
    runner = ModelRunner(model, slots, chunk, launch, captured, blocks, cache_dtype)
    runner.apply(map(AddSequence, specs(order)))
    found: dict[int, list[int]] = {}
    while runner.busy:
        for token in runner.step():
            assert token.token is not None
            found.setdefault(token.id, []).append(token.token)
    return found, runner._scheduler.preemptions


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Each by itself."""
    return {id: run(Solo(), [id])[0][id] for id in range(len(PROMPTS))}


@pytest.mark.parametrize("order", (list(range(7)), [4, 6, 2, 0, 3, 5, 1]))
def test_in_any_batch(alone: dict[int, list[int]], order: list[int]) -> None:
    assert run(Solo(), order)[0] == alone
    assert run(Solo(), order, slots=2)[0] == alone


@pytest.mark.parametrize("size", (2, 4))
def test_at_any_degree(alone: dict[int, list[int]], size: int) -> None:
    with World(size) as world:
        assert [found for found, _ in world.run(lambda comm: run(comm, list(range(7))))] == [alone] * size
        # whatever the others of a batch need
        assert world.run(lambda comm: run(comm, [5])[0]) == [{5: alone[5]}] * size
        assert world.run(lambda comm: run(comm, [6, 0])[0]) == [{6: alone[6], 0: alone[0]}] * size


@pytest.mark.parametrize("size", (1, 2))
def test_from_graphs(monkeypatch: pytest.MonkeyPatch, alone: dict[int, list[int]], size: int) -> None:
    """A step begins with the tokens that were chosen on the device after the last one, in whatever way."""
    recorded(monkeypatch)
    with World(size) as world:
        found = world.run(lambda comm: run(comm, [4, 6, 2, 0, 3, 5, 1], slots=5, captured=True)[0])
    assert found == [alone] * size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(alone: dict[int, list[int]]) -> None:
    """By kernels and graphs in float32: alone, in a batch, with prompts that come while others are decoded, and with
    too few blocks for all.
    """
    for id, tokens in alone.items():
        assert run(Solo(), [id], captured=True, device="cuda")[0] == {id: tokens}
    assert run(Solo(), [4, 6, 2, 0, 3, 5, 1], captured=True, device="cuda")[0] == alone
    assert run(Solo(), list(range(7)), slots=3, captured=True, device="cuda")[0] == alone
    found, preemptions = run(Solo(), [0, 1, 4], blocks=10, captured=True, device="cuda")
    assert preemptions > 0 and found == {id: alone[id] for id in (0, 1, 4)}


class Spy:
    """A communicator that writes down the shapes that are gathered."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.size, self.rank = inner.size, inner.rank
        self.gathered: list[torch.Size] = []

    def all_reduce(self, x: Tensor) -> Pending:
        return self._inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.shape)
        return self._inner.all_gather(x)


@pytest.mark.parametrize("order", (GREEDY + CANDIDATES, GREEDY + CANDIDATES + WHOLE, WHOLE))
def test_logits_are_gathered_where_candidates_do_not_suffice(order: list[int]) -> None:
    """Those of as many positions as the other sequences have tokens, and never a sequence's that needs none."""
    with World(2) as world:
        spies = [Spy(comm) for comm in world.ranks]
        found = world.run(lambda comm: run(spies[comm.rank], order)[0])
    wide = [len(tokens) for id, tokens in found[0].items() if id in WHOLE]
    for spy in spies:
        assert {width for _, width in spy.gathered} <= {2, CONFIG.vocab // 2}
        assert sum(rows for rows, width in spy.gathered if width > 2) == sum(wide)


def test_after_preemptions(alone: dict[int, list[int]]) -> None:
    """Three sequences of about six blocks each share twelve."""
    found, preemptions = run(Solo(), [0, 1, 4], blocks=10)
    assert preemptions > 0 and found == {id: alone[id] for id in (0, 1, 4)}


def test_after_a_shared_beginning(alone: dict[int, list[int]]) -> None:
    """The second prompt begins as the first one does, which was read before."""
    model = load(Decoder(CONFIG), Random(5, 0.15))
    runner = ModelRunner(model, 4, 64)
    found: dict[int, list[int]] = {}
    for spec in specs([2, 3]):
        runner.apply([AddSequence(spec)])
        free = runner._scheduler.blocks.free
        found[spec.id] = [token.token for token in runner.step() if token.token is not None]
        taken = free - runner._scheduler.blocks.free
        assert taken == len(spec.tokens) // BLOCK + 1 or spec.id == 3
        while runner.busy:
            found[spec.id] += [token.token for token in runner.step() if token.token is not None]
    assert found == {id: alone[id] for id in (2, 3)}
    assert len(set(runner._scheduler.blocks._named)) >= 3


def test_log_probabilities_are_the_models() -> None:
    model = load(Decoder(CONFIG), Random(5, 0.15))
    runner = ModelRunner(model, 4, 64)
    runner.apply(map(AddSequence, specs([2, 0])))
    tokens: list[NewToken] = []
    while runner.busy:
        tokens += [token for token in runner.step() if token.id == 2]
    text = [*PROMPTS[2], *(token.token for token in tokens if token.token is not None)]
    with torch.inference_mode():
        expected = model(torch.tensor([text]))[0, len(PROMPTS[2]) - 1 : -1, : CONFIG.vocab].log_softmax(-1)
    for token, row in zip(tokens, expected, strict=True):
        assert token.token is not None and token.logprobs is not None and token.logprobs.token == token.token
        assert token.logprobs.logprob == pytest.approx(float(row[token.token]), abs=1e-4)
        top = row.topk(3)
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)
