"""Two lanes: the same bits as one, no race however they run, and independent sub-blocks beside each other."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.bench.tune import COMPILED_LAYERS, LAYERS
from ladder.comm.base import Comm, Solo
from ladder.comm.emulated import World
from ladder.comm.one_rank import OneRank
from ladder.config import ModelConfig
from ladder.engine.forward import Forward
from ladder.kernels.launch import References
from ladder.lanes import Lanes, Made, OneLane, Order
from ladder.wiring import independent
from tests import test_parity_families
from tests.races import Clock, Race, RaceDetector, WatchedComm, WatchedLanes, beside
from tests.test_parity import HYBRIDS, WIRINGS
from tests.weights import decoder, draw, tiny

PATTERNS = (*WIRINGS, *(" ".join(f"{row}:1" for row in hybrid) for hybrid in HYBRIDS))
STEPS = 2


def steps(
    config: ModelConfig, weights: dict[str, Tensor], comm: Comm, lanes: Lanes, batch: int, launch: Any = None
) -> list[Tensor]:
    """The logits of decode steps from the first token on."""
    model = decoder(config, weights, comm)
    forward = Forward(model, model.new_cache(batch, 4), launch or References(), lanes)
    tokens = torch.randint(config.vocab, (STEPS, batch), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(batch)
    return [forward.decode(tokens[n], slots, torch.full((batch,), n)) for n in range(STEPS)]


def watched(
    config: ModelConfig, weights: dict[str, Tensor], size: int, batch: int, lanes: WatchedLanes, launch: Any = None
) -> list[Tensor]:
    """The same on watched lanes, and with an all-reduce on one more."""
    with RaceDetector(lanes):
        return steps(config, weights, WatchedComm(size, lanes) if size > 1 else Solo(), lanes, batch, launch)


def check(config: ModelConfig, weights: dict[str, Tensor], size: int, batch: int) -> None:
    alone = WatchedComm(size, WatchedLanes(1)) if size > 1 else Solo()
    expected = steps(config, weights, alone, OneLane(), batch)
    found = watched(config, weights, size, batch, WatchedLanes(2))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("size, batch", ((1, 1), (2, 3)))
@pytest.mark.parametrize("wiring", PATTERNS)
def test_the_same_bits_and_no_race(wiring: str, size: int, batch: int) -> None:
    config = tiny(4).rewired(wiring)
    check(config, draw(config), size, batch)


@pytest.mark.parametrize("wiring, size", (("ladder", 2), ("ladder-2", 1), ("parallel-1", 1), ("desync-2x-1", 2)))
@pytest.mark.parametrize("name", test_parity_families.FAMILIES)
def test_every_family(name: str, wiring: str, size: int) -> None:
    config, weights, _ = test_parity_families.model(name)
    check(config.rewired(wiring), weights, size, 2)


@pytest.mark.parametrize("wiring", ("ladder", "parallel-1", "desync-2x-1", "standard:2 ladder-2:2"))
@pytest.mark.parametrize("name", ("mixtral", "gemma2", "olmo2"))
def test_all_reduces_in_the_lane_that_begins_them(name: str, wiring: str) -> None:
    """As of a rank that is measured without a link: nobody but the lanes themselves keeps an order."""
    config, weights, _ = test_parity_families.model(name)
    config, lanes = config.rewired(wiring), WatchedLanes(2)
    expected = steps(config, weights, OneRank(2), OneLane(), 2)
    with RaceDetector(lanes):
        found = steps(config, weights, OneRank(2), lanes, 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("wiring", ("ladder", "parallel-1", "desync-3x-1", "standard:1 ladder-2:3"))
def test_ranks_that_exist(worlds: dict[int, World], wiring: str) -> None:
    config = tiny(4).rewired(wiring)
    weights = draw(config)
    for one, two in worlds[2].run(
        lambda comm: [steps(config, weights, comm, lanes, 2) for lanes in (OneLane(), WatchedLanes(2))]
    ):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


class Spans(References):
    """Kernels that note the lanes' clocks where a sub-block begins to compute and where it has ended."""

    def __init__(self, lanes: WatchedLanes) -> None:
        self._lanes = lanes
        self.begun: list[Clock] = []
        self.ended: list[Clock] = []

    def norm_project(self, source: Any, norm: Any, weight: Any, kernel: str, *rest: Any, **named: Any) -> Any:
        if kernel != "head":
            self.begun.append(list(self._lanes.clocks[self._lanes.running]))
        return super().norm_project(source, norm, weight, kernel, *rest, **named)

    def project(self, *arguments: Any) -> Tensor:
        y = super().project(*arguments)
        self.ended.append(list(self._lanes.clocks[self._lanes.running]))
        return y


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("wiring", PATTERNS)
def test_what_runs_beside_what_follows_from_the_lags(wiring: str, size: int) -> None:
    config, lanes = tiny(4).rewired(wiring), WatchedLanes(2)
    spans = Spans(lanes)
    watched(config, draw(config), size, 1, lanes, spans)
    blocks = [block for layer in config.sub_blocks() for block in layer]
    concurrent = beside(lanes, dict(enumerate(zip(spans.begun, spans.ended, strict=True))))
    found = [concurrent(number - 1, number) for number in range(1, len(blocks))]
    assert found == independent(blocks)[1:]


