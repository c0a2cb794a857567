"""The pass over vLLM's layers without vLLM: layers of a few lines in their place, on one lane and two, and all-reduces
on communication streams. Every order of what runs at the same time is looked at, as in tests/test_lanes.py.
"""

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ladder.comm.base import Comm
from ladder.comm.group import Group
from ladder.comm.one_rank import OneRank
from ladder.lanes import Lanes, OneLane
from ladder.residual import ResidualStream
from ladder.vllm.decoder import WiredDecoder
from ladder.vllm.families import Parts
from ladder.wiring import EXAMPLES, SubBlock, Wiring
from tests.races import Memory, Race, RaceDetector, WatchedLanes

LAYERS, ROWS, HIDDEN, RANKS = 4, 3, 8, 2
PATTERNS = (*EXAMPLES, "desync-3x-1", "standard:1 ladder-2:3", "parallel-1:2 ladder:2")
WITH_POSTS = Parts(attention_post_norm="attention_post", mlp_post_norm="mlp_post")


class Norm(nn.Module):
    """As vLLM's: with a residual, both are written in place."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return x * self.gain
        residual.add_(x)
        x.copy_(residual * self.gain)
        return x, residual


class Attention(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return torch.sin(hidden_states @ self.weight) + positions[:, None]


class Mlp(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cos(x @ self.weight)


def model() -> Any:
    """vLLM's attributes of a model."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for number in range(LAYERS):
        weights = torch.randn(2, HIDDEN, HIDDEN, generator=generator).double() / 4
        norms = {"input_layernorm": Norm(0.5 + number), "post_attention_layernorm": Norm(0.7 + number)}
        norms |= {"attention_post": Norm(0.3), "mlp_post": Norm(0.2)}
        layers.append(SimpleNamespace(self_attn=Attention(weights[0]), mlp=Mlp(weights[1]), **norms))
    return SimpleNamespace(layers=layers, norm=Norm(0.9), start_layer=0, end_layer=LAYERS)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, ROWS * HIDDEN).double().view(ROWS, HIDDEN), torch.arange(ROWS).double() / 8


def plainly(parts: Parts, blocks: Any, comm: Comm) -> Tensor:
    """The same by `read` and `write` alone."""
    own, (x, positions) = model(), inputs()
    stream = ResidualStream(comm, x)
    for layer, (attention, mlp) in zip(own.layers, blocks, strict=True):
        posts = [getattr(layer, name) if name else None for name in (parts.attention_post_norm, parts.mlp_post_norm)]
        y = layer.input_layernorm(stream.read(attention.lag))
        stream.write(layer.self_attn(positions, y), attention.out, posts[0])
        stream.write(layer.mlp(layer.post_attention_layernorm(stream.read(mlp.lag))), mlp.out, posts[1])
    found: Tensor = own.norm(stream.read(0))
    return found


class WatchedStreams(WatchedLanes):
    """Two lanes, and a communication stream for each stream that all-reduces begin on."""

    def __init__(self, skip: range = range(0), skipped: str = "lanes") -> None:
        super().__init__(2, skip, skipped)
        self.clocks = [[0] * 6 for _ in range(6)]
        self.beside = 3  # the next communication stream


class Streams:
    """Of `Group`, on watched lanes."""

    def __init__(self, lanes: WatchedStreams) -> None:
        self.lanes = lanes

    def current(self) -> int:
        return self.lanes.running

    def new(self) -> int:
        self.lanes.beside += 1
        return self.lanes.beside - 1

    def entered(self, stream: int) -> AbstractContextManager[None]:
        return self.lanes.entered(stream)

    def record(self, stream: int) -> object:
        return list(self.lanes.clocks[stream])

    def wait(self, stream: int, event: object) -> None:
        with self.lanes.entered(stream):
            self.lanes.wait_for("all-reduces", event)


class Detector(RaceDetector):
    """A communication stream gives memory again where it needs some: it may return before, but must have waited then
    for those who have read it.
    """

    def __init__(self, lanes: WatchedStreams) -> None:
        super().__init__(lanes)
        self.returned: list[Memory] = []

    def look_for_freed(self) -> None:
        for key, memory in list(self.known.items()):
            if memory.lane > self.lanes.comm and memory.alive.expired():
                self.returned.append(self.known.pop(key))
        super().look_for_freed()

    def writes(self, x: Tensor) -> None:
        lane = self.lanes.running
        if self.memory(x) is None and lane > self.lanes.comm:
            for memory in [each for each in self.returned if each.lane == lane]:
                for reader, time in memory.read.items():
                    if self.lanes.clocks[lane][reader] < time:
                        raise Race(f"stream {lane} gives memory again while lane {reader} may still read it")
                self.returned.remove(memory)
        super().writes(x)


