"""Processes for ranks: how they are started, how a failure is reported, and which rank is named as its cause."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch.distributed as dist

from ladder.engine.executors.rendezvous import Rendezvous
from ladder.errors import LadderError, RankError

HEARTBEAT = 0.2  # seconds between two heartbeats of a rank
GRACE = 1.0  # seconds in which all ranks may report a failure: the first to do so has often only lost a peer


def fork_server(*modules: str) -> ForkServerContext:
    """The context of a process that imports torch, and `modules`, once, and from which all ranks are forked.

    Ranks see the environment with which it was started. It ignores Ctrl-C, which is for the caller.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["ladder.engine.executors.worker", *modules])
    resource_tracker.ensure_running()  # unblocks signals: it must not be started within the next lines
    with _sigint_blocked():
        forkserver.ensure_running()
    return context


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@dataclass(frozen=True)
class Failed:
    """A rank's report of its failure."""

    reason: str
    bad_input: bool
    lost_peer: bool  # its communication broke: another rank is the cause


@contextmanager
def reporting_failures(pipe: Connection, heartbeat: Callable[[], None] | None = None) -> Iterator[None]:
    """What every rank's process runs in: an exception is sent to the caller as `Failed`, and the process ends when
    the caller's ends. A thread calls `heartbeat` regularly.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C, and stops this process
    threading.Thread(target=_end_with_parent, args=(heartbeat,), daemon=True).start()
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # the caller has closed the pipe
            pipe.send(_report(error))
        raise SystemExit(1) from None


def _report(error: BaseException) -> Failed:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, LadderError):
        return Failed(reason, bad_input=True, lost_peer=False)
    lost = isinstance(error, dist.DistError | ConnectionError) or "gloo" in reason or "Connection" in reason
    return Failed(f"{type(error).__name__}: {reason}", bad_input=False, lost_peer=lost)


def _end_with_parent(heartbeat: Callable[[], None] | None) -> None:
    """However the process that started this one ends."""
    parent = parent_process()
    assert parent is not None
    while not connection.wait([parent.sentinel], timeout=HEARTBEAT):
        if heartbeat is not None:
            heartbeat()
    os._exit(1)


class RankProcesses:
    """`size` processes that run `target(rank, rendezvous, pipe, *arguments)`, each with a pipe to this process."""

    def __init__(self, size: int, target: Callable[..., None], *arguments: Any) -> None:
        self.failures: dict[int, Failed] = {}
        self.closed: set[int] = set()  # ranks whose pipe has ended
        self._heard = False  # whether any rank has sent a message
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._rendezvous = Rendezvous(size)
        context = fork_server()
        try:
            with _sigint_blocked():  # a process that was started must be in the list
                for rank in range(size):
                    ours, theirs = context.Pipe()
                    self._pipes.append(ours)
                    given = (rank, self._rendezvous, theirs, *arguments)
                    process = context.Process(target=target, args=given, name=f"ladder-rank-{rank}", daemon=True)
                    process.start()
                    self._processes.append(process)
                    theirs.close()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    @property
    def first(self) -> Connection:
        """The pipe to the first rank."""
        return self._pipes[0]

    def wait(self, timeout: float) -> bool:
        """Wait until a rank has sent something or has ended; whether one has ended."""
        open = [rank for rank in range(len(self._processes)) if rank not in self.closed]
        sentinels = [self._processes[rank].sentinel for rank in open]
        ready = connection.wait([*(self._pipes[rank] for rank in open), *sentinels], timeout=timeout)
        return any(sentinel in ready for sentinel in sentinels)

    def receive(self, rank: int) -> Iterator[Any]:
        """The messages that a rank has sent since the last call. Its failure and its end are noted, not returned."""
        try:
            while rank not in self.closed and self._pipes[rank].poll():
                message = self._pipes[rank].recv()
                self._heard = True
                if isinstance(message, Failed):
                    self.failures[rank] = message
                else:
                    yield message
        except (EOFError, OSError):
            self.closed.add(rank)

    def cause(self, unresponsive: Callable[[], RankError | None] = lambda: None) -> Exception:
        """Why the ranks cannot go on: a killed rank, else one that failed by itself, else an unresponsive one."""
        deadline = time.monotonic() + GRACE
        while True:
            for rank, process in enumerate(self._processes):
                for _ in self.receive(rank):
                    pass
                if process.exitcode is not None and process.exitcode < 0 and rank not in self.failures:
                    name = signal.Signals(-process.exitcode).name
                    return RankError(f"rank {rank} was killed by {name}; all ranks were stopped")
            for rank, failed in self.failures.items():
                if failed.bad_input:
                    return LadderError(failed.reason)
                if not failed.lost_peer:
                    return RankError(f"rank {rank} failed: {failed.reason}; all ranks were stopped")
            if (error := unresponsive()) is not None:
                return error
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and rank not in self.failures:
                # a rank imports the script it was started from, which must not start ranks by that
                hint = "" if self._heard else " (a script must do its work under if __name__ == '__main__')"
                return RankError(f"rank {rank} ended unexpectedly{hint}; all ranks were stopped")
        for rank, failed in self.failures.items():
            return RankError(f"rank {rank} lost the others: {failed.reason}; all ranks were stopped")
        return RankError("the ranks closed their pipes; all ranks were stopped")

    def join(self, seconds: float) -> None:
        """Wait until all ranks have ended, for so long at most."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():  # else its process id may be another's by now
                process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """Kill what is left, and free the pipes."""
        self.kill()
        for pipe in self._pipes:
            pipe.close()
        self._rendezvous.close()
