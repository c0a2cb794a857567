"""Wirings from scratch, side by side: the same data, tokens and steps, models of 50 million parameters.

python -m experiments.scratch DATA VALID WORK [ARM ...] [--tokens N] > results/scratch_h200.jsonl
python -m experiments.scratch DATA VALID WORK --profile               # what a training step spends its time on

DATA and VALID are folders of `ladder data`, of one tokenizer of 16,384 entries. One JSON line per arm: validation loss,
tokens/s, share of the measured peak of a matrix product. An arm that WORK has already is not trained again.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ladder.bench.machine import machine
from ladder.train.log import operations
from ladder.train.options import ScratchOptions, TrainingOptions
from ladder.train.recipes import recipe
from ladder.train.scratch import hf_config, train


@dataclass(frozen=True)
class ScratchRun:
    """What is trained: a recipe under a wiring, from a seed."""

    recipe: str
    wiring: str
    seed: int = 1
    ranks: int = 1


ARMS = {
    "standard": ScratchRun("50M", "standard"),
    "ladder": ScratchRun("50M", "ladder"),
    "parallel": ScratchRun("50M", "parallel"),
    "ladder-long": ScratchRun("50M-long", "ladder"),
    "standard-2": ScratchRun("50M", "standard", seed=2),
    "ladder-2nd": ScratchRun("50M", "ladder", seed=2),
    "lag-2": ScratchRun("50M", "ladder-2"),
    "lag-1-2": ScratchRun("50M", "ladder-1-2"),
    "desync-2x": ScratchRun("50M", "desync-2x", ranks=2),
    "parallel-1": ScratchRun("50M", "parallel-1"),
    "parallel-1-2nd": ScratchRun("50M", "parallel-1", seed=2),
    "desync-2x-1": ScratchRun("50M", "desync-2x-1", ranks=2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "valid", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("arm", nargs="*", default=list(ARMS))
    parser.add_argument("--tokens", type=int, default=300_000_000)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    if given.profile:
        return profiled(given)
    top = matrix_peak()
    for name in given.arm:
        arm, out = ARMS[name], given.work / name
        begin, fresh = time.time(), not (out / "config.json").exists()
        if fresh:
            torch._dynamo.reset()  # what was compiled for other arms
            wanted = ScratchOptions(out, None, arm.recipe, arm.wiring, arm.ranks)
            train(wanted, options(given, arm), lambda *_: None, NAMED)
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        speeds = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        last = [line for line in lines if "eval_loss" in line][-1]
        speed = speeds[len(speeds) // 2]
        line: dict[str, Any] = {"arm": name, "size": arm.recipe, "wiring": arm.wiring, "seed": arm.seed}
        line |= {"ranks": arm.ranks, "tokens": last["tokens"], "valid_loss": last["eval_loss"], "tokens_per_s": speed}
        line |= {"seconds": round(time.time() - begin, 1) if fresh else None, "peak_tflop_s": round(top / 1e12, 1)}
        line["share_of_peak"] = round(speed * work_of(arm) / top, 4)
        print(json.dumps({**line, **machine(torch.device("cuda"))}), flush=True)


NAMED = {"tokens", "seed", "log_every", "eval_tokens", "save_every"}  # what is not the recipe's


def options(given: argparse.Namespace, arm: ScratchRun) -> TrainingOptions:
    return TrainingOptions(
        data=given.data, valid=given.valid, tokens=given.tokens, seed=arm.seed, log_every=20, eval_tokens=1 << 20,
        save_every=10**9,
    )  # fmt: skip


def work_of(arm: ScratchRun) -> float:
    """Operations of training on a token; what emulated ranks compute twice counts once."""
    from transformers import AutoModelForCausalLM

    row = recipe(arm.recipe)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(row.config))
    return operations(model, row.training["seq_len"])


def matrix_peak() -> float:
    """Operations a second of a large product in bfloat16, the best of several."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / min(times)


def profiled(given: argparse.Namespace) -> None:
    """Kernels by their share of the time of some steps, compiled before."""
    arm = ARMS[given.arm[0] if len(given.arm) == 1 else "ladder"]
    run = TrainingOptions(data=given.data, valid=given.valid, tokens=15 << 16, log_every=15, eval_tokens=4096)
    seen: list[Any] = []

    def progress(done: int, total: int, what: str) -> None:
        if done == 8 and not seen:
            seen.append(profile(activities=[ProfilerActivity.CUDA]))
            seen[0].start()
        if done == 12 and len(seen) == 1:
            seen[0].stop()
            seen.append(seen[0].key_averages())

    wanted = ScratchOptions(given.work / f"profile-{time.time():.0f}", None, arm.recipe, arm.wiring)
    train(wanted, run, progress, NAMED)
    events = sorted(seen[1], key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    for event in events[:25]:
        share = event.self_device_time_total / total
        print(json.dumps({"kernel": event.key[:100], "share": round(share, 4), "calls": event.count}), flush=True)


if __name__ == "__main__":
    main()
