"""Ranks as processes of a test: they end in time, or are ended; and what torchrun would tell them."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The addresses and ports at which processes listen."""
    return {
        (str(each.laddr.ip), int(each.laddr.port))
        for pid in pids
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def world(size: int) -> list[dict[str, str]]:
    """What torchrun tells each rank."""
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    told = [{**common, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "none"} for rank in range(size)]
    return [{name: str(value) for name, value in each.items()} for each in told]


def run_processes(work: Callable[..., None], size: int, directory: Path, limit: float) -> None:
    """`work(rank, size, directory)` in `size` processes; one that fails ends the others and is raised here."""
    how = {"nprocs": size, "join": False, "start_method": "forkserver"}
    context = mp.start_processes(work, (size, str(directory)), **how)  # type: ignore[attr-defined, no-untyped-call]
    deadline = time.monotonic() + limit
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                pytest.fail(f"{size} ranks were not done after {limit:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
