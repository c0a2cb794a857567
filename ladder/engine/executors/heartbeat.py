"""A rank's heartbeat for the watchdog, and since when it computes without waiting for another rank."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ladder.comm.base import Comm, Pending
from ladder.comm.signalled import Signals
from ladder.engine.executors.control import Control
from ladder.engine.model_runner import Command


class Heartbeat:
    """One rank's two numbers in shared memory. A rank that waits, for other ranks or for commands, is not the cause
    of a time-out; one that computes for too long is.
    """

    def __init__(self, shared: Any, rank: int) -> None:
        self.watched = False  # a model may take longer to load than a step to compute
        self._shared = shared
        self._last, self._busy = 2 * rank, 2 * rank + 1  # the last heartbeat; since when it computes, 0: it waits

    @staticmethod
    def numbers(size: int) -> int:
        """How many numbers `size` ranks need."""
        return 2 * size

    def beat(self) -> None:
        self._shared[self._last] = time.monotonic()

    def computes(self) -> None:
        if self.watched:
            self._shared[self._busy] = time.monotonic()

    def waits(self) -> None:
        self._shared[self._busy] = 0.0

    def last_sign(self, start: float) -> float:
        """When the rank was last known to be well; `start` before its first heartbeat."""
        last, busy = float(self._shared[self._last]), float(self._shared[self._busy])
        return min(last or start, busy or last or start)


class HeartbeatComm:
    """`inner`, noting when this rank waits for the others and when it computes again."""

    def __init__(self, inner: Comm, heartbeat: Heartbeat) -> None:
        self._inner = inner
        self._heartbeat = heartbeat
        self.capturable = getattr(inner, "capturable", False)
        self.signals = getattr(inner, "signals", False)
        self.multiprocessors = getattr(inner, "multiprocessors", 0)
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """For captured steps, in which this process does not wait."""
        return self._inner.all_reduce_and_signal(x, flag) if isinstance(self._inner, Signals) else None

    def all_reduce(self, x: Tensor) -> Pending:
        return _HeartbeatPending(self._inner.all_reduce(x), self._heartbeat)

    def all_gather(self, x: Tensor) -> Tensor:
        self._heartbeat.waits()
        joined = self._inner.all_gather(x)
        self._heartbeat.computes()
        return joined


class _HeartbeatPending:
    def __init__(self, inner: Pending, heartbeat: Heartbeat) -> None:
        self._inner = inner
        self._heartbeat = heartbeat

    def wait(self) -> Tensor:
        self._heartbeat.waits()
        x = self._inner.wait()
        self._heartbeat.computes()
        return x


class HeartbeatControl:
    """The same for the ranks' commands."""

    def __init__(self, inner: Control, heartbeat: Heartbeat) -> None:
        self._inner = inner
        self._heartbeat = heartbeat

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        self._heartbeat.waits()
        shared = self._inner.share(commands)
        self._heartbeat.computes()
        return shared
