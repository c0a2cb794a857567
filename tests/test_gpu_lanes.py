"""On a GPU: decode steps on two lanes have the bits of one lane, again and again, and with poisoned memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.checkpoint import Random, load
from ladder.comm.base import Comm, Solo
from ladder.comm.link import Link
from ladder.comm.one_rank import LibraryRank, OneRank
from ladder.comm.signalled import Signalled
from ladder.config import ModelConfig
from ladder.engine.forward import Forward, Schedule
from ladder.engine.graphs.steps import Graphs
from ladder.kernels.launch import Kernels
from ladder.model import Decoder
from tests.families import FAMILIES, make
from tests.test_gpu import Late
from tests.test_gpu import logits as logits_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO = (Schedule(2), Schedule(2, pdl=False))
WIRINGS = (
    *("standard", "ladder", "ladder-2", "ladder-1-2", "ladder-0-1", "parallel", "parallel-1", "parallel-2"),
    *("desync-2x", "desync-3x", "desync-2x-1", "desync-3x-1", "none", "standard:2 ladder:2 parallel-1:2"),
)
CONFIG = ModelConfig(256, 6, 8, 2, 512, vocab=500)
REPLAYS = 30


class Poison(TorchDispatchMode):
    """New memory holds no number: what another lane still reads of it is lost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and isinstance(x, Tensor) and x.is_cuda and x.is_floating_point():
            x.fill_(float("nan"))
        return x


def comm_of(kind: str, device: torch.device) -> Comm:
    sums = CONFIG.most_all_reduces + 1
    match kind:
        case "alone":
            return Solo()
        case "no link":
            return OneRank(4)
        case "link":
            return Signalled([OneRank(4, Link(20e-6, 1e12))], device, sums)
        case "library":
            return Signalled([LibraryRank(4, Link(20e-6, 1e12), multiprocessors=8)], device, sums)
        case "two links":
            return Signalled([OneRank(4, Link(20e-6, 1e12)) for _ in range(2)], device, sums)
        case _:
            return Signalled([Late()], device, sums)  # results that are no numbers until their flags are set


def logits(forward: Forward, schedule: Schedule, batch: int, replays: int) -> list[Tensor]:
    """Of decode steps at the first positions, each replayed so often: all replays must have the same bits."""
    graphs, found, vocab = Graphs(forward, batch, (schedule,)), [], forward.model.config.vocab
    for position in range(3):
        tokens = [(7 * position + 3 * n) % vocab for n in range(batch)]
        first = logits_of(graphs, tokens, list(range(batch)), [position] * batch)
        for _ in range(replays):
            assert torch.equal(logits_of(graphs, tokens, list(range(batch)), [position] * batch), first)
        found.append(first)
    return found


def check(model: Decoder, batch: int, replays: int = REPLAYS) -> None:
    device = model.embed_tokens.weight.device
    found: dict[Schedule, list[Tensor]] = {}
    with torch.inference_mode():
        for schedule in (Schedule(), *TWO):
            for poisoned in (False, True):
                forward = Forward(model, model.new_cache(batch + 1, 32), Kernels.on(device))
                if poisoned:
                    with Poison():
                        steps = logits(forward, schedule, batch, 2)
                else:
                    steps = logits(forward, schedule, batch, replays)
                expected = found.setdefault(Schedule(), steps)
                assert all(x.isfinite().all() for x in steps), (schedule, poisoned)
                assert all(torch.equal(x, y) for x, y in zip(steps, expected, strict=True)), (schedule, poisoned)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("alone", "no link", "link", "library", "two links", "late"))
@pytest.mark.parametrize("wiring", WIRINGS)
def test_every_wiring(wiring: str, kind: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    model = load(Decoder(CONFIG.rewired(wiring), comm_of(kind, device), device, dtype), Random(1, 0.05))
    check(model, 1)


@pytest.mark.parametrize("batch", (2, 16, 33, 64))
@pytest.mark.parametrize("wiring", ("ladder", "ladder-2", "parallel-1", "desync-2x-1"))
def test_batches(wiring: str, batch: int) -> None:
    device = torch.device("cuda", 0)
    model = load(Decoder(CONFIG.rewired(wiring), comm_of("late", device), device, torch.bfloat16), Random(1, 0.05))
    check(model, batch, 5)


@pytest.mark.parametrize("wiring", ("ladder", "parallel-1"))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Any, family: str, wiring: str) -> None:
    make(family, tmp_path)
    device = torch.device("cuda", 0)
    config = ModelConfig.from_directory(tmp_path).rewired(wiring)
    check(load(Decoder(config, Solo(), device), Random(1, 0.05)), 3, 5)


@pytest.mark.parametrize("batch", (1, 16, 64))
@pytest.mark.parametrize("linked", (False, True))
@pytest.mark.parametrize("size, tp", (("llama-3-8b", 1), ("llama-3-70b", 8)))
def test_tuned_sizes(size: str, tp: int, linked: bool, batch: int) -> None:
    """Kernels have configurations of their own on two lanes, but add up in the same order."""
    device, config = torch.device("cuda", 0), ModelConfig.named(size).first(3).rewired("ladder")
    comm: Comm = Solo() if tp == 1 else OneRank(tp)
    if linked and tp > 1:
        comm = Signalled([OneRank(tp, Link(8e-6, 7e10))], device, config.most_all_reduces + 1)
    check(load(Decoder(config, comm, device, torch.bfloat16), Random(1, 0.02)), batch, 3)


def test_a_thousand_replays() -> None:
    device = torch.device("cuda", 0)
    for wiring in ("ladder", "parallel-1"):
        comm = comm_of("link", device)
        model = load(Decoder(CONFIG.rewired(wiring), comm, device, torch.bfloat16), Random(1, 0.05))
        check(model, 1, 1000)
