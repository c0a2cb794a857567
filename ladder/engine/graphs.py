"""Decoding steps as CUDA graphs: captured once for each size of batch, with the communication stream inside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ladder.engine.fused import Fused

LARGEST = 64  # rows that our kernels are made for


class Graphs:
    """`fused.step` for up to LARGEST requests. A batch is filled up to a power of two with lines for `spare`, a slot of
    the cache that no request has.
    """

    def __init__(self, fused: Fused, spare: int) -> None:
        self._fused = fused
        self._spare = spare
        self._captured: dict[int, _Captured] = {}

    def step(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The results of `Fused.step`, to be read before the next step."""
        count = len(tokens)
        bucket = 1 << (count - 1).bit_length()
        fill = bucket - count
        lines = [[*tokens, *[0] * fill], [*slots, *[self._spare] * fill], [*positions, *[0] * fill]]
        logits, best = self.captured(bucket).replay(torch.tensor(lines))
        return logits[:count], best[:count]

    def captured(self, bucket: int) -> "_Captured":
        if bucket not in self._captured:
            self._captured[bucket] = _Captured(self._fused, bucket, self._spare)
        return self._captured[bucket]


class _Captured:
    def __init__(self, fused: Fused, bucket: int, spare: int) -> None:
        device = fused.cache.keys[0].device
        self._inputs = torch.zeros(3, bucket, dtype=torch.long, device=device)
        self._inputs[1] = spare
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            fused.step(*self._inputs)  # compiles, and sets up libraries and communicators
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # other threads of this process may go on using the GPU meanwhile
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._results = fused.step(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        self._inputs.copy_(lines)
        self._graph.replay()
        return self._results
