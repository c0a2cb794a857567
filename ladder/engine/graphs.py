"""Forward passes as CUDA graphs, communication stream included: decode by batch size, prefill by length."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ladder.engine.forward import Forward

SHORTEST, LONGEST = 16, 1024  # tokens of a prompt that is worth a graph; longer ones keep the GPU busy by themselves

T = TypeVar("T")


class Graphs:
    """`forward`'s passes. A batch is filled up to a power of two with rows for `spare`, a slot of the cache that no
    sequence has; a prompt is filled up to a power of two at its end.
    """

    def __init__(self, forward: Forward, spare: int) -> None:
        self._forward = forward
        self._spare = spare
        self._captured: dict[int, _Captured] = {}
        self._prompts: dict[int, _CapturedPrompt] = {}

    def step(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The results of `Forward.decode`, to be read before the next step."""
        count = len(tokens)
        bucket = 1 << (count - 1).bit_length()
        fill = bucket - count
        rows = [[*tokens, *[0] * fill], [*slots, *[self._spare] * fill], [*positions, *[0] * fill]]
        logits, argmax = self.captured(bucket).replay(torch.tensor(rows))
        if logits.is_cuda:  # no other kernel may have to be loaded meanwhile, see `Flagged.for_kernel`
            torch.cuda.current_stream(logits.device).synchronize()
        return logits[:count], argmax[:count]

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
            self._captured[bucket] = _Captured(self._forward, bucket, self._spare)
        return self._captured[bucket]


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


class _Captured:
    def __init__(self, forward: Forward, bucket: int, spare: int) -> None:
        device = forward.cache.keys[0].device
        self._inputs = torch.zeros(3, bucket, dtype=torch.long, device=device)
        self._inputs[1] = spare
        self._graph, self._results = _capture(lambda: forward.decode(*self._inputs), device)

    def replay(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self._inputs.copy_(rows)
        self._graph.replay()
        return self._results


class _CapturedPrompt:
    def __init__(self, forward: Forward, width: int, spare: int) -> None:
        device = forward.cache.keys[0].device
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
