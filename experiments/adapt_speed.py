"""Speed of `ladder adapt`, and where the time of its steps goes: random weights, random tokens, one device.

python -m experiments.adapt_speed [--shape 135m 1b] [--seq-len N] [--only NAME ...]
    [--seconds S] [--limit S] >> LINES.jsonl

One JSON line per shape and setting: tokens/s and the share of the chip's peak (MFU, as log.jsonl has it) of its steady
steps, medians and quartiles over groups of steps, and the peak of the GPU's memory. Then a profile of the fastest
setting with the original in memory: one line per group of kernels with its share of the time of a step; `idle` is when
no kernel runs. No setting begins after --limit seconds; each has --seconds for its steady steps.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ladder.bench.machine import machine
from ladder.data.shards import ShardWriter
from ladder.data.texts import fingerprint
from ladder.train.distill import adapt
from ladder.train.head import Head, logits
from ladder.train.options import AdaptOptions, TrainingOptions

EVERY = 3  # steps of a line of log.jsonl
WARM = 2  # such lines that do not count: torch.compile, memory, learning rate
MOST = 8  # that do
PROFILED = 3  # steps


@dataclass(frozen=True)
class Shape:
    """A Llama, its context, and the sequences of a step that are tried."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    sizes: tuple[int, ...]

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=self.layers, hidden_size=self.hidden, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, intermediate_size=self.ffn, vocab_size=self.vocab,
            max_position_embeddings=self.seq_len, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip


SHAPES = {
    "135m": Shape(30, 576, 9, 3, 1536, 49152, 2048, (16, 32, 64)),
    "1b": Shape(16, 2048, 32, 8, 8192, 128256, 2048, (4, 8, 16)),
    "tiny": Shape(2, 64, 4, 2, 128, 512, 32, (2, 4)),
}


@dataclass(frozen=True)
class Setting:
    """How a run computes. Every step is one pass unless `passes` says more."""

    name: str
    size: int  # sequences of a pass
    passes: int = 1
    teacher: str = "online"  # or top, or none: plain fine-tuning
    compiled: bool = True
    fused: bool = True  # else logits are whole
    gpu_chunk: int = logits.GPU_CHUNK
    optimizer: str = "adamw"
    recompute: bool = False


def settings(shape: Shape) -> list[Setting]:
    """The most telling ones first."""
    *_, middle, largest = shape.sizes
    base = Setting("base", middle)
    found = [Setting(f"size-{size}", size) for size in reversed(shape.sizes)]
    found += [replace(base, name="whole", fused=False), replace(base, name="none", teacher="none")]
    found += [replace(base, name="top", teacher="top"), replace(base, name="muon", optimizer="muon")]
    found += [replace(base, name=f"chunk-{count}", gpu_chunk=count) for count in (1, 2, 8)]
    found += [replace(base, name="passes", passes=4), replace(base, name="recompute", size=largest, recompute=True)]
    return [*found, replace(base, name="eager", compiled=False)]


class Ended(Exception):
    """A run has been measured."""


