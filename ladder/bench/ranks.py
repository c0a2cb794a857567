"""Ranks for measurements: processes that run one function each and end together."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

from ladder.engine.control import join, leave, own_device

TIMEOUT = 300.0  # seconds a rank may wait for another


def run_ranks(
    size: int, device: torch.device, work: Callable[..., None], *arguments: Any, wire: str | None = None
) -> None:
    """`work(comm, device, *arguments)` in `size` processes, a thread each; a failure of one ends all.

    Without a `wire` it is NCCL between GPUs and gloo elsewhere, so that what was measured has one name everywhere.
    """
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    spawn(_rank, (size, device, store.port, wire, work, arguments), nprocs=size)


def _rank(
    rank: int,
    size: int,
    device: torch.device,
    port: int,
    wire: str | None,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    device, own_gpu = own_device(device, rank, size)
    comm, _ = join(rank, size, device, own_gpu, wire or ("nccl" if own_gpu else "gloo"), TIMEOUT, store)
    with torch.inference_mode():
        work(comm, device, *arguments)
    leave()
