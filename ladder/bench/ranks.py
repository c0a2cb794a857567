"""Ranks for measurements: processes that run one function each and end together."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ladder.engine.control import join, leave, own_device
from ladder.engine.nursery import nursery
from ladder.errors import LadderError, RankError

TIMEOUT = 300.0  # seconds a rank may wait for another
GRACE = 1.0  # seconds in which a rank that was killed may be found: the first one heard is often only its victim


def run_ranks(
    size: int, device: torch.device, work: Callable[..., None], *arguments: Any, wire: str | None = None
) -> None:
    """`work(comm, device, *arguments)` in `size` processes, a thread each; a failure of one ends all.

    Without a `wire` it is NCCL between GPUs and gloo elsewhere, so that what was measured has one name everywhere.
    """
    for _ in told_by_ranks(size, device, work, *arguments, wire=wire):
        pass


def told_by_ranks(
    size: int,
    device: torch.device,
    work: Callable[..., Iterable[Any] | None],
    *arguments: Any,
    wire: str | None = None,
) -> Iterator[Any]:
    """The same of a `work` that yields: what the first rank's yields, as it comes. Whoever stops listening, or is
    stopped by Ctrl-C, ends the ranks by that.
    """
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    context = nursery()
    pipes: list[Connection] = []
    processes: list[ForkServerProcess] = []
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not between a start and its note
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            given = (rank, size, device, store.port, wire, work, arguments, theirs)
            process = context.Process(target=_rank, args=given, name=f"ladder-rank-{rank}", daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        yield from _heard(pipes, processes)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for process in processes:
            if process.is_alive():  # else its number may be another's by now
                process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


class Failed(NamedTuple):
    """A rank's last words; `refused`: the input was bad."""

    reason: str
    refused: bool


class Done(NamedTuple):
    """A rank's last words, where all is well."""


def _heard(pipes: Sequence[Connection], processes: Sequence[ForkServerProcess]) -> Iterator[Any]:
    speaking = {pipe: rank for rank, pipe in enumerate(pipes)}
    while speaking:
        for pipe in connection.wait(list(speaking), timeout=1.0):
            assert isinstance(pipe, Connection)
            rank = speaking[pipe]
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                said = Failed("it ended without a word", refused=False)
            match said:
                case Failed():
                    raise _cause(rank, said, processes)
                case Done():
                    del speaking[pipe]
                case _:
                    yield said


def _cause(rank: int, failed: Failed, processes: Sequence[ForkServerProcess]) -> Exception:
    """Why the ranks cannot go on: a killed one, else the one that said so first."""
    if failed.refused:
        return LadderError(failed.reason)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        for number, process in enumerate(processes):
            if process.exitcode is not None and process.exitcode < 0:
                name = signal.Signals(-process.exitcode).name
                return RankError(f"rank {number} was killed by {name}; all ranks were stopped")
        time.sleep(0.02)
    return RankError(f"rank {rank} failed: {failed.reason}; all ranks were stopped")


def together(work: Callable[[], object], device: torch.device) -> float:
    """Seconds from when all ranks are ready to when the last has finished."""
    several = dist.is_initialized()
    if several:
        dist.barrier()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slowest(time.perf_counter() - begin, device)


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' `seconds`, on all ranks."""
    if not dist.is_initialized():
        return seconds
    largest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _rank(
    rank: int,
    size: int,
    device: torch.device,
    port: int,
    wire: str | None,
    work: Callable[..., Iterable[Any] | None],
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's business
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, size, is_master=False)
        device, own_gpu = own_device(device, rank, size)
        comm, _ = join(rank, size, device, own_gpu, wire or ("nccl" if own_gpu else "gloo"), TIMEOUT, store)
        with torch.inference_mode():
            for told in work(comm, device, *arguments) or ():
                if rank == 0:
                    pipe.send(told)
        leave()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        refused = isinstance(error, LadderError)
        pipe.send(Failed(reason if refused else f"{type(error).__name__}: {reason}", refused))
        raise SystemExit(1) from None
    pipe.send(Done())


def _end_with_parent() -> None:
    """However the process that started this one ended."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
