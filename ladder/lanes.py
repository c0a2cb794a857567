"""Lanes: sub-blocks that do not depend on each other run at the same time, each on a CUDA stream of its own.

What one lane writes and another reads carries the mark behind the kernel that writes it. The reader's lane waits for
that mark, and for nothing else of the other lane.

Memory that a kernel has read is given to later kernels of the lane that made it, not of the one that read it. So a
tensor that another lane reads is kept until its own lane has waited for that reading.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A point in what a lane has been given to do."""

    lane: int
    number: int  # of the lane's marks
    waited: tuple[int, ...]  # the newest mark of each lane that is before this one
    event: object


@dataclass(frozen=True)
class Made(Generic[T]):
    """Something that a kernel of a lane writes."""

    x: T
    mark: Mark | None = None  # behind that kernel; None: there is one lane, where everything follows in order


class Lanes(Protocol):
    """Where sub-blocks are computed."""

    count: int
    current: int

    def on(self, lane: int) -> AbstractContextManager[None]:
        """What is launched inside is for this lane; where there are fewer, for one of those."""
        ...

    def made(self, x: T) -> Made[T]:
        """`x`, which the kernel launched last on this lane writes."""
        ...

    def has(self, made: Made[T]) -> bool:
        """Whether this lane need not wait for it."""
        ...

    def use(self, made: Made[T]) -> T:
        """What is to be read by the next kernel of this lane, which waits for it."""
        ...

    def join(self) -> None:
        """This lane waits for all others."""
        ...


class OneLane:
    """Everything one after the other."""

    count = 1
    current = 0

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        yield

    def made(self, x: T) -> Made[T]:
        return Made(x)

    def has(self, made: Made[T]) -> bool:
        return True

    def use(self, made: Made[T]) -> T:
        return made.x

    def join(self) -> None:
        pass


class Order(ABC):
    """Which lane has waited for what, and what must be kept. What a lane is, is up to subclasses."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.current = 0
        self._used: set[int] = set()  # other lanes than the first, since they were joined last
        self._waited = [[0] * count for _ in range(count)]  # by lane: the newest mark of each lane that is before it
        self._kept: list[tuple[object, int, int, int]] = []  # what, whose, read on which lane, before which mark of it

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        with self._entered(lane % self.count):
            yield

    @contextmanager
    def _entered(self, lane: int) -> Iterator[None]:
        before, self.current = self.current, lane
        self._used.add(lane)
        try:
            with self.entered(lane):
                yield
        finally:
            self.current = before

    def made(self, x: T) -> Made[T]:
        own = self._waited[self.current]
        own[self.current] += 1
        return Made(x, Mark(self.current, own[self.current], tuple(own), self.record()))

    def has(self, made: Made[T]) -> bool:
        assert made.mark is not None
        return self._waited[self.current][made.mark.lane] >= made.mark.number

    def use(self, made: Made[T]) -> T:
        mark = made.mark
        assert mark is not None
        if not self.has(made):
            self.wait(mark.event)
            self._waited[self.current] = [
                max(pair) for pair in zip(self._waited[self.current], mark.waited, strict=True)
            ]
            self._kept = [kept for kept in self._kept if not self._is_over(*kept[1:])]
        if mark.lane != self.current:
            self._kept.append((made.x, mark.lane, self.current, self._waited[self.current][self.current] + 1))
        return made.x

    def join(self) -> None:
        for lane in sorted(self._used - {self.current}):
            with self._entered(lane):
                end = self.made(None)
            self.use(end)
        self._used.clear()

    def _is_over(self, lane: int, reader: int, before: int) -> bool:
        return self._waited[lane][reader] >= before

    @abstractmethod
    def entered(self, lane: int) -> AbstractContextManager[None]:
        """What is launched inside is for this lane."""

    @abstractmethod
    def record(self) -> object:
        """An event behind everything that the current lane has been given."""

    @abstractmethod
    def wait(self, event: object) -> None:
        """The current lane waits for an event of another one."""


class CudaLanes(Order):
    """The first lane is the stream that the pass is given to; `others` are those of the lanes after it.

    Only kernels of the first lane poll the flags of all-reduces. What they wait for has been computed by then, and the
    kernels of the other lanes end by themselves: so an all-reduce always finds room on the chip at last.
    """

    def __init__(self, others: Sequence[torch.cuda.Stream]) -> None:
        super().__init__(1 + len(others))
        self._others = others

    @staticmethod
    def stream(device: torch.device) -> torch.cuda.Stream:
        """Of the same priority as the first lane's: whichever came first, its blocks would push the other's aside, and
        the step takes longer. All-reduces come before both.
        """
        return torch.cuda.Stream(device)

    @contextmanager
    def entered(self, lane: int) -> Iterator[None]:
        if lane == 0:
            yield  # only the outermost code is there
        else:
            with torch.cuda.stream(self._others[lane - 1]):
                yield

    def record(self) -> object:
        return torch.cuda.current_stream().record_event()

    def wait(self, event: object) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(event)
