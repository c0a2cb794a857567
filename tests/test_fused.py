"""The forward pass by kernels against the oracle: every wiring, as prompts and then token by token."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.comm.base import Comm
from ladder.comm.emulated import World
from ladder.config import ModelConfig
from ladder.engine.forward import Forward
from ladder.jit import PRESENT
from ladder.kernels.launch import Kernels, Launch, References
from ladder.kernels.table import Table
from tests import oracle, test_parity_families
from tests.test_parity import FAMILIES, HYBRIDS, WIRINGS, assert_close
from tests.tolerance import apart
from tests.weights import decoder, draw, tiny

PROMPT = 5
TURNS = threading.Lock()


interpreter = pytest.mark.skipif(not PRESENT or torch.cuda.is_available(), reason="Triton's interpreter, without a GPU")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after the other."""
    monkeypatch.setattr("ladder.kernels.table.WAVE", 4)


class InTurns:
    """The kernels in Triton's interpreter, which conftest.py has asked for, and which does one thing at a time."""

    def __init__(self) -> None:
        self._kernels = Kernels(Table("any"), pdl=False)

    def __getattr__(self, name: str) -> Any:
        def op(*arguments: Any, **named: Any) -> Any:
            with TURNS:
                return getattr(self._kernels, name)(*arguments, **named)

        return op


def forward_logits(
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokens: Tensor,
    launch: Launch,
    comm: Comm | None,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """[batch, steps + 1, vocab]: of the prompt's last token, and of those that follow, each request in another slot."""
    model = decoder(config, weights, comm)
    batch = len(tokens)
    slots = list(range(batch - 1, -1, -1))
    forward = Forward(model, model.new_cache(batch, 16, dtype=cache_dtype), launch)
    # prompts in two pieces that are cut elsewhere for every sequence
    cuts = [1 + number % (PROMPT - 1) for number in range(batch)]
    first = torch.cat([tokens[number, :cut] for number, cut in enumerate(cuts)])
    forward.prefill(first, cuts, slots, torch.tensor([], dtype=torch.long))
    forward.cache.advance(cuts, slots)
    rest = torch.cat([tokens[number, cut:PROMPT] for number, cut in enumerate(cuts)])
    counts = [PROMPT - cut for cut in cuts]
    found = [forward.prefill(rest, counts, slots, torch.tensor(counts).cumsum(0) - 1)]
    forward.cache.advance(counts, slots)
    for position in range(PROMPT, tokens.shape[1]):
        inputs = torch.stack([tokens[:, position], torch.tensor(slots), torch.full((batch,), position)])
        logits, chosen, _ = forward.advance(inputs, torch.zeros(batch, dtype=torch.long))
        found.append(logits)
        assert torch.equal(chosen, model.comm.all_gather(logits)[:, : config.vocab].argmax(1))
    return model.comm.all_gather(torch.stack(found, 1))[..., : config.vocab]


def check(config: ModelConfig, size: int, launch: Any, batch: int, steps: int = 2) -> None:
    weights = draw(config)
    tokens = torch.randint(config.vocab, (batch, PROMPT + steps), generator=torch.Generator().manual_seed(3))
    expected = oracle.logits(config, weights, tokens, config.wiring.layers, size)[:, PROMPT - 1 :]
    with World(size) as world:
        for found in world.run(lambda comm: forward_logits(config, weights, tokens, launch(), comm)):
            assert_close(found, expected)


@pytest.mark.parametrize("size, batch", ((1, 1), (2, 3), (4, 1)))
@pytest.mark.parametrize("wiring", (*WIRINGS, *(" ".join(f"{row}:1" for row in hybrid) for hybrid in HYBRIDS)))
def test_wirings(wiring: str, size: int, batch: int) -> None:
    check(tiny(4).rewired(wiring), size, References, batch)


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, batch: int) -> None:
    check(tiny(4, **FAMILIES[family]).rewired("ladder"), 2, References, batch)


# The interpreter takes seconds for a model; what is left to see is that each kernel gets what its reference gets.
@interpreter
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("wiring, batch, steps", (
    ("ladder-1-2", 1, 2), ("parallel", 2, 1),
    ("desync-2x", 1, 1), ("desync-2x-1", 2, 1), ("none", 2, 1)
))  # fmt: skip
def test_kernels(wiring: str, batch: int, steps: int) -> None:
    check(tiny(2).rewired(wiring), 2, InTurns, batch, steps)


@interpreter
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("family", ("all_biases", "qk_norm", "windows"))
def test_kernels_of_families(family: str) -> None:
    rest = {**FAMILIES[family], **({"windows": (3,)} if family == "windows" else {})}
    check(tiny(1, **rest).rewired("ladder"), 1, InTurns, 1, steps=1)


@pytest.mark.parametrize("wiring", ("ladder", "parallel", "parallel-1", "desync-2x", "desync-2x-1"))
@pytest.mark.parametrize("name", test_parity_families.FAMILIES)
def test_backends_of_every_family(worlds: dict[int, World], name: str, wiring: str) -> None:
    """Norms behind sub-blocks and over all heads, caps, learned positions, experts: prefill and decode at TP 2."""
    config, weights, tokens = test_parity_families.model(name)
    config = config.rewired(wiring)
    expected = oracle.logits(config, weights, tokens, config.wiring.layers, 2)[:, PROMPT - 1 :]
    for found in worlds[2].run(lambda comm: forward_logits(config, weights, tokens, References(), comm)):
        assert apart(found, expected) <= test_parity_families.tolerance(config)
