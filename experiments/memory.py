"""What it takes to adapt a model: peak memory and tokens/s of training all weights, LoRA, and a side network.

python -m experiments.memory SIZE DATA WORK [--batch N] > results/memory_h200.jsonl

The model is a named size with random weights (memory does not depend on them), made in WORK; DATA is a folder of
`ladder data`. It learns from the text: a teacher in memory would add the same to each way. The peak is that of the
steps after the first. One JSON line per way; WORK is a new folder.
"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ladder.bench.machine import machine
from ladder.config import ModelConfig
from ladder.train.distill import adapt
from ladder.train.options import AdaptOptions, TrainingOptions
from ladder.train.scratch import hf_config

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "side": ({"method": "side"}, {}),
    "full": ({"method": "full"}, {}),
    "full, recomputed": ({"method": "full"}, {"recompute": True}),
    "lora": ({"method": "lora"}, {}),
    "lora, recomputed": ({"method": "lora"}, {"recompute": True}),
}
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    for name in ("data", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    model, device = given.work / given.size, torch.device("cuda")
    if not model.exists():
        with device:
            made = AutoModelForCausalLM.from_config(hf_config(ModelConfig.named(given.size)), dtype=torch.bfloat16)
        made.save_pretrained(model)
        del made
        AutoTokenizer.from_pretrained(given.data / "tokenizer").save_pretrained(model)
    peaks: list[int] = []

    def counted(done: int, total: int, what: str) -> None:
        if done == 1:  # all that is made once has been made
            torch.cuda.reset_peak_memory_stats()
        if done == STEPS and not peaks:  # before the model is evaluated and saved
            peaks.append(torch.cuda.max_memory_allocated())

    for name, (method, more) in WAYS.items():
        peaks.clear()
        out = given.work / f"{given.size} {name}"
        run = TrainingOptions(
            data=given.data, tokens=STEPS * given.batch * 1024, batch=given.batch, log_every=2, eval_tokens=8192,
            eval_every=10**9, save_every=10**9, **more,
        )  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
        options = AdaptOptions(str(model), out, "ladder", kl_weight=0.0, lm_weight=1.0, staleness=0.0, **method)
        adapt(options, run, counted)
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        speeds = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        row: dict[str, Any] = {"way": name, "size": given.size, "batch": given.batch, "window": 1024}
        row |= {"peak_gib": round(peaks[0] / 2**30, 2), "tokens_per_s": speeds[len(speeds) // 2]}
        print(json.dumps({**row, **machine(device)}), flush=True)


if __name__ == "__main__":
    main()
