"""R emulated ranks in one process, one thread each: any TP degree on any machine, exact and without a process group.

An all-reduce adds in rank order, so all ranks get the same bits, and with ordinary tensor operations, so gradients flow
through it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from ladder.comm.base import Comm, Pending

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Raised in the ranks that wait for one that failed; never reaches the caller of `World.run`."""


class World:
    """`size` emulated ranks and what they exchange. `run` calls a function once per rank, all at the same time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Emulated(self, rank) for rank in range(size)]
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rank")
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        """Drop what a failed run has left."""
        self._failed = False
        self._ended: set[int] = set()
        # by the number of an exchange: each rank's message, and how many ranks have read all of them
        self._messages: dict[int, dict[int, Tensor]] = {}
        self._taken: dict[int, int] = {}
        for comm in self.ranks:
            comm.next_ticket = 0

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """`work(comm)` on every rank; the results in rank order. The first failure ends all ranks and is raised."""
        self._reset()
        futures = [self._threads.submit(self._guarded, work, comm) for comm in self.ranks]
        try:
            errors = [error for future in futures if (error := future.exception())]
        except BaseException:  # Ctrl-C while waiting: stop the ranks and wait for their end
            self._fail()
            wait(futures)
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, RankFailed)), errors[0])
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[Comm], T], comm: "Emulated") -> T:
        try:
            return work(comm)
        except BaseException:
            self._fail()
            raise
        finally:
            with self._changed:
                self._ended.add(comm.rank)
                self._changed.notify_all()

    def _fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def put(self, ticket: int, rank: int, x: Tensor) -> None:
        """Give this rank's message of exchange number `ticket`."""
        with self._changed:
            self._messages.setdefault(ticket, {})[rank] = x
            self._changed.notify_all()

    def take(self, ticket: int) -> list[Tensor]:
        """Every rank's message of that exchange, in rank order, once all are there."""
        with self._changed:
            parts = self._messages[ticket]
            self._changed.wait_for(lambda: self._failed or len(parts) == self.size or self._ended - parts.keys())
            if self._failed:
                raise RankFailed("another rank failed")
            if len(parts) < self.size:
                raise RuntimeError(f"rank {min(self._ended - parts.keys())} ended without a message others wait for")
            self._taken[ticket] = self._taken.get(ticket, 0) + 1
            if self._taken[ticket] == self.size:
                del self._messages[ticket], self._taken[ticket]
            return [parts[rank] for rank in range(self.size)]

    def close(self) -> None:
        self._fail()
        self._threads.shutdown()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Emulated:
    """One emulated rank's communicator."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self.next_ticket = 0
        self.rank = rank
        self.size = world.size

    def _send(self, x: Tensor) -> int:
        ticket = self.next_ticket
        self.next_ticket += 1
        self._world.put(ticket, self.rank, x)
        return ticket

    def all_reduce(self, x: Tensor) -> Pending:
        return _Pending(self._world, self._send(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._world.take(self._send(x)), dim=-1)


class _Pending:
    def __init__(self, world: World, ticket: int) -> None:
        self._world = world
        self._ticket = ticket
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result, *others = self._world.take(self._ticket)
            for other in others:
                self._result = self._result + other
        return self._result