class OnStreams(Group):
    """Its tensors are on a CPU, and all-reduces on streams all the same."""

    def all_reduce(self, x: Tensor) -> Any:
        return self._on_stream(x)


class Coordinated:
    """One rank of two: what comes back is its own, in memory of the communication stream."""

    world_size, rank_in_group, device_group = RANKS, 0, None

    def all_reduce(self, input_: Tensor) -> Tensor:
        return input_ * 1

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([input_] * RANKS, dim)


def wired(parts: Parts, pattern: str, comm: Comm, lanes: Lanes) -> tuple[Tensor, Any]:
    blocks: tuple[tuple[SubBlock, SubBlock], ...] = Wiring.parse(pattern, LAYERS).sub_blocks()
    x, positions = inputs()
    decoder = WiredDecoder(model(), parts, blocks, comm)
    found = decoder._run(ResidualStream(comm, x, lanes=lanes), lanes, positions, last=True)
    assert isinstance(found, Tensor)
    return found, blocks


@pytest.mark.parametrize("parts", (Parts(), WITH_POSTS), ids=("plain", "posts"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_lane(pattern: str, parts: Parts) -> None:
    found, blocks = wired(parts, pattern, OneRank(RANKS), OneLane())
    assert torch.equal(found, plainly(parts, blocks, OneRank(RANKS)))


@pytest.mark.parametrize("parts", (Parts(), WITH_POSTS), ids=("plain", "posts"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_lanes_and_streams_without_a_race(pattern: str, parts: Parts) -> None:
    lanes = WatchedStreams()
    with Detector(lanes):
        found, blocks = wired(parts, pattern, OnStreams(Coordinated(), streams=Streams(lanes)), lanes)  # type: ignore[arg-type]
    assert torch.equal(found, plainly(parts, blocks, OneRank(RANKS)))


@pytest.mark.parametrize("pattern", ("standard", "ladder", "parallel-1", "desync-2x"))
def test_one_lane_and_a_stream_without_a_race(pattern: str) -> None:
    """As vLLM runs it: norms write in place what an all-reduce has given."""
    lanes = WatchedStreams()
    with Detector(lanes):
        found, blocks = wired(Parts(), pattern, OnStreams(Coordinated(), streams=Streams(lanes)), OneLane())  # type: ignore[arg-type]
    assert torch.equal(found, plainly(Parts(), blocks, OneRank(RANKS)))


@pytest.mark.parametrize("pattern, spare", (("standard", 0), ("ladder", 1), ("ladder-2", 2)))
def test_a_wait_that_is_left_out_is_found(pattern: str, spare: int) -> None:
    """Any of them that orders something: for what makes a partial sum, for a result. Only where the final norm waits
    for several all-reduces the newest one stands for those before it.
    """
    watched = WatchedStreams()
    with Detector(watched):
        wired(Parts(), pattern, OnStreams(Coordinated(), streams=Streams(watched)), OneLane())  # type: ignore[arg-type]
    ordering = [number for number, orders in enumerate(watched.waits["all-reduces"]) if orders]
    assert len(ordering) > 2 * LAYERS
    missed = []
    for number in ordering:
        lanes = WatchedStreams(range(number, number + 1), "all-reduces")
        try:
            with Detector(lanes):
                wired(Parts(), pattern, OnStreams(Coordinated(), streams=Streams(lanes)), OneLane())  # type: ignore[arg-type]
            missed.append(number)
        except Race:
            pass
    assert len(missed) == spare


def test_layers_that_read_through_one_norm() -> None:
    """Attention and MLP of a parallel layer read the same: it is computed once."""
    own, (x, positions) = model(), inputs()
    for layer in own.layers:
        layer.post_attention_layernorm = layer.input_layernorm
    blocks = Wiring.parse("parallel", LAYERS).sub_blocks()
    parts = Parts(mlp_norm="input_layernorm")
    decoder = WiredDecoder(own, parts, blocks, OneRank(RANKS))
    assert all(layer.reads_once for layer in decoder.layers)
    calls = []
    for layer in own.layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    found = decoder.forward(x, positions, last=True)
    assert len(calls) == LAYERS
    whole = WiredDecoder(model(), Parts(mlp_norm="input_layernorm"), blocks, OneRank(RANKS))
    for each in whole.layers:
        each.reads_once = False
    assert torch.equal(found, whole.forward(inputs()[0], positions, last=True))  # type: ignore[arg-type]
