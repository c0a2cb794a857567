"""One rank's part of the demo: one model writes a text in several ways, which take turns, and a step of it is traced.

Turns, so that no way has to share the cores with another. All ranks choose whose turn it is alike, by times that they
have agreed on.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ladder.bench.ranks import slowest, together
from ladder.bench.trace.lanes import Span, Step
from ladder.bench.trace.trace import Recorder, Traced, record_sub_blocks
from ladder.checkpoint import Directory, load
from ladder.comm.at_once import AtOnce
from ladder.comm.base import Comm
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.comm.timed import Timed
from ladder.engine.model_runner import AddSequence, ModelRunner
from ladder.engine.options import EMBEDDED, SamplingParams
from ladder.engine.scheduler import SequenceSpec
from ladder.model import Decoder

TURN = 4  # tokens
WARM_UP, TIMED = 4, 24  # steps by which the link is chosen
TRACED = 12  # steps of each way with their times recorded; of these the fastest is shown: it was disturbed least
BANDWIDTH = 10e9  # bytes/s of the emulated link; the messages are so small that it hardly counts


@dataclass(frozen=True)
class Way:
    """A way to compute the model: its wiring, and what its all-reduces are. `share`: of the time, beside the others."""

    wiring: str
    share: float
    at_once: bool = False
    communicates: bool = True


# The first two write the same text and are shown; the others' times are for the account below them. The same weights
# under another wiring than theirs are another function, which takes as long.
WAYS = {
    "waiting": Way("ladder", 1.0, at_once=True),
    "overlapping": Way("ladder", 1.0),
    "standard": Way("standard", 0.25),
    "none": Way("none", 0.25, communicates=False),
}
SHOWN = ("waiting", "overlapping")


@dataclass(frozen=True)
class Writing:
    """What is written: the tokens of the prompt, how many may follow, how many seconds each way may take, and how long
    an all-reduce is to take, in sub-blocks.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    seconds: float
    link_in_sub_blocks: float


@dataclass(frozen=True)
class Chosen:
    """The link, and what it was chosen by: the seconds that a sub-block takes of a core."""

    sub_block: float
    link: Link


@dataclass(frozen=True)
class Wrote:
    """One turn."""

    way: str
    tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class TracedStep:
    """A decode step, when what ran."""

    way: str
    step: Step


Message = Chosen | Wrote | TracedStep


def write(comm: Comm, device: torch.device, writing: Writing) -> Iterator[Message]:
    """All of it, on one rank."""
    directory = Directory(EMBEDDED)
    model = load(Decoder(replace(directory.config, dtype="float32"), comm, device), directory)
    sub_block = _sub_block(model, writing, device)
    link = Link(writing.link_in_sub_blocks * sub_block, BANDWIDTH)
    yield Chosen(sub_block, link)
    yield from _turns({name: Writer(model, comm, link, way, writing) for name, way in WAYS.items()}, device, writing)
    yield from _traced(model, comm, link, len(writing.prompt), device)


class Writer:
    """A way to compute, with a sequence and a cache of its own; the model is shared."""

    def __init__(self, model: Decoder, comm: Comm, link: Link, way: Way, writing: Writing) -> None:
        self._model, self.way = model, way
        self._comm = _communicator(comm, link, way)
        self.runner = ModelRunner(model, 1, len(writing.prompt))
        self.runner.apply([AddSequence(SequenceSpec(0, writing.prompt, writing.limit, writing.params))])

    def enter(self) -> None:
        """The model is this one's from here on."""
        self._model.rewire(self.way.wiring)
        self._model.comm = self._comm

    def write(self, count: int) -> tuple[int, ...]:
        """So many tokens more, or those that are left."""
        found: list[int] = []
        while len(found) < count and self.runner.busy:
            found += [new.token for new in self.runner.step() if new.token is not None]
        return tuple(found)


def _communicator(comm: Comm, link: Link, way: Way) -> Comm:
    if not way.communicates:
        return OneRank(comm.size)
    timed = Timed(comm, link)
    return AtOnce(timed) if way.at_once else timed


def _turns(writers: dict[str, Writer], device: torch.device, writing: Writing) -> Iterator[Wrote]:
    """Until a way that is shown has written all, or all of those have had their time. The next turn is whose share of
    the time has been least. Reading the prompt is not counted.
    """
    spent = dict.fromkeys(writers, 0.0)
    for name, writer in writers.items():
        writer.enter()
        yield Wrote(name, writer.write(1), 0.0)
    while all(writers[name].runner.busy for name in SHOWN):
        able = [name for name, writer in writers.items() if writer.runner.busy]
        turn = min(able, key=lambda name: spent[name] / writers[name].way.share)
        if spent[turn] >= writers[turn].way.share * writing.seconds:
            return
        writers[turn].enter()
        found: list[int] = []
        seconds = together(partial(_extend, found, writers[turn]), device)
        spent[turn] += seconds
        yield Wrote(turn, tuple(found), seconds)


def _extend(found: list[int], writer: Writer) -> None:
    found += writer.write(TURN)


def _sub_block(model: Decoder, writing: Writing, device: torch.device) -> float:
    """A step divided by the number of its sub-blocks: seconds of a core, sending included, the slowest rank's median.
    What else the machine does meanwhile is not in it.
    """
    writer = Writer(model, model.comm, Link(0.0, BANDWIDTH), WAYS["waiting"], writing)
    writer.enter()
    writer.write(WARM_UP)
    steps = []
    for _ in range(TIMED):
        begin = time.process_time()
        writer.write(1)
        steps.append(time.process_time() - begin)
    return slowest(statistics.median(steps), device) / (2 * len(model.layers))


def _traced(model: Decoder, comm: Comm, link: Link, context: int, device: torch.device) -> Iterator[TracedStep]:
    """Decode steps of the ways that are shown, in turns."""
    recorder = Recorder(device)
    traced = Traced(Timed(comm, link), recorder, device)
    record_sub_blocks(model, recorder)
    cache = model.new_cache(1, context + 1)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
    steps: dict[str, list[Step]] = {name: [] for name in SHOWN}
    for _ in range(1 + TRACED):
        for name in SHOWN:
            way = WAYS[name]
            model.rewire(way.wiring)
            model.comm = AtOnce(traced) if way.at_once else traced
            cache.lengths = [context] * len(cache.lengths)
            comm.all_gather(torch.zeros(1, device=device))  # ranks begin together
            traced.count = 0
            recorder.begin()
            model(tokens, cache)
            compute, sent, waits = (recorder.spans(lane) for lane in ("compute", "comm", "wait"))
            if way.at_once:
                compute, waits = _until_sent(compute, sent), sent
            steps[name].append(Step(name, comm.rank, compute, sent, waits))
    traced.close()
    for name, found in steps.items():
        yield TracedStep(name, min(found[1:], key=lambda step: step.ms))


def _until_sent(compute: Sequence[Span], sent: Sequence[Span]) -> list[Span]:
    """Sub-blocks that wait for their own all-reduce before they return, without that wait."""
    begins = [span.begin for span in sent]
    return [
        replace(span, end=min((at for at in begins if span.begin < at < span.end), default=span.end))
        for span in compute
    ]