def prepared(shape: Shape, work: Path) -> None:
    """A checkpoint of random weights and a folder of random tokens."""
    words = {str(number): number for number in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", unk_token="0")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16).save_pretrained(work / "model")
    whole.save_pretrained(work / "model")
    count = EVERY * (WARM + MOST) * 4 * max(shape.sizes) * shape.seq_len
    (work / "data").mkdir()
    with ShardWriter(work / "data", shape.vocab, count) as writer:
        writer.add(torch.randint(shape.vocab, (count,)).numpy())  # type: ignore[arg-type]
        writer.finish(0, fingerprint(whole), 1, count)
    whole.save_pretrained(work / "data" / "tokenizer")


def options(shape: Shape, setting: Setting, work: Path) -> tuple[AdaptOptions, TrainingOptions]:
    batch, steps = setting.size * setting.passes, EVERY * (WARM + MOST)
    training = TrainingOptions(
        data=work / "data", valid=work / "data", seq_len=shape.seq_len, batch=batch, micro_batch_size=setting.size,
        tokens=steps * batch * shape.seq_len, eval_tokens=shape.seq_len, eval_every=2 * steps, save_every=2 * steps,
        log_every=EVERY, optimizer=setting.optimizer, compile="auto" if setting.compiled else "no",
        recompute=setting.recompute,
    )  # fmt: skip
    teacher = {"online": {}, "top": {"teacher_top": 64}, "none": {"kl_weight": 0.0, "lm_weight": 1.0}}[setting.teacher]
    named: dict[str, Any] = {"staleness": 0.0, "fit_tokens": 0, **teacher}
    return AdaptOptions(str(work / "model"), work / "out" / setting.name, **named), training


def run(shape: Shape, setting: Setting, work: Path, seconds: float, profiler: Any = None) -> list[dict[str, Any]]:
    """The lines of log.jsonl of the steady steps; with a profiler, it looks at the first of these."""
    ours, training = options(shape, setting, work)
    begun: list[float] = []

    def progress(done: int, total: int, what: str) -> None:
        if what == "running the original" or done < EVERY * WARM:
            return
        if not begun:
            begun.append(time.perf_counter())
            if profiler is not None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # a kernel that runs already would count for all of the profile
                profiler.start()
        elif profiler is not None and done >= EVERY * WARM + PROFILED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.stop()
            raise Ended
        if done >= EVERY * (WARM + MOST) or (done > EVERY * (WARM + 1) and time.perf_counter() - begun[0] > seconds):
            raise Ended

    with ExitStack() as stack:
        stack.enter_context(patch.object(logits, "GPU_CHUNK", setting.gpu_chunk))
        if not setting.fused:
            stack.enter_context(patch.object(Head, "_reason", lambda head, run, tokens: "it is to be measured"))
        with suppress(Ended):
            adapt(ours, training, progress)
    lines = [json.loads(line) for line in (ours.out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "tokens_per_s" in line][WARM:]


def measured(shape: Shape, setting: Setting, work: Path, seconds: float) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        lines = run(shape, setting, work, seconds)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    found: dict[str, Any] = {"groups": len(lines), "seconds": round(time.perf_counter() - began, 1)}
    for key in ("tokens_per_s", "mfu"):
        if values := [line[key] for line in lines if key in line]:
            low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
            found |= {key: round(median, 4), f"{key}_q1": round(low, 4), f"{key}_q3": round(high, 4)}
    return found | ({"memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)} if on_gpu else {})


# --- where the time goes ----------------------------------------------------------------------------------------------

PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|aten::(add|b|badd)?b?mm|aten::linear", re.IGNORECASE)
GROUPS = {  # by what a kernel or one of the calls around it is named; the first that fits
    "loss": re.compile(r"FusedLoss|DistillationLoss"),
    "optimizer": re.compile(r"Optimizer\.step|adam|clip_grad|foreach_norm|multi_tensor", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE),
    "products": PRODUCTS,
    "copies": re.compile(r"memcpy|memset|copy_|direct_copy", re.IGNORECASE),
}


def group_of(name: str, around: Iterable[str]) -> str:
    for group, pattern in GROUPS.items():
        names = [name, *around] if group in ("loss", "optimizer", "attention") else [name]
        if any(map(pattern.search, names)):
            return "loss products" if group == "loss" and PRODUCTS.search(name) else group
    return "elementwise and norms"


def ancestors(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def pieces(events: Iterable[Any], on_gpu: bool) -> Iterator[tuple[str, list[str], float]]:
    """(kernel, the calls around its launch, microseconds); on a CPU each call's own time."""
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        around = list(ancestors(event))
        if on_gpu:
            yield from ((kernel.name, around, kernel.duration) for kernel in event.kernels)
        else:
            yield event.name, around, event.self_cpu_time_total


def busy(events: Iterable[Any]) -> tuple[float, float]:
    """Microseconds in which at least one kernel ran, and from the first kernel's begin to the last one's end."""
    on_device = (each for each in events if each.device_type != torch.autograd.DeviceType.CPU)
    spans = sorted((each.time_range.start, each.time_range.end) for each in on_device)
    found, reached = 0.0, spans[0][0]
    for begin, end in spans:
        found += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return found, reached - spans[0][0]


def profiled(shape: Shape, setting: Setting, work: Path) -> Iterator[dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profile(activities=activities)
    run(shape, replace(setting, name=f"{setting.name}-profiled"), work, 0.0, profiler)
    events, times, kernels = profiler.events(), dict[str, float](), dict[str, dict[str, float]]()
    for name, around, took in pieces(events, on_gpu):
        group = group_of(name, around)
        times[group] = times.get(group, 0.0) + took
        own = kernels.setdefault(group, {})
        own[name[:80]] = own.get(name[:80], 0.0) + took
    whole = sum(times.values())
    if on_gpu:
        worked, whole = busy(events)
        times["idle"] = whole - worked
    waits = sum("Synchronize" in each.name for each in events) / PROFILED
    for group, took in sorted(times.items(), key=lambda item: -item[1]):
        largest = sorted(kernels.get(group, {}).items(), key=lambda item: -item[1])[:4]
        yield {
            "measure": "adapt_profile", "group": group, "share": round(took / whole, 4),
            "ms_per_step": round(took / PROFILED / 1e3, 3), "waits_per_step": round(waits, 1),
            "largest": {name: round(each / whole, 4) for name, each in largest},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", default=["135m", "1b"], choices=SHAPES)
    parser.add_argument("--seq-len", type=int, help="instead of the shape's own context")
    parser.add_argument("--only", nargs="+", help="names of settings, as in size-32, whole, profile")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--limit", type=float, default=420.0)
    given = parser.parse_args()
    began, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in given.shape:
        shape, speeds = SHAPES[name], dict[Setting, float]()
        if given.seq_len:  # sequences as many times as many as they are shorter
            more = max(1, shape.seq_len // given.seq_len)
            shape = replace(shape, seq_len=given.seq_len, sizes=tuple(more * size for size in shape.sizes))
        until = began + given.limit * (given.shape.index(name) + 1) / len(given.shape)
        with tempfile.TemporaryDirectory() as folder:
            prepared(shape, Path(folder))
            stamp = {"shape": name, "seq_len": shape.seq_len, **machine(device)}
            for setting in settings(shape):
                if (given.only and setting.name not in given.only) or (speeds and time.perf_counter() > until):
                    continue
                found = measured(shape, setting, Path(folder), given.seconds)
                print(json.dumps({"measure": "adapt_speed", **vars(setting), **found, **stamp}), flush=True)
                if "tokens_per_s" in found and setting.teacher == "online" and setting.passes == 1:
                    speeds[setting] = found["tokens_per_s"]
            if speeds and (not given.only or "profile" in given.only):
                best = max(speeds, key=lambda each: speeds[each])
                for line in profiled(shape, best, Path(folder)):
                    print(json.dumps({**line, "setting": best.name, **stamp}), flush=True)


if __name__ == "__main__":
    main()
