"""Ranks as processes of our own, and the watch kept over them.

The caller's process holds no shard. A thread of it listens to every rank and looks at each one's life and pulse; when
one is killed, raises, or stops answering, all are killed at once and the caller gets one sentence that names the rank.
"""

import contextlib
import queue
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ladder.engine.core import Command, Stop, Token
from ladder.engine.nursery import nursery
from ladder.engine.rank import PULSE, Failed, Loaded, Ready, Report, run_rank
from ladder.engine.requests import Opened
from ladder.engine.vitals import Vitals
from ladder.errors import LadderError, RankError

START = 120.0  # seconds a rank may take until its first sign of life
GRACE = 1.0  # seconds in which all ranks may say why they failed: the first one heard is often only a victim
GOODBYE = 5.0  # seconds for ranks that were asked to end
NAP = 2.0  # seconds between two looks of the watch, beyond which it has not been running


class Processes:
    """`tp` ranks, each a process with one shard."""

    def __init__(
        self,
        opened: Opened,
        progress: Callable[[int], None] | None = None,
        target: Callable[..., None] = run_rank,
    ) -> None:
        self._size = opened.options.tp
        self._timeout = opened.options.timeout
        self._progress = progress
        self._reports: queue.Queue[Report | None] = queue.Queue()  # None: there will be no more, see self._error
        self._error: Exception | None = None
        self._closing = False
        self._watcher: threading.Thread | None = None
        self._ready: set[int] = set()
        self._accounts: dict[int, Failed] = {}
        self._last = Report([], opened.options.batch, heard=0)
        self._told = 0  # messages to the first rank
        self._early: deque[list[Token]] = deque()  # of reports that `free_slots` had to read
        # where the ranks meet: on loopback, at a port that the system chooses and that ends with this process
        self._store = TCPStore("127.0.0.1", 0, self._size, is_master=True, wait_for_workers=False)
        context = nursery()
        shared: Any = context.Array("d", Vitals.room(self._size), lock=False)
        self._vitals = [Vitals(shared, rank) for rank in range(self._size)]
        self._start = time.monotonic() + START  # who has not been seen yet is silent since then
        self._awake = 0.0  # nobody is silent for longer than since then: this process was stopped itself
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                arguments = (rank, opened.options, self._store.port, theirs, shared)
                process = context.Process(target=target, args=arguments, name=f"ladder-rank-{rank}", daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._watcher = threading.Thread(target=self._watch, name="ladder-watch", daemon=True)
            self._watcher.start()
            self.poll()  # the empty report that says that all are ready
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' process numbers."""
        return [process.pid or 0 for process in self._processes]

    def tell(self, commands: Sequence[Command]) -> None:
        if self._error is not None:
            self._raise()
        with contextlib.suppress(OSError):  # a rank that has just died: the watch will say so
            self._pipes[0].send(list(commands))
        self._told += 1

    @property
    def free_slots(self) -> int:
        while self._last.heard < self._told and not self._closing:
            self._early.append(self._next().tokens)
        return self._last.free_slots

    def poll(self) -> list[Token]:
        return self._early.popleft() if self._early else self._next().tokens

    def _next(self) -> Report:
        while True:  # in short waits, which Ctrl-C can end
            with contextlib.suppress(queue.Empty):
                report = self._reports.get(timeout=0.5)
                if report is None:
                    self._raise()
                self._last = report
                return report

    def _raise(self) -> NoReturn:
        self._reports.put(None)  # for whoever asks again
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not."""
        if self._closing:
            return
        self._closing = True
        patience = GOODBYE if self._error is None and len(self._ready) == self._size else 0.0
        if patience:
            with contextlib.suppress(OSError):
                if select.select([], [self._pipes[0]], [], 0)[1]:  # else it has not listened for long
                    self._pipes[0].send([Stop()])
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        if self._watcher is not None:
            self._watcher.join()
        for pipe in self._pipes:
            pipe.close()
        del self._store

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():  # else its number may be another's by now
                process.kill()
        for process in self._processes:
            process.join()

    def _watch(self) -> None:
        """The watch's thread: until somebody fails or the caller closes."""
        try:
            self._look_after()
        except Exception as error:  # say, of the caller's `progress`: better an end than a watch without a watchman
            self._end(error)

    def _look_after(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        looked = time.monotonic()
        while not self._closing:
            ready = connection.wait([*self._pipes, *sentinels], timeout=PULSE)
            if time.monotonic() - looked > NAP:  # this process was stopped, and the ranks may have been with it
                self._awake = time.monotonic()
            looked = time.monotonic()
            deaf = [rank for rank in range(self._size) if not self._listen(rank)]
            dead = [sentinel for sentinel in sentinels if sentinel in ready]
            if (deaf or dead or self._silent() is not None) and not self._closing:
                return self._end(self._cause())

    def _end(self, error: Exception) -> None:
        self._error = error
        self._kill()
        self._reports.put(None)

    def _listen(self, rank: int) -> bool:
        """Hear all that a rank has to say; False where it says that it failed, or will say nothing any more."""
        try:
            while self._pipes[rank].poll():
                match self._pipes[rank].recv():
                    case Loaded(count):
                        if self._progress is not None:
                            self._progress(count)
                    case Ready():
                        self._ready.add(rank)
                        if len(self._ready) == self._size:
                            self._reports.put(self._last)
                    case Report() as report:
                        self._reports.put(report)
                    case Failed() as account:
                        self._accounts[rank] = account
        except (EOFError, OSError):
            return False
        return rank not in self._accounts

    def _silent(self) -> int | None:
        """A rank that has shown no sign of life, or has computed, for longer than the time-out."""
        signs = [max(vitals.last_sign(self._start), self._awake) for vitals in self._vitals]
        oldest = signs.index(min(signs))
        return oldest if time.monotonic() - signs[oldest] > self._timeout else None

    def _cause(self) -> Exception:
        """Why the ranks cannot go on: a killed one, else one that failed by itself, else one that does not answer."""
        deadline = time.monotonic() + GRACE
        while True:
            for rank, process in enumerate(self._processes):
                self._listen(rank)
                if process.exitcode is not None and process.exitcode < 0 and rank not in self._accounts:
                    name = signal.Signals(-process.exitcode).name
                    return RankError(f"rank {rank} was killed by {name}; all ranks were stopped")
            for rank, account in self._accounts.items():
                if account.refused:
                    return LadderError(account.reason)
                if not account.victim:
                    return RankError(f"rank {rank} failed: {account.reason}; all ranks were stopped")
            if (silent := self._silent()) is not None:
                return RankError(f"rank {silent} has not answered for {self._timeout:g} s; all ranks were stopped")
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and rank not in self._accounts:
                # a rank imports the script it was started from, which must not start ranks by that
                hint = "" if self._ready else " (a script must do its work under if __name__ == '__main__')"
                return RankError(f"rank {rank} ended unexpectedly{hint}; all ranks were stopped")
        for rank, account in self._accounts.items():
            return RankError(f"rank {rank} lost the others: {account.reason}; all ranks were stopped")
        return RankError("the ranks closed their pipes; all ranks were stopped")
