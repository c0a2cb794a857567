"""The thread that owns an executor: it starts it, steps it, and starts another one when its ranks have failed."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from ladder.engine.executors.start import Executor
from ladder.engine.frontend.open_requests import OpenRequests, Owner
from ladder.engine.requests import Chunk, Request
from ladder.errors import LadderError

logger = logging.getLogger(__name__)
IDLE = 0.5  # seconds between two looks at the ranks while there is nothing to compute
ENGINES = 3  # failed engines after which a request is not tried again: it may be the cause

Start = Callable[[Callable[[int], None]], Executor]  # given what to call with bytes of weights as they are loaded
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Restarts:
    """What happens after a failure: the engine is started again after `first` seconds, then after twice as long, ...

    Given up after more than `limit` failures in a row, between which no request has finished.
    """

    limit: int = 0
    first: float = 1.0
    longest: float = 60.0

    def delay(self, failures: int) -> float:
        return float(min(self.longest, self.first * 2.0 ** min(failures - 1, 100)))


@dataclass(frozen=True)
class Status:
    """starting, ready, restarting, failed or closed; and the error that led there."""

    state: str
    error: Exception | None = None


class Supervisor(Generic[Owner]):
    """An executor, its thread, and the requests that are open on it."""

    def __init__(
        self,
        start: Start,
        deliver: Callable[[list[tuple[Owner, Chunk]]], None],
        fail: Callable[[Sequence[Owner], Exception], None],
        restarts: Restarts | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Waits until the executor has been started. `deliver` and `fail` are called by the thread."""
        self.requests: OpenRequests[Owner] = OpenRequests()
        self.status = Status("starting")
        self.failures = 0  # of all engines so far
        self._start = start
        self._deliver = deliver
        self._fail = fail
        self._restarts = restarts or Restarts()
        self._progress = progress
        self._executor: Executor | None = None
        self._served = False  # whether a request has finished since the engine was started
        self._closing = False
        self._changed = threading.Condition(self.requests.lock)
        self._decided = threading.Event()  # whether the first start has succeeded
        self._commands = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "ladder-engine"), (self._send, "ladder-sender"))
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._decided.wait()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if self.status.state == "failed":
            assert self.status.error is not None
            self.close()
            raise self.status.error

    def add(self, requests: Sequence[Request], owner: Owner) -> list[int]:
        """From any thread; returns at once."""
        with self.requests.lock:
            if self.status.state in ("failed", "closed"):
                error = self.status.error or LadderError("this engine has been closed: make a new one")
                raise error.with_traceback(None)
            ids = self.requests.add(requests, owner)
            self._changed.notify_all()
        self._commands.set()
        return ids

    def cancel(self, ids: Sequence[int]) -> None:
        """From any thread; returns at once. Requests that have ended are no error."""
        for id in ids:
            self.requests.cancel(id)
        self._commands.set()

    def close(self) -> None:
        """Stop all ranks. Requests that are still open get an error. A second call does nothing."""
        self._closing = True
        with self.requests.lock:
            self._changed.notify_all()
            executor = self._executor
        if executor is not None:
            executor.close()  # wakes the thread where it waits for tokens
        self._commands.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        """A thread of its own sends commands: a rank's pipe may be full for as long as a step takes."""
        while not self._closing:
            self._commands.wait()
            self._commands.clear()
            # the ranks have failed: the engine's thread is told as well, and keeps the requests
            with contextlib.suppress(Exception):
                self.requests.flush()

    def _run(self) -> None:
        failures = 0  # in a row
        while True:
            try:
                self._serve()
                error: Exception = LadderError("this engine has been closed: make a new one")
            except BaseException as raised:
                error = raised if isinstance(raised, Exception) else LadderError(f"the engine was ended: {raised!r}")
            self._stop()
            if self._closing:
                return self._end(Status("closed"), error)
            self.failures += 1
            failures = 1 if self._served else failures + 1
            if self.status.state == "starting" or failures > self._restarts.limit:
                return self._end(Status("failed", error), error)
            self.status = Status("restarting", error)
            self._fail(self.requests.suspend(ENGINES), error)
            delay = self._restarts.delay(failures)
            logger.error("%s; the engine is started again in %g s", error, delay)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, delay)

    def _serve(self) -> None:
        """Until something fails, or this is closed."""
        if self._closing:
            return
        executor = self._start(self._loading)
        with self.requests.lock:
            self._executor = executor
            self._served = False
        self.requests.resume(executor)
        if self.failures:
            logger.warning("the engine has been started again; %d requests were kept", len(self.requests))
        self.status = Status("ready")
        self._decided.set()
        self._commands.set()
        while not self._closing:
            if not len(self.requests):
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or len(self.requests), IDLE)
                executor.send(())  # raises where a rank has failed
                continue
            self.requests.flush(wait=False)
            if chunks := self.requests.step():
                self._served = self._served or any(chunk.finish_reason for _, chunk in chunks)
                self._deliver(chunks)

    def _loading(self, count: int) -> None:
        if self._closing:
            raise LadderError("this engine has been closed while it loaded")
        if self._progress is not None and not self._decided.is_set():
            self._progress(count)

    def _stop(self) -> None:
        with self.requests.lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            with contextlib.suppress(Exception):
                executor.close()

    def _end(self, status: Status, error: Exception) -> None:
        with self.requests.lock:  # from here on nobody can add one
            self.status = status
            owners = self.requests.suspend(0)
        self._fail(owners, error)
        self._decided.set()
