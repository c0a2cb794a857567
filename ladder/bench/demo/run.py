"""The demo on a CPU: two ranks write a text, and what they measure is put together here."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ladder.bench.demo.options import DemoOptions
from ladder.bench.demo.write import SHOWN, WAYS, Chosen, Message, TracedStep, Writing, Wrote, write
from ladder.bench.machine import machine
from ladder.bench.ranks import stream_ranks
from ladder.bench.trace.lanes import Step
from ladder.config import SIZES
from ladder.engine.options import EngineOptions, SamplingParams
from ladder.engine.setup import Setup
from ladder.engine.text import Text
from ladder.perf.plan import Deployment, predict

RANKS = 2
MOST = 600  # tokens
SAMPLING = SamplingParams(MOST, temperature=0.9, top_p=0.92, repetition_penalty=1.1, seed=4, ignore_eos=True)
# the deployment whose proportion of communication to computation the emulated link has
LIKE = Deployment("llama-3-70b", "h100", 8, "pcie_shm_tp8", 1, 1024, 512, "standard")
LIKE_NAME = "Llama-3-70B on 8 H100s without peer-to-peer"


@dataclass
class Side:
    """What one way to compute has written so far."""

    text: Text
    tokens: list[int] = field(default_factory=list)
    written: str = ""
    timed: int = 0  # of the tokens: not those that came with the prompt
    seconds: float = 0.0

    def add(self, turn: Wrote) -> None:
        self.tokens += turn.tokens
        self.written += "".join(self.text.add(token) for token in turn.tokens)
        if turn.seconds:
            self.timed += len(turn.tokens)
            self.seconds += turn.seconds

    @property
    def per_second(self) -> float | None:
        return self.timed / self.seconds if self.seconds else None


@dataclass
class Found:
    """All that has been measured so far. Times in seconds."""

    prompt: str
    parameters: int
    layers: int
    sides: dict[str, Side]
    link_in_sub_blocks: float
    like: dict[str, Any]  # the row of `ladder plan` for `LIKE`
    chosen: Chosen | None = None
    steps: dict[str, Step] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        match message:
            case Chosen():
                self.chosen = message
            case Wrote():
                self.sides[message.way].add(message)
            case TracedStep(way, step):
                self.steps[way] = step

    def rate(self, way: str) -> float:
        """Tokens a second."""
        found = self.sides[way].per_second
        assert found is not None, f"{way} has written nothing"
        return found

    @property
    def speedup(self) -> float:
        return self.rate("overlapping") / self.rate("waiting")

    @property
    def same_text(self) -> bool:
        """Whether what both have written is the same, as far as the slower one has come."""
        first, second = (self.sides[name].tokens for name in SHOWN)
        return all(one == other for one, other in zip(first, second, strict=False))

    @property
    def bound(self) -> float | None:
        """The speed-up of a model without any communication; None where the machine is too busy to tell."""
        bound = self.rate("none") / self.rate("waiting")
        return bound if bound > self.speedup else None

    def line(self) -> dict[str, Any]:
        """For `--json`."""
        assert self.chosen is not None
        found: dict[str, Any] = {"model": "embedded", "tp": RANKS, "mode": "ranks", "link_kind": "emulated"}
        found |= {"link_alpha_us": self.chosen.link.alpha * 1e6, "sub_block_us": self.chosen.sub_block * 1e6}
        found |= {"link_in_sub_blocks": self.link_in_sub_blocks, "like": LIKE_NAME}
        found |= {"tokens": {name: side.timed for name, side in self.sides.items()}}
        found |= {"tokens_per_s": {name: self.rate(name) for name in self.sides}}
        found |= {"account": {name: step.account() for name, step in self.steps.items()}}
        found |= {"speedup": self.speedup, "speedup_bound": self.bound}
        return {**found, "same_text": self.same_text, **machine(torch.device("cpu"))}


def demo(options: DemoOptions) -> Iterator[Found]:
    """What has been measured, each time that there is more of it. Closing the iterator, or Ctrl-C, ends the ranks."""
    setup = Setup(EngineOptions(tp=RANKS, dtype="float32"))
    request = setup.requests([options.prompt], SAMPLING)[0]
    like = predict(LIKE)
    ratio = link_in_sub_blocks()
    parameters = setup.weight_bytes // 4  # float32; both ranks' together
    sides = {name: Side(Text(setup.tokenizer, ())) for name in WAYS}
    found = Found(options.prompt, parameters, setup.config.layers, sides, ratio, like)
    yield found
    writing = Writing(tuple(request.tokens), SAMPLING, request.limit, options.seconds, ratio)
    with closing(stream_ranks(RANKS, torch.device("cpu"), write, writing)) as messages:
        for message in messages:
            found.add(message)
            yield found


def link_in_sub_blocks() -> float:
    """An all-reduce of the deployment that is imitated, in sub-blocks: steps without communication, divided."""
    sub_block_us = predict(replace(LIKE, wiring="none"))["tpot_ms"] * 1e3 / (2 * SIZES[LIKE.size].layers)
    return float(predict(LIKE)["all_reduce_us"] / sub_block_us)
