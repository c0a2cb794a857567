"""Symmetric memory between ranks that share one GPU: all-reduces against float64, tokens against one CPU rank.

TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python experiments/symmetric_gpu.py [DEVICE] > results/symmetric_gpu.jsonl

Ranks on one GPU take turns on it, so an all-reduce takes milliseconds: this shows whether it is right, not how fast it
is. Each part is a process of its own, which is ended when it writes no line for too long. One JSON line per check; the
exit status is 1 if any failed.
"""

import contextlib
import json
import math
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.bench.ranks import run_ranks
from ladder.checkpoint import Random, load, save
from ladder.comm.base import Comm
from ladder.comm.symmetric import MAX_BYTES, Symmetric, choose
from ladder.config import ModelConfig
from ladder.model import Decoder

LIMIT = 60.0  # seconds until the next line of a part
DEGREES = (2, 4)
WIRINGS = ("standard", "ladder", "parallel", "ladder-2", "ladder-1-2", "standard:2 ladder:2")
PROMPTS = [[1], list(range(2, 40)), [5, 17, 9]]
TOKENS = 12
# elements: 1 KB to 8 MB in float32, then numbers that are no whole grains of 16 bytes, and one beyond the room
COUNTS = (256, 4096, 65_536, 262_144, 2_097_152, 1, 3, 257, 4099, 100_003, 2_097_151, 2_097_153)
DTYPES = {torch.float32: 2**-24, torch.bfloat16: 2**-8}  # with the error of one addition, relative to what is added


def report(**line: Any) -> bool:
    print(json.dumps(line), flush=True)
    return bool(line["ok"])


