"""What a rank shows of itself to the process that watches over it: that it lives, and since when it computes."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ladder.comm.base import Comm, Pending
from ladder.comm.signalled import Signals
from ladder.engine.control import Control
from ladder.engine.core import Command


class Vitals:
    """One rank's two numbers in memory that all share. Who waits, for others or for something to do, is not to blame
    for the silence; who computes for too long is.
    """

    def __init__(self, shared: Any, rank: int) -> None:
        self._shared = shared
        self._pulse, self._working = 2 * rank, 2 * rank + 1  # the last beat; since when it computes, 0: it waits

    @staticmethod
    def room(size: int) -> int:
        """How many numbers `size` ranks need."""
        return 2 * size

    def beat(self) -> None:
        self._shared[self._pulse] = time.monotonic()

    def computes(self) -> None:
        self._shared[self._working] = time.monotonic()

    def waits(self) -> None:
        self._shared[self._working] = 0.0

    def last_sign(self, start: float) -> float:
        """When it was last seen to be well; `start` where it has not been seen yet."""
        pulse, working = float(self._shared[self._pulse]), float(self._shared[self._working])
        return min(pulse or start, working or pulse or start)


class Watched:
    """`inner`, telling when this rank waits for the others and when it goes on."""

    def __init__(self, inner: Comm, vitals: Vitals) -> None:
        self._inner = inner
        self._vitals = vitals
        self.capturable = getattr(inner, "capturable", False)
        self.signals = getattr(inner, "signals", False)
        self.size = inner.size
        self.rank = inner.rank

    def all_reduce_and_signal(self, x: Tensor, flag: Tensor) -> tuple[Tensor, int] | None:
        """For captured steps: nobody on this side waits."""
        return self._inner.all_reduce_and_signal(x, flag) if isinstance(self._inner, Signals) else None

    def all_reduce(self, x: Tensor) -> Pending:
        return _WatchedSum(self._inner.all_reduce(x), self._vitals)

    def all_gather(self, x: Tensor) -> Tensor:
        self._vitals.waits()
        joined = self._inner.all_gather(x)
        self._vitals.computes()
        return joined


class _WatchedSum:
    def __init__(self, inner: Pending, vitals: Vitals) -> None:
        self._inner = inner
        self._vitals = vitals

    def wait(self) -> Tensor:
        self._vitals.waits()
        x = self._inner.wait()
        self._vitals.computes()
        return x


class WatchedControl:
    """`inner`, likewise."""

    def __init__(self, inner: Control, vitals: Vitals) -> None:
        self._inner = inner
        self._vitals = vitals

    def share(self, commands: Sequence[Command]) -> Sequence[Command]:
        self._vitals.waits()
        heard = self._inner.share(commands)
        self._vitals.computes()
        return heard
