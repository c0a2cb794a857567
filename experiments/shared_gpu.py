"""Several ranks that share one GPU: the same greedy tokens as one rank, for every wiring that no degree changes.

python experiments/shared_gpu.py [DEVICE] > results/shared_gpu.jsonl

Real processes over gloo, float32, ragged batches; an emulated link on the GPU is checked against the GPU's clock,
outside and inside a CUDA graph. One JSON line per check; the exit status is 1 if any failed.
"""

import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder import LLM, SamplingParams
from ladder.checkpoint import Random, load, save
from ladder.comm.link import Link
from ladder.comm.one_rank import OneRank
from ladder.comm.timed import Timed
from ladder.config import ModelConfig
from ladder.model import Decoder

WIRINGS = ("standard", "ladder", "parallel", "ladder-2", "ladder-1-2", "standard:2 ladder:2")
PROMPTS = [[1], list(range(2, 40)), [7] * 100, [5, 17, 9], list(range(300, 200, -1))]


def report(**line: Any) -> bool:
    print(json.dumps(line), flush=True)
    return bool(line["ok"])


def same_tokens(device: str) -> bool:
    directory = Path(tempfile.mkdtemp()) / "model"
    save(load(Decoder(ModelConfig.named("tiny")), Random(seed=5, deviation=0.15)), directory)
    good = True
    for wiring in WIRINGS:
        with LLM(directory, wiring=wiring, max_num_seqs=3) as llm:
            expected = [result.token_ids for result in llm.generate(PROMPTS, SamplingParams(32))]
        for tp in (1, 2, 4):
            begin = time.monotonic()
            with LLM(directory, wiring=wiring, tp=tp, device=device, max_num_seqs=3, prefill_chunk=64) as llm:
                tokens = [result.token_ids for result in llm.generate(PROMPTS, SamplingParams(32))]
            seconds = time.monotonic() - begin
            line = {"wiring": wiring, "tp": tp, "transport": "gloo" if tp > 1 else None, "seconds": round(seconds, 2)}
            good &= report(check="same tokens as one CPU rank", device=device, **line, ok=tokens == expected)
    return good


def emulated_link(device: str) -> bool:
    """An all-reduce of 1 ms: waited for at once it costs 1 ms, behind 2 ms of other work it costs nothing."""
    comm = Timed(OneRank(2), Link(1e-3, float("inf")))
    x = torch.ones(1024, device=device)
    a = torch.randn(4096, 4096, device=device)

    def milliseconds(work: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found = []
        for _ in range(20):
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return sorted(found)[10]

    def exposed() -> None:
        comm.all_reduce(x).wait().add_(0)

    def compute() -> Tensor:
        y = a
        for _ in range(count):
            y = a @ y
        return y

    def hidden() -> None:
        pending = comm.all_reduce(x)
        compute()
        pending.wait().add_(0)

    count = 1
    count = max(2, int(2.0 / milliseconds(compute)) + 1)
    times = {"exposed": milliseconds(exposed), "compute": milliseconds(compute), "hidden": milliseconds(hidden)}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        exposed()
        graph, graph_hidden = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            exposed()
        with torch.cuda.graph(graph_hidden):
            hidden()
        times["graph_exposed"], times["graph_hidden"] = milliseconds(graph.replay), milliseconds(graph_hidden.replay)
    ok = all(1.0 <= times[name] < 1.2 for name in ("exposed", "graph_exposed"))
    ok &= all(times[name] < times["compute"] + 0.2 for name in ("hidden", "graph_hidden"))
    return report(check="emulated link of 1 ms", device=device, link="emulated", repetitions=20, median_ms=times, ok=ok)


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
    name = torch.cuda.get_device_name(0)
    report(check="machine", gpu=name, torch=torch.__version__, python=platform.python_version(), ok=True)
    good = emulated_link(device)
    sys.exit(0 if same_tokens(device) and good else 1)
