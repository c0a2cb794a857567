"""Forward passes as CUDA graphs, communication stream included: decode by batch size, prefill by length."""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ladder.engine.forward import Forward, Schedule

WARM_UP, TIMED = 3, 9  # replays of a graph that is one of several
SHORTEST, LONGEST = 16, 1024  # tokens of a prompt that is worth a graph; longer ones keep the GPU busy by themselves

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Graphs:
    """`forward`'s passes. A batch is filled up to a power of two with rows for `spare`, a slot of the cache that no
    sequence has; a prompt is filled up to a power of two at its end.
    """

    def __init__(
        self,
        forward: Forward,
        spare: int,
        schedules: Sequence[Schedule] = (),
        chosen: dict[int, Schedule] | None = None,
    ) -> None:
        """Of several `schedules` (none: those that may be the fastest), decode steps of each size have the one that is
        fastest there. It is noted in `chosen`, by size; what is there already is not tried again.
        """
        self._chosen = {} if chosen is None else chosen
        self._forward = forward
        self._spare = spare
        self._schedules = schedules
        self._captured: dict[int, _Captured] = {}
        self._prompts: dict[int, _CapturedPrompt] = {}
        self._last: _Captured | None = None

    def step(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> "Decoded":
        """One token of each sequence."""
        count = len(tokens)
        bucket = 1 << (count - 1).bit_length()
        fill = bucket - count
        rows = [[*tokens, *[0] * fill], [*slots, *[self._spare] * fill], [*positions, *[0] * fill]]
        self._last = self.captured(bucket)
        return self._last.decode(torch.tensor(rows), count)

    def next_step(self, count: int) -> "Decoded":
        """The step after the last one, of the same sequences, each with the token that was the likeliest there."""
        assert self._last is not None
        return self._last.decode(None, count)

    def prompt(self, tokens: Sequence[int], slot: int) -> Tensor:
        """The logits [1, block] after a prompt of up to LONGEST tokens in a slot that holds nothing yet."""
        width = self.width(len(tokens))
        if width not in self._prompts:
            self._prompts[width] = _CapturedPrompt(self._forward, width, self._spare)
        return self._prompts[width].replay(tokens, slot)

    @staticmethod
    def width(count: int) -> int:
        """What a prompt of `count` tokens is filled up to; the cache must have room for so many."""
        return max(SHORTEST, 1 << (count - 1).bit_length())

    def captured(self, bucket: int) -> "_Captured":
        if bucket not in self._captured:
            self._captured[bucket] = self._fastest(bucket)
        return self._captured[bucket]

    def _fastest(self, bucket: int) -> "_Captured":
        schedules = [self._chosen[bucket]] if bucket in self._chosen else self._schedules or self._forward.schedules()
        found = [_Captured(self._forward.scheduled(each), bucket, self._spare) for each in schedules]
        if len(found) == 1:
            return found[0]
        comm = self._forward.model.comm
        position = self._forward.cache.capacity // 2
        mine = torch.tensor(
            [[each.milliseconds(position) for each in found]], device=self._forward.cache.keys[0].device
        )
        # the same choice on all ranks, by the slowest of them
        times = comm.all_gather(mine).view(comm.size, -1).amax(0).tolist()
        best = min(range(len(found)), key=lambda number: times[number])
        self._chosen[bucket] = schedules[best]
        told = "; ".join(f"{each} {ms:.3f} ms" for each, ms in zip(schedules, times, strict=True))
        if comm.rank == 0:
            logger.info("decode steps of %d sequences: %s, the fastest of %s", bucket, schedules[best], told)
        return found[best]


def _capture(step: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """`step` as a graph, and where its results are after a replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()  # compiles, and sets up libraries and communicators
        stream.synchronize()
        # other threads of this process may go on using the GPU meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = step()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, results


@dataclass(frozen=True)
class Decoded:
    """What a decode step gives, perhaps later. No other kernel may have to be loaded before it is complete, see
    `Flagged.for_kernel`: wait for it before anything new is launched.
    """

    logits: Tensor  # [sequences, block]; the next step overwrites them
    _chosen: Tensor  # on the host
    _done: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def tokens(self) -> list[int | None]:
        """The likeliest of every sequence; None where its logits are not finite."""
        self.wait()
        return [None if token < 0 else token for token in self._chosen.tolist()]


class _Captured:
    def __init__(self, forward: Forward, bucket: int, spare: int) -> None:
        self.forward = forward  # the graph has the addresses of its kernels' scratch memory and flags
        device = forward.cache.keys[0].device
        self._inputs = torch.zeros(3, bucket, dtype=torch.long, device=device)
        self._inputs[1] = spare
        self._graph, self._results = _capture(lambda: forward.advance(self._inputs), device)
        # in turns: a step may begin before the tokens of the one before it are read
        self._hosts = [torch.zeros(bucket, dtype=torch.long, pin_memory=device.type == "cuda") for _ in range(2)]

    def replay(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self._inputs.copy_(rows)
        self._graph.replay()
        return self._results

    def decode(self, rows: Tensor | None, count: int) -> Decoded:
        """A step of these rows of inputs, or of those that the last step left."""
        if rows is not None:
            self._inputs.copy_(rows)
        self._graph.replay()
        logits, chosen = self._results
        self._hosts.reverse()
        self._hosts[0].copy_(chosen, non_blocking=True)
        done = torch.cuda.current_stream(chosen.device).record_event() if chosen.is_cuda else None
        return Decoded(logits[:count], self._hosts[0][:count], done)

    def milliseconds(self, position: int) -> float:
        """Of a step whose sequences stand there; they are no sequence's."""
        found = []
        for _ in range(WARM_UP + TIMED):
            self._inputs[2] = position
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return float(statistics.median(found[WARM_UP:]))


class _CapturedPrompt:
    def __init__(self, forward: Forward, width: int, spare: int) -> None:
        device = forward.cache.keys[0].device
        self.forward = forward
        self._width = width
        self._inputs = torch.zeros(2, width, dtype=torch.long, device=device)  # tokens, slots
        self._inputs[1] = spare
        self._last = torch.zeros(1, dtype=torch.long, device=device)
        self._beginnings = forward.beginnings(self._inputs[:1].shape)  # the graph has its tensors' addresses

        def step() -> Tensor:
            return forward.prefill_at(self._inputs[:1], self._last, self._inputs[1], self._beginnings)

        self._graph, self._results = _capture(step, device)

    def replay(self, tokens: Sequence[int], slot: int) -> Tensor:
        filled = [*tokens, *[0] * (self._width - len(tokens))]
        self._inputs.copy_(torch.tensor([filled, [slot] * self._width]))
        self._last.fill_(len(tokens) - 1)
        self._graph.replay()
        return self._results
