"""How much of the communication a wired model hides inside vLLM's captured decode steps: one rank of eight on one GPU.

python -m experiments.vllm_overlap [--size llama-3-70b] [--batch 1 --batch 16] [--link nvlink_oneshot ...] [--trace DIR]

vLLM starts with one rank. Before the model is made, its tensor-parallel group is replaced by one that says it has eight
ranks: the layers are a rank's shards, and an all-reduce takes the time of an emulated link and adds nothing (the output
is not the model's). Everything else is vLLM's: its runner, its attention, its CUDA graphs of decode steps.

Per wiring, link and batch a JSON line: milliseconds per token; and against the same wiring without a link the share of
the all-reduces' time that is hidden. With --trace a Chrome trace of some steps, and from its kernels the share of the
all-reduces' time in which others compute.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.children import measured, ready, report
from experiments.vllm_gpu import SWITCHES, continued, graphs, say, vllm, vllm_ms_per_token
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.config import ModelConfig

RANKS = 8
WIRINGS = ("standard", "ladder", "parallel-1")
LINKS = ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8")  # 8, 24 and 62 us
KERNEL = "_emulate_all_reduce"
MODULE = "experiments.vllm_overlap"
AT_ONCE = 4  # ranks that start together


class OneOfMany:
    """vLLM's tensor-parallel group, in the view of one rank of many of which only this one exists."""

    def __init__(self, group: Any, size: int, link: Link | None) -> None:
        self._group, self._rank = group, OneRank(size, link)
        self.world_size, self.rank_in_group = size, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, input_: Tensor) -> Tensor:
        return self._rank.all_reduce(input_.contiguous()).wait()

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([input_] * self.world_size, dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor:
        return self.all_gather(input_, dim)


def worker_class() -> Any:
    """vLLM's worker, whose group is replaced between the start of the ranks and the model's."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu_worker import Worker as Base

    class Emulated(Base):
        def init_device(self) -> None:
            super().init_device()
            name = self.vllm_config.additional_config["emulated_link"]
            link = None if name is None else Link.parse(name)
            parallel_state._TP = OneOfMany(parallel_state._TP, RANKS, link)
            self.vllm_config.parallel_config.tensor_parallel_size = RANKS

    return Emulated


def __getattr__(name: str) -> Any:
    """`Worker` by its name, as vLLM asks for it: vLLM is imported then."""
    if name == "Worker":
        return worker_class()
    raise AttributeError(name)


def timed(size: str, wiring: str, link: str | None, batches: list[int], trace: Path | None) -> dict[str, Any]:
    config = replace(ModelConfig.named(size), dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_hf()))
        override = {"architectures": ["LadderLlamaForCausalLM"], "wiring": wiring}
        options: dict[str, Any] = {"hf_overrides": override, "load_format": "dummy", "max_num_seqs": max(batches)}
        options |= {"additional_config": {"emulated_link": link}, "worker_cls": "experiments.vllm_overlap.Worker"}
        options |= {"compilation_config": {"cudagraph_capture_sizes": sorted(batches)}}
        options |= {"kv_cache_memory_bytes": int(2e9), "max_num_batched_tokens": 8192}
        llm = vllm(Path(folder), **options)
    ready()
    found: dict[str, Any] = {"ms": {batch: vllm_ms_per_token(llm, batch) for batch in batches}, **graphs(llm)}
    if trace is not None and link is not None:
        found["computing_meanwhile"] = {
            batch: traced(llm, batch, trace / f"{wiring}-{link}-{batch}.json") for batch in batches
        }
    return found


def traced(llm: Any, batch: int, file: Path) -> float:
    """Of the all-reduces' time in a few decode steps: the share in which other kernels run."""
    prompts = [[(7 * number + at) % 1000 + 1 for at in range(64)] for number in range(batch)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        continued(llm, prompts, 8)
        torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    events = [each for each in json.loads(file.read_text())["traceEvents"] if each.get("cat") == "kernel"]
    spans = [(KERNEL in each["name"], each["ts"], each["ts"] + each["dur"]) for each in events]
    last = sorted(start for own, start, _ in spans if own)
    begin = last[len(last) // 2]  # the second half: prompts are behind it
    return covered([span[1:] for span in spans if span[0] and span[1] >= begin], [s[1:] for s in spans if not s[0]])


def covered(own: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Which share of `own`'s time lies within some of `others`."""
    joined: list[list[float]] = []
    for start, end in sorted(others):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    inside, at = 0.0, 0
    for start, end in sorted(own):
        while at < len(joined) and joined[at][1] <= start:
            at += 1
        for low, high in joined[at:]:
            if low >= end:
                break
            inside += min(end, high) - max(start, low)
    total = sum(end - start for start, end in own)
    return round(inside / total, 4) if total else 0.0


def compare(size: str, batches: list[int], links: list[str], trace: Path | None) -> None:
    config = ModelConfig.named(size)
    base: dict[tuple[str, int], float] = {}
    cells = [(link, wiring) for link in (None, *links) for wiring in WIRINGS]
    arms = [[size, wiring, link or "none", str(trace or ""), *map(str, batches)] for link, wiring in cells]
    for (link, wiring), found in zip(cells, measured(MODULE, arms, AT_ONCE, SWITCHES), strict=True):
        for text, ms in found["ms"].items():
            batch = int(text)
            line = {"measure": "vllm_overlap", "size": size, "tp": RANKS, "wiring": wiring, "batch": batch}
            line |= {"link": "none" if link is None else "emulated", "link_name": link, "ms_per_token": round(ms, 4)}
            line["cudagraph_mode"] = found["cudagraph_mode"]
            if link is None:
                base[wiring, batch] = ms
            else:
                count = config.rewired(wiring).wiring.all_reduces() + 1  # and that of the embedding
                spent = count * Link.parse(link).seconds(batch * config.hidden * 2) * 1e3
                line["all_reduces_ms"] = round(spent, 4)
                line["hidden"] = round(1 - (ms - base[wiring, batch]) / spent, 4)
            if "computing_meanwhile" in found:
                line["computing_meanwhile"] = found["computing_meanwhile"][text]
            say(line)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        size, wiring, link, trace, *batches = sys.argv[2:]
        own = None if link == "none" else link
        report(timed(size, wiring, own, [int(each) for each in batches], Path(trace) if trace else None))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--size", default="llama-3-70b")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--link", action="append")
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    compare(given.size, given.batch or [1, 16], given.link or list(LINKS), given.trace)


if __name__ == "__main__":
    main()