def mine(rank: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """What a rank sends; every rank can compute it."""
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def error(found: Tensor, size: int, seed: int) -> float:
    """The largest deviation from the sum in float64, in units of what rounding may cost; 1 is the most allowed."""
    sent = torch.stack([mine(rank, found.numel(), found.dtype, seed).double() for rank in range(size)])
    allowed = (size - 1) * DTYPES[found.dtype] * sent.abs().sum(0) + 1e-30
    deviation = (found.double().cpu() - sent.sum(0)).abs() / allowed
    return float("inf") if deviation.isnan().any() else float(deviation.max())


def poison(comm: Symmetric) -> None:
    """What lies in the shared memory must not show: not a number, in either type."""
    torch.cuda.synchronize()
    comm._room.memory.fill_(255)
    torch.cuda.synchronize()


def same(comm: Comm, x: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    parts = comm.all_gather(x.float()).view(comm.size, -1)
    return bool((parts == parts[0]).all())


def judge(comm: Comm, check: str, errors: list[float], agree: bool = True, **line: Any) -> None:
    """The first rank writes the line."""
    worst = torch.tensor([max(errors), 0.0 if agree else float("inf")], device="cuda").max().view(1)
    all_worst = float(comm.all_gather(worst).max())
    if comm.rank == 0:
        shown = round(all_worst, 3) if math.isfinite(all_worst) else None
        line |= {"tp": comm.size, "worst": shown, "all_reduces": len(errors)}
        report(check=check, **line, ok=all_worst <= 1.0)


def single(comm: Comm, device: torch.device) -> None:
    """One all-reduce after another."""
    assert isinstance(comm, Symmetric)
    for dtype in DTYPES:
        for seed, count in enumerate(COUNTS):
            poison(comm)
            found = comm.all_reduce(mine(comm.rank, count, dtype, seed).to(device)).wait()
            kernel = choose(comm.size, count * found.element_size(), dtype, comm._room.multicast, MAX_BYTES)
            line = {"dtype": str(dtype), "elements": count, "kernel": kernel or "the other communicator's"}
            judge(comm, "an all-reduce", [error(found, comm.size, seed)], same(comm, found), **line)


def several(comm: Comm, device: torch.device) -> None:
    """Eight all-reduces in flight, of all sizes and types; they are waited for in another order than started."""
    assert isinstance(comm, Symmetric)
    poison(comm)
    for order in (range(8), range(7, -1, -1), (3, 0, 7, 1, 6, 2, 5, 4)):
        errors = []
        for dtypes in ([torch.float32] * 8, [torch.bfloat16] * 8, [torch.float32, torch.bfloat16] * 4):
            sent = [mine(comm.rank, COUNTS[i], dtypes[i], i).to(device) for i in range(8)]
            pending = [comm.all_reduce(x) for x in sent]
            found = {i: pending[i].wait() for i in order}
            errors += [error(found[i], comm.size, i) for i in order]
        judge(comm, "eight all-reduces in flight", errors, order=list(order))


def graph(comm: Comm, device: torch.device) -> None:
    """Eight all-reduces in flight in a CUDA graph, computation beside them; three replays with new messages."""
    assert isinstance(comm, Symmetric)
    dtypes = [torch.float32, torch.bfloat16] * 4
    given = [torch.zeros(COUNTS[i], dtype=dtypes[i], device=device) for i in range(8)]
    beside = torch.randn(512, 512, device=device)
    (beside @ beside).sum().item()  # the matrix library sets itself up outside the graph
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        pending = [comm.all_reduce(x.clone()) for x in given]
        torch.mm(beside, beside)
        taken = [one.wait().clone() for one in pending]
    for replay in (1, 2, 3):
        poison(comm)
        for i, x in enumerate(given):
            x.copy_(mine(comm.rank, COUNTS[i], dtypes[i], 100 * replay + i))
            taken[i].fill_(float("nan"))
        captured.replay()
        errors = [error(x, comm.size, 100 * replay + i) for i, x in enumerate(taken)]
        judge(comm, "all-reduces in a CUDA graph", errors, replay=replay)
    pending = [comm.all_reduce(mine(comm.rank, COUNTS[i], dtypes[i], i).to(device)) for i in range(8)]
    judge(comm, "all-reduces after a CUDA graph", [error(one.wait(), comm.size, i) for i, one in enumerate(pending)])


def light(comm: Comm, device: torch.device) -> None:
    """All-reduces by our own kernel, which sets a flag: one after another, and from a graph that is replayed."""
    for dtype, count in product((torch.float32, torch.bfloat16), (1, 1000, 8192, 65536)):
        errors, flags = [], torch.zeros(3, dtype=torch.int32, device=device)
        for seed in range(3):
            x = mine(comm.rank, count, dtype, seed).to(device)
            done = comm.all_reduce_and_signal(x, flags[seed : seed + 1])  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            errors.append(error(x, comm.size, seed) if done and int(flags[seed]) == done[1] else float("inf"))
        judge(comm, "an all-reduce that sets a flag", errors, dtype=str(dtype), count=count)
    x = mine(comm.rank, 8192, torch.float32, 7).to(device)
    start, flag = x.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        x.copy_(start)
        comm.all_reduce_and_signal(x, flag)  # type: ignore[attr-defined]
    for replay in range(3):
        start.copy_(mine(comm.rank, 8192, torch.float32, replay).to(device))
        recorded.replay()
        torch.cuda.synchronize()
        judge(comm, "an all-reduce that sets a flag, in a CUDA graph", [error(x, comm.size, replay)], replay=replay)


def sums(comm: Comm, device: torch.device) -> None:
    light(comm, device)
    single(comm, device)
    several(comm, device)
    graph(comm, device)


def tokens(tp: int, device: str) -> None:
    directory = Path(tempfile.mkdtemp()) / "model"
    save(load(Decoder(ModelConfig.named("tiny")), Random(seed=5, deviation=0.15)), directory)
    for wiring in sys.argv[4:] or WIRINGS:
        with LLM(directory, wiring=wiring) as llm:
            expected = [result.token_ids for result in llm.generate(PROMPTS, SamplingParams(TOKENS))]
        begin = time.monotonic()
        with LLM(directory, wiring=wiring, tp=tp, device=device, comm_backend="symmetric", prefill_chunk=64) as llm:
            found = [result.token_ids for result in llm.generate(PROMPTS, SamplingParams(TOKENS))]
        line = {"tp": tp, "wiring": wiring, "comm_backend": "symmetric", "seconds": round(time.monotonic() - begin, 2)}
        report(check="same tokens as one CPU rank", device=device, **line, ok=found == expected)


def part(name: str, tp: int, device: str) -> bool:
    """This program again, for one part: passes its lines on, and sees it end with all that it started."""
    with tempfile.TemporaryFile("w+") as errors_file:
        command = [sys.executable, __file__, name, str(tp), device]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors_file, text=True, start_new_session=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read_output, args=(process, lines), daemon=True).start()
        good = []
        try:
            while (text := lines.get(timeout=LIMIT)) is not None:
                if text.startswith("{"):
                    good.append(report(**json.loads(text)))
            status = process.wait(LIMIT)
        except (queue.Empty, subprocess.TimeoutExpired):
            return report(check="ends", part=name, tp=tp, ok=False, reason=f"no line for {LIMIT:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session it was given, with the ranks in it
            process.wait()
        errors_file.seek(0)
        if status or not good:
            reason = errors_file.read()[-2000:] or f"exit status {status}"
            return report(check="ends", part=name, tp=tp, ok=False, reason=reason)
    return all(good)


def read_output(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        lines.put(text)
    lines.put(None)


def main(device: str) -> bool:
    gpu = torch.cuda.get_device_properties(device)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    report(check="machine", gpu=gpu.name, **versions, ok=True)
    good = [part(name, tp, device) for tp in DEGREES for name in ("sums", "tokens")]
    return all(good)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(0 if main(*sys.argv[1:] or ["cuda:0"]) else 1)
    name, tp, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if name == "tokens":
        tokens(tp, device)
    else:
        run_ranks(tp, torch.device(device), sums, comm_backend="symmetric")
