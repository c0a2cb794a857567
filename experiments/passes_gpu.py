"""Where the time of a serving engine's passes goes: sequences that are decoded, alone and beside prompts, on one GPU.

python -m experiments.passes_gpu [SIZE [WIRING]] >> results/passes_h200.jsonl

For each number of decoded sequences and each set of prompts: the milliseconds that this process needs to launch the
pass, those that the GPU needs for it, and with PROFILE set the kernels that take most of them.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.generate_gpu import fill, sparse_checkpoint
from ladder import LLM, SamplingParams
from ladder.bench.machine import machine
from ladder.engine.model_runner import AddSequence, ModelRunner
from ladder.engine.scheduler import ScheduledBatch, SequenceSpec

DECODED = (0, 16, 64, 128)
PROMPTS: tuple[tuple[int, ...], ...] = ((128,), (576,), (1024,), (300, 800, 128), (576,) * 6)
REPEATS = 5
CONTEXT = 512
PROFILED = (64, (576,))
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)


class Timer:
    """Times the passes of a model runner: on this process's clock, and on the GPU's."""

    def __init__(self, runner: ModelRunner) -> None:
        self.found: list[tuple[ScheduledBatch, float, torch.cuda.Event, torch.cuda.Event]] = []
        compute = runner._passes.compute

        def timed(work: ScheduledBatch) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began = time.perf_counter()
            begin.record()
            result = compute(work)
            end.record()
            self.found.append((work, (time.perf_counter() - began) * 1e3, begin, end))
            return result

        runner._passes.compute = timed  # type: ignore[method-assign]

    def take(self) -> list[tuple[ScheduledBatch, float, float]]:
        torch.cuda.synchronize()
        found = [(work, host, begin.elapsed_time(end)) for work, host, begin, end in self.found]
        self.found.clear()
        return found


def measure(runner: ModelRunner, vocab: int) -> Iterator[dict[str, Any]]:
    timer, next_id = Timer(runner), 0

    def add(length: int, limit: int) -> None:
        nonlocal next_id
        tokens = tuple((next_id * 7919 + 31 * at) % vocab for at in range(length))
        runner.apply([AddSequence(SequenceSpec(next_id, tokens, limit, DRAWN))])
        next_id += 1

    for decoded in DECODED:
        for _ in range(decoded):
            add(CONTEXT, 4000)
        for _ in range(30 + decoded * CONTEXT // 4096):
            runner.step()
        if decoded:
            timer.take()
            for _ in range(20):
                runner.step()
            steps = timer.take()
            yield {"decoded": decoded, "prompts": [], **times([each[1:] for each in steps])}
        for prompts in PROMPTS:
            found = []
            for turn in range(REPEATS + 2):
                for length in prompts:
                    add(length, 2)
                timer.take()
                if turn == REPEATS and (decoded, prompts) == PROFILED:
                    profiled(runner)
                runner.step()
                found += [each[1:] for each in timer.take() if each[0].tokens][:1] if turn > 1 else []
                for _ in range(6):
                    runner.step()
            yield {"decoded": decoded, "prompts": list(prompts), **times(found)}
        for each in list(runner._scheduler.running):
            runner._scheduler.drop(each)
        runner.step()


def profiled(runner: ModelRunner) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        runner.step()
        torch.cuda.synchronize()
    averages = found.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60), file=sys.stderr)
    print(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60), file=sys.stderr)


def times(found: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "launch_ms": round(statistics.median(host for host, _ in found), 3),
        "gpu_ms": round(statistics.median(gpu for _, gpu in found), 3),
    }


def main(size: str = "llama-3-8b", wiring: str = "ladder") -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        sparse_checkpoint(size, directory)
        with LLM(directory, wiring=wiring, device="cuda:0", max_num_seqs=256, memory=40.0) as llm:
            runner: ModelRunner = llm._executor._runner  # type: ignore[attr-defined]
            fill(runner._passes._model)
            with torch.inference_mode():
                for line in measure(runner, runner._vocab):
                    line = {"measure": "pass", "size": size, "wiring": wiring, **line}
                    print(json.dumps({**line, **machine(torch.device("cuda", 0))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
