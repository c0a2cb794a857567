"""Ranks as processes of a test: they end in time, or are ended."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.multiprocessing as mp


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
