"""A detector of races between lanes, without a GPU: every torch operation is given to a lane, and what it reads and
writes must be ordered by marks and waits (vector clocks), however the lanes would run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.comm.base import Pending
from ladder.lanes import Order

Clock = list[int]
expired: Callable[[int], bool] = torch.UntypedStorage._expired  # type: ignore[attr-defined]  # a StorageWeakRef's cdata


class Race(AssertionError):
    """Two operations that no wait orders."""


@dataclass
class Memory:
    """What is known of a storage."""

    alive: StorageWeakRef
    lane: int  # that it was allocated on, and returns to
    written: tuple[int, int]  # the lane and its time
    read: dict[int, int] = field(default_factory=dict)  # by lane: the last time


class WatchedLanes(Order):
    """Lanes whose order is recorded. `comm` is one lane more, for all-reduces. Waits are left out whose number is in
    `skip`, of those for `skipped`: lanes or all-reduces.
    """

    def __init__(self, count: int, skip: range = range(0), skipped: str = "lanes") -> None:
        super().__init__(count)
        self.comm = count
        self.clocks: list[Clock] = [[0] * (count + 1) for _ in range(count + 1)]
        self.running = 0  # the lane that operations are given to
        self.skip, self.skipped = skip, skipped
        self.waits: dict[str, list[bool]] = {"lanes": [], "all-reduces": []}  # whether each orders anything

    @contextmanager
    def entered(self, lane: int) -> Iterator[None]:
        before, self.running = self.running, lane
        try:
            yield
        finally:
            self.running = before

    def record(self) -> object:
        return list(self.clocks[self.running])

    def wait(self, event: object) -> None:
        self.wait_for("lanes", event)

    def wait_for(self, what: str, event: object) -> None:
        assert isinstance(event, list)
        before = self.clocks[self.running]
        after = [max(pair) for pair in zip(before, event, strict=True)]
        if what != self.skipped or len(self.waits[what]) not in self.skip:
            self.clocks[self.running] = after
        self.waits[what].append(before != after)


def tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list, dict)):
        for each in given.values() if isinstance(given, dict) else given:
            yield from tensors(each)


class RaceDetector(TorchDispatchMode):
    """Raises `Race` where an operation reads what another lane may not have written yet, writes what another lane may
    still read, or where memory returns to its lane while another lane may still read it.
    """

    def __init__(self, lanes: WatchedLanes) -> None:
        super().__init__()
        self.lanes = lanes
        self.known: dict[int, Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look_for_freed()
        clock = self.lanes.clocks[self.lanes.running]
        clock[self.lanes.running] += 1
        inputs = list(tensors((args, kwargs)))
        for x in inputs:
            self.reads(x)
        result = func(*args, **(kwargs or {}))
        outputs = list(tensors(result))
        mutable = {n for n, argument in enumerate(func._schema.arguments) if argument.is_write}
        for x in (*outputs, *(args[n] for n in mutable if n < len(args) and isinstance(args[n], Tensor))):
            shared = any(x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in inputs)
            if not shared or mutable:  # not a mere view
                self.writes(x)
        return result

    def memory(self, x: Tensor) -> Memory | None:
        return self.known.get(x.untyped_storage()._cdata)

    def reads(self, x: Tensor) -> None:
        memory, clock = self.memory(x), self.lanes.clocks[self.lanes.running]
        if memory is None:
            return  # from before: weights, tokens
        lane, time = memory.written
        if clock[lane] < time:
            raise Race(f"lane {self.lanes.running} reads what lane {lane} may not have written yet")
        memory.read[self.lanes.running] = clock[self.lanes.running]

    def writes(self, x: Tensor) -> None:
        memory, clock = self.memory(x), self.lanes.clocks[self.lanes.running]
        lane = self.lanes.running
        if memory is None:
            alive = StorageWeakRef(x.untyped_storage())
            self.known[x.untyped_storage()._cdata] = Memory(alive, lane, (lane, clock[lane]))
            return
        for reader, time in (*memory.read.items(), memory.written):
            if clock[reader] < time:
                raise Race(f"lane {lane} writes what lane {reader} may still use")
        memory.written = lane, clock[lane]

    def look_for_freed(self) -> None:
        for key, memory in list(self.known.items()):
            if expired(memory.alive.cdata):
                del self.known[key]
                owner = self.lanes.clocks[memory.lane]
                for reader, time in memory.read.items():
                    if owner[reader] < time:
                        raise Race(f"memory returns to lane {memory.lane} while lane {reader} may still read it")


class WatchedComm:
    """One rank of `size`, alone: all-reduces run on a lane of their own, and their result is this rank's."""

    rank = 0

    def __init__(self, size: int, lanes: WatchedLanes) -> None:
        self.size = size
        self._lanes = lanes

    def all_reduce(self, x: Tensor) -> Pending:
        lanes = self._lanes
        here, there = lanes.clocks[lanes.running], lanes.clocks[lanes.comm]
        lanes.clocks[lanes.comm] = [max(pair) for pair in zip(here, there, strict=True)]
        with lanes.entered(lanes.comm):
            x.mul_(1)
        return WatchedPending(x, lanes)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


class WatchedPending:
    def __init__(self, x: Tensor, lanes: WatchedLanes) -> None:
        self._x = x
        self._lanes = lanes
        self._done = list(lanes.clocks[lanes.comm])

    def wait(self) -> Tensor:
        self._lanes.wait_for("all-reduces", self._done)
        return self._x


def beside(lanes: WatchedLanes, spans: dict[Any, tuple[Clock, Clock]]) -> Callable[[Any, Any], bool]:
    """Whether two of the spans, each from the clock of its beginning to that of its end, are not ordered at all."""

    def concurrent(one: Any, other: Any) -> bool:
        (begin, end), (start, stop) = spans[one], spans[other]
        return not _before(end, start) and not _before(stop, begin)

    return concurrent


def _before(end: Clock, begin: Clock) -> bool:
    return all(a <= b for a, b in zip(end, begin, strict=True))