@pytest.mark.parametrize("size, skipped", ((1, "lanes"), (2, "all-reduces")))
@pytest.mark.parametrize(
    "wiring", ("standard", "ladder", "ladder-2", "parallel-1", "desync-2x-1", "standard:2 ladder:2")
)
def test_a_removed_dependency_is_caught(wiring: str, size: int, skipped: str) -> None:
    """With several ranks a lane waits for another one's all-reduce, which includes what that waits for; and for up to
    two of them at a time, of which the newer includes the older.
    """
    config = tiny(4).rewired(wiring)
    weights, lanes = draw(config), WatchedLanes(2)
    watched(config, weights, size, 1, lanes)
    needed = [number for number, orders in enumerate(lanes.waits[skipped]) if orders]
    assert len(needed) > 8
    for number in needed:
        with pytest.raises(Race):
            watched(config, weights, size, 1, WatchedLanes(2, range(number, number + size), skipped))


class Careless(WatchedLanes):
    """Keeps nothing for other lanes."""

    def use(self, made: Made[Any]) -> Any:
        found = super().use(made)
        self._kept.clear()
        return found


@pytest.mark.parametrize("wiring", ("ladder", "ladder-2", "parallel-1", "desync-2x-1"))
def test_memory_is_kept_until_all_lanes_have_read_it(wiring: str) -> None:
    config = tiny(4).rewired(wiring)
    with pytest.raises(Race, match="memory returns"):
        watched(config, draw(config), 2, 1, Careless(2))


def test_memory_is_given_back_during_the_pass() -> None:
    """As much is kept as of few layers, not as of all."""
    most: dict[int, int] = {}

    class Counting(WatchedLanes):
        def use(self, made: Made[Any]) -> Any:
            found = super().use(made)
            most[layers] = max(most.get(layers, 0), len(self._kept))
            return found

    for layers in (6, 24):
        config = tiny(layers).rewired("ladder")
        watched(config, draw(config), 2, 1, Counting(2))
    assert most[24] == most[6]


def test_an_order_is_transitive() -> None:
    """What a lane waits for has waited for others before."""

    class Silent(Order):
        waits = 0

        def entered(self, lane: int) -> AbstractContextManager[None]:
            return nullcontext()

        def record(self) -> object:
            return None

        def wait(self, event: object) -> None:
            self.waits += 1

    lanes = Silent(3)
    with lanes.on(1):
        first = lanes.made("x")
    with lanes.on(2):
        assert not lanes.has(first) and lanes.use(first) == "x" and lanes.has(first)
        second = lanes.made("y")
    assert lanes.use(second) == "y" and lanes.has(first) and lanes.use(first) == "x"
    assert lanes.waits == 2


class Variants(References):
    """Which variants of kernels that read the stream are launched."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def norm_project(self, source: Any, norm: Any, weight: Any, kernel: str, *rest: Any, **named: Any) -> Any:
        self.seen.add((kernel, *source.modes().items()))
        return super().norm_project(source, norm, weight, kernel, *rest, **named)


@pytest.mark.parametrize("wiring, lanes", (("none", 1), ("parallel", 1), ("ladder", 2), ("parallel-1", 2)))
def test_few_layers_have_every_variant_of_a_kernel(wiring: str, lanes: int) -> None:
    """Or `ladder tune` compiled what is missing one after the other."""
    found = []
    for layers in (COMPILED_LAYERS, LAYERS):
        config, launch = tiny(layers).rewired(wiring), Variants()
        steps(config, draw(config), OneRank(2), OneLane() if lanes == 1 else WatchedLanes(2), 1, launch)
        found.append(launch.seen)
    assert found[0] == found[1] and len(found[0]) > 2
