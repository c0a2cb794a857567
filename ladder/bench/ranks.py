"""Processes for measurements: each rank runs one function, and all end together."""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ladder.engine.executors.control import join, leave, own_device, stay_on_this_machine
from ladder.engine.executors.rank_processes import RankProcesses, reporting_failures
from ladder.engine.executors.rendezvous import Rendezvous
from ladder.logs import shown

TIMEOUT = 300.0  # seconds a rank may wait for another


@dataclass(frozen=True)
class Done:
    """A rank's last message."""


def run_ranks(
    size: int, device: torch.device, work: Callable[..., None], *arguments: Any, comm_backend: str | None = None
) -> None:
    """`work(comm, device, *arguments)` in `size` processes, a thread each; a failure of one ends all.

    Without a `comm_backend` it is NCCL between GPUs and gloo elsewhere, so that a measurement has one name everywhere.
    """
    for _ in stream_ranks(size, device, work, *arguments, comm_backend=comm_backend):
        pass


def stream_ranks(
    size: int,
    device: torch.device,
    work: Callable[..., Iterable[Any] | None],
    *arguments: Any,
    comm_backend: str | None = None,
) -> Generator[Any, None, None]:
    """The same for a `work` that yields: what the first rank yields, as it comes. Closing the iterator, or Ctrl-C,
    ends the ranks.
    """
    ranks = RankProcesses(size, _rank, size, device, comm_backend, work, arguments)
    try:
        running = set(range(size))
        while running:
            ranks.wait(1.0)
            for rank in range(size):
                for message in ranks.receive(rank):
                    if isinstance(message, Done):
                        running.discard(rank)
                    else:
                        yield message
            if ranks.failures or running & ranks.closed:
                raise ranks.cause()
    finally:
        ranks.close()


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
    rendezvous: Rendezvous,
    pipe: Connection,
    size: int,
    device: torch.device,
    comm_backend: str | None,
    work: Callable[..., Iterable[Any] | None],
    arguments: tuple[Any, ...],
) -> None:
    with reporting_failures(pipe), shown(rendezvous.log_level, f"ladder rank {rank}"):
        torch.set_num_threads(1)
        stay_on_this_machine()
        device, own_gpu = own_device(device, rank, size)
        backend, store = comm_backend or ("nccl" if own_gpu else "gloo"), rendezvous.store()
        comm, _ = join(rank, size, device, own_gpu, backend, TIMEOUT, store, rendezvous.token)
        with torch.inference_mode():
            for result in work(comm, device, *arguments) or ():
                if rank == 0:
                    pipe.send(result)
        leave()
        pipe.send(Done())
