"""The executor that starts a process for each rank, and the watchdog over them.

The caller's process holds no shard. A watchdog thread of it receives every rank's messages and checks its process and
its heartbeat; when a rank is killed, raises, or stops answering, all are killed at once and the caller gets one
sentence that names the rank.
"""

import contextlib
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ladder.engine.executors.heartbeat import Heartbeat
from ladder.engine.executors.rank_processes import HEARTBEAT, RankProcesses, fork_server
from ladder.engine.executors.worker import Loaded, Ready, StepOutput, run_rank
from ladder.engine.model_runner import Command, NewToken, Shutdown
from ladder.engine.setup import Setup
from ladder.errors import LadderError, RankError

START = 120.0  # seconds until a rank's first heartbeat, at most
SHUTDOWN = 5.0  # seconds for ranks that were asked to end
SUSPENDED = 2.0  # seconds between two looks beyond which this process itself was suspended


class MultiProcessExecutor:
    """`tp` ranks, each a process with one shard."""

    def __init__(
        self,
        setup: Setup,
        progress: Callable[[int], None] | None = None,
        target: Callable[..., None] = run_rank,
    ) -> None:
        self._size = setup.options.tp
        self._timeout = setup.options.timeout
        self._progress = progress
        self._outputs: queue.Queue[StepOutput | None] = queue.Queue()  # None: there will be no more, see self._error
        self._error: Exception | None = None
        self._closing = False
        self._watchdog: threading.Thread | None = None
        self._ready: set[int] = set()
        self.room = 0
        self._last = StepOutput([], setup.options.max_num_seqs, received=0)
        self._sent = 0  # messages to the first rank
        self._early: deque[list[NewToken]] = deque()  # of outputs that `free_slots` had to read
        shared: Any = fork_server().Array("d", Heartbeat.numbers(self._size), lock=False)
        self._heartbeats = [Heartbeat(shared, rank) for rank in range(self._size)]
        self._start = time.monotonic() + START  # a rank without a heartbeat is counted as silent from then on
        self._looked = time.monotonic()  # when the ranks were last looked at
        self._resumed = 0.0  # when this process was last suspended; no rank counts as silent for longer than that
        options = replace(setup.options, dtype=setup.config.dtype)  # auto is decided once, here
        self._ranks = RankProcesses(self._size, target, options, shared)
        try:
            self._watchdog = threading.Thread(target=self._watch, name="ladder-watchdog", daemon=True)
            self._watchdog.start()
            self.poll()  # the empty output that is sent when all ranks are ready
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return self._ranks.pids

    def send(self, commands: Sequence[Command]) -> None:
        if self._error is not None:
            self._raise()
        if not commands:
            return
        with contextlib.suppress(OSError):  # a rank that has just died: the watchdog will report it
            self._ranks.first.send(list(commands))
        self._sent += 1

    @property
    def free_slots(self) -> int:
        while self._last.received < self._sent and not self._closing:
            self._early.append(self._next().tokens)
        return self._last.free_slots

    def poll(self) -> list[NewToken]:
        return self._early.popleft() if self._early else self._next().tokens

    def _next(self) -> StepOutput:
        while True:  # in short waits, which Ctrl-C can interrupt
            with contextlib.suppress(queue.Empty):
                output = self._outputs.get(timeout=0.5)
                if output is None:
                    self._raise()
                self._last = output
                return output

    def _raise(self) -> NoReturn:
        self._outputs.put(None)  # for the next call
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Ask the ranks to end; kill those that do not."""
        if self._closing:
            return
        self._closing = True
        if self._error is None and len(self._ready) == self._size:
            with contextlib.suppress(OSError):
                if select.select([], [self._ranks.first], [], 0)[1]:  # else its pipe is full: it has stopped reading
                    self._ranks.first.send([Shutdown()])
            self._ranks.join(SHUTDOWN)
        self._ranks.kill()
        if self._watchdog is not None:
            self._watchdog.join()
        if self._error is None:  # a thread that waits for tokens has waited in vain
            self._error = LadderError("this engine has been closed: make a new one")
            self._outputs.put(None)
        self._ranks.close()

    def _watch(self) -> None:
        """The watchdog's thread: until a rank fails or the caller closes."""
        try:
            while not self._closing:
                ended = self._ranks.wait(HEARTBEAT)
                for rank in range(self._size):
                    self._receive(rank)
                failed = ended or self._ranks.failures or self._ranks.closed or self._unresponsive()
                if failed and not self._closing:
                    return self._fail(self._ranks.cause(self._unresponsive))
        except Exception as error:  # raised by the caller's `progress`, for one: no ranks without a watchdog
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._ranks.kill()
        self._outputs.put(None)

    def _receive(self, rank: int) -> None:
        for message in self._ranks.receive(rank):
            match message:
                case Loaded(count):
                    if self._progress is not None:
                        self._progress(count)
                case Ready(room):
                    self.room = room
                    self._ready.add(rank)
                    if len(self._ready) == self._size:
                        self._outputs.put(self._last)
                case StepOutput() as output:
                    self._outputs.put(output)

    def _unresponsive(self) -> RankError | None:
        """A rank whose last heartbeat is too old, or that has computed for too long."""
        now = time.monotonic()  # one time for all that follows: this process may be suspended at any line
        if now - self._looked > SUSPENDED:  # the ranks may have been suspended with it
            self._resumed = now
        self._looked = now
        alive = [max(heartbeat.last_sign(self._start), self._resumed) for heartbeat in self._heartbeats]
        rank = alive.index(min(alive))
        if now - alive[rank] <= self._timeout:
            return None
        return RankError(f"rank {rank} has not answered for {self._timeout:g} s; all ranks were stopped")
