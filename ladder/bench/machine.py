"""The measuring machine: its names, its clock, and its measured peaks."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ladder.bench.peak import read_bytes_per_second
from ladder.jit import triton

WARM_UP, STEPS = 5, 25


def milliseconds(work: Callable[[], object], steps: int = STEPS, warm_up: int = WARM_UP) -> list[float]:
    """What each of `steps` calls took on the GPU, by its events."""
    for _ in range(warm_up):
        work()
    found = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def spread(found: Sequence[float]) -> dict[str, float]:
    """Median, first and third quartile, and how many."""
    low, median, high = statistics.quantiles(found, n=4)
    return {"ms": round(median, 4), "ms_q1": round(low, 4), "ms_q3": round(high, 4), "steps": len(found)}


def peaks(device: torch.device) -> dict[str, float]:
    """What this GPU reached just now: bytes per second of pure reading, operations per second of a matrix product."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    product = statistics.median(milliseconds(lambda: a @ b, 20))
    return {"read_tb_s": read_bytes_per_second(device) / 1e12, "bf16_tflop_s": 2 * 8192**3 / product / 1e9}


def core_peaks(dtype: torch.dtype, megabytes: int = 128, side: int = 1024) -> dict[str, float]:
    """The same of this process on the CPU: the better of a plain sum and a matrix times a vector, neither of which any
    cache holds, and a matrix product. Ranks that share a machine must take it at the same time.
    """
    rows = megabytes * 2**20 // (4096 * dtype.itemsize)
    table, vector = torch.ones(rows, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    a, b = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(10):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        return min(found)  # what else the machine does meanwhile is not its peak

    reading = min(seconds(table.sum), seconds(lambda: table @ vector))
    product = seconds(lambda: a @ b)
    return {"read_tb_s": rows * 4096 * dtype.itemsize / reading / 1e12, "tflop_s": 2 * side**3 / product / 1e12}


def machine(device: torch.device) -> dict[str, Any]:
    """The chip, the software, and the commit of this program; None outside of a repository."""
    here = Path(__file__).parent
    try:
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        commit = ""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    software = {"torch": torch.__version__, "triton": getattr(triton, "__version__", None)}
    software["python"] = platform.python_version()
    return {"chip": chip, "cores": os.cpu_count(), **software, "commit": commit or None}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
