"""Decode steps, by the size of their batch."""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ladder.engine.forward import Forward, Schedule
from ladder.kernels.table import MOST, reach
from ladder.layers.cache import BLOCK, KVCache

WARM_UP, TIMED = 3, 9  # replays of a graph that is one of several
STEP = 32  # between the sizes of batches that our matrix kernels do not take

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Graphs:
    """`forward`'s decode steps. A batch is filled up to the next of a few sizes with rows for `spare`, a slot of the
    cache that no sequence has.
    """

    def __init__(
        self,
        forward: Forward,
        spare: int,
        schedules: Sequence[Schedule] = (),
        last: Tensor | None = None,
    ) -> None:
        """Of several `schedules` (none: those that may be the fastest), decode steps of each size have the one that is
        fastest there. `last`: by slot, where the newest tokens go.
        """
        self._forward = forward
        self._spare = spare
        self._schedules = schedules
        device = forward.cache.keys[0].device
        self._newest = torch.zeros(spare + 1, dtype=torch.long, device=device) if last is None else last
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._last: tuple[_Captured, tuple[object, ...], list[int]] | None = None

    def step(self, sequences: Sequence[object], slots: Sequence[int], positions: Sequence[int]) -> "Step":
        """One token of each sequence: the newest of its slot, at its position."""
        count = len(slots)
        captured = self._for(bucket(count), reach(max(positions) + 1))
        expected = self._last is not None and self._last[0] is captured and self._last[1] == tuple(sequences)
        if not expected or self._last is None or self._last[2] != list(positions):
            fill = captured.bucket - count
            captured.fill([*slots, *[self._spare] * fill], [*positions, *[0] * fill])
        self._last = (captured, tuple(sequences), [position + 1 for position in positions])
        return captured.step(count)

    def _for(self, bucket: int, far: int) -> "_Captured":
        """For sequences of up to `far` positions; long ones have the schedule of short ones: to time steps that are as
        long would take seconds, in which nobody gets a token.
        """
        if (bucket, far) not in self._captured and far > reach(1):
            near = self.captured(bucket, reach(1)).forward
            self._captured[bucket, far] = _Captured(near, bucket, far, self._spare, self._newest)
        return self.captured(bucket, far)

    def captured(self, bucket: int, reach: int | None = None) -> "_Captured":
        """Of a batch of this size, with kernels for sequences of up to `reach` positions (none: the cache's)."""
        key = (bucket, reach or self._forward.cache.capacity)
        if key not in self._captured:
            self._captured[key] = self._fastest(*key)
        return self._captured[key]

    def _fastest(self, bucket: int, reach: int) -> "_Captured":
        schedules = self._schedules or self._forward.schedules()
        forwards = [self._forward.scheduled(each) for each in schedules]
        found = [_Captured(each, bucket, reach, self._spare, self._newest) for each in forwards]
        if len(found) == 1:
            return found[0]
        comm, cache = self._forward.model.comm, self._forward.cache
        position = min(reach, cache.capacity) // 2
        with _long_spare(cache, self._spare, position):
            mine = torch.tensor([[each.milliseconds(position) for each in found]], device=cache.keys[0].device)
        # the same choice on all ranks, by the slowest of them
        times = comm.all_gather(mine).view(comm.size, -1).amax(0).tolist()
        best = min(range(len(found)), key=lambda number: times[number])
        told = "; ".join(f"{each} {ms:.3f} ms" for each, ms in zip(schedules, times, strict=True))
        if comm.rank == 0:
            logger.info(
                "decode steps of %d sequences at position %d: %s, the fastest of %s",
                bucket,
                position,
                schedules[best],
                told,
            )
        return found[best]


def buckets(most: int) -> list[int]:
    """Sizes that batches of up to `most` sequences are filled up to."""
    return sorted({bucket(count) for count in range(1, most + 1)})


def bucket(count: int) -> int:
    """What a batch of `count` sequences is filled up to."""
    return 1 << (count - 1).bit_length() if count <= MOST else -(-count // STEP) * STEP


@contextmanager
def _long_spare(cache: KVCache, spare: int, position: int) -> Iterator[None]:
    """Meanwhile the spare slot reads others' blocks up to a position, as a sequence of its own would. At that position
    it writes, to a block of its own.
    """
    before = cache.tables[spare].clone()
    count = min(position // BLOCK, len(before))
    cache.tables[spare, :count] = torch.arange(count, device=before.device, dtype=torch.int32) % cache.blocks
    try:
        yield
    finally:
        cache.tables[spare] = before


def capture(
    step: Callable[[], T], device: torch.device, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """`step` as a graph, and where its results are after a replay. Graphs of one `pool` share their memory."""
    stream = stream or torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()  # compiles, and sets up libraries and communicators
        stream.synchronize()
        # other threads of this process may go on using the GPU meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = step()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, results


@dataclass(frozen=True)
class Step:
    """What a decode step gives, perhaps later. No other kernel may have to be loaded before it is complete, see
    `Flagged.for_kernel`. The next step overwrites all of it.
    """

    logits: Tensor  # [sequences, block]
    chosen: Tensor  # [sequences], the likeliest; -1 where the logits are not finite
    best: Tensor  # [sequences, 2 x ranks], every rank's argmax
    inputs: Tensor  # [tokens, slots, positions], [3, sequences]: those of the next step


class _Captured:
    def __init__(self, forward: Forward, bucket: int, reach: int, spare: int, last: Tensor) -> None:
        self.forward = forward  # the graph has the addresses of its kernels' scratch memory and flags
        self.bucket = bucket
        device = forward.cache.keys[0].device
        self._newest = last
        self._inputs = torch.zeros(3, bucket, dtype=torch.long, device=device)
        self._inputs[1] = spare
        self._graph, self._results = capture(lambda: forward.advance(self._inputs, last, reach), device)

    def replay(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._inputs.copy_(rows)
        self._graph.replay()
        return self._results

    def fill(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """The inputs of the next step, with the newest token of each slot."""
        rows = torch.tensor([slots, positions], pin_memory=self._inputs.is_cuda)
        self._inputs[1:].copy_(rows, non_blocking=True)
        torch.index_select(self._newest, 0, self._inputs[1], out=self._inputs[0])

    def step(self, count: int) -> Step:
        self._graph.replay()
        logits, chosen, best = self._results
        return Step(logits[:count], chosen[:count], best[:count], self._inputs[:, :count])

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
