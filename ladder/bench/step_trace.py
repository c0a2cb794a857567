"""One decoding step of one rank of many, seen by the profiler: a trace and a picture for each wiring.

python -m ladder.bench.step_trace OUT [LINK]

The rank is Llama-3-70B's at TP 8; the steps are replays of its CUDA graphs. The picture shows the first layers: when
each sub-block computed, when each sum travelled (a timed link), and where a sub-block could only wait for one.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ladder.bench.lanes import Span, Step, draw, first_layers, plotting
from ladder.bench.machine import machine
from ladder.bench.one_rank import CONTEXT
from ladder.bench.shard import Case, shard, wired
from ladder.comm.link import LINKS
from ladder.comm.one_rank import OneRank
from ladder.devices import device as find_device
from ladder.engine.fused import Fused
from ladder.engine.graphs import Graphs
from ladder.errors import LadderError, check_known
from ladder.kernels.ops import Kernels
from ladder.model import Decoder, Layer

SHOWN = 6  # layers in the picture


def kernels_of(trace: Path) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the step's kernels in milliseconds since the first began, in order."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found = [(e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e.get("cat") == "kernel"]
    first = min(begin for _, begin, _ in found)
    return sorted(((name, begin - first, end - first) for name, begin, end in found), key=lambda kernel: kernel[1])


def step_of(kernels: list[tuple[str, float, float]], model: Decoder, wiring: str) -> Step:
    """The lanes of a step. A sub-block computes from when all it waits for is there; its kernels start before that."""
    travelled = [(begin, end) for name, begin, end in kernels if "travel" in name][:-1]  # the last is the gathering
    wire = [Span(f"sum {n}", begin, end) for n, (begin, end) in enumerate(travelled)]
    ends = [end for name, _, end in kernels if "gemv" in name or "attend" in name]
    compute, waits, sent = [], [], 1  # the first sum is the embedding's
    ready = wire[0].end if wire else kernels[0][2]
    on_wire: list[Span] = []
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for kind, block, last in (("attention", layer.wiring[0], 2), ("MLP", layer.wiring[1], 4)):
            arrived = ready
            while len(on_wire) > block.lag:
                arrived = max(arrived, on_wire.pop(0).end)
            if arrived > ready:
                waits.append(Span(f"{kind} {number}", ready, arrived))
            end = max(ends[5 * number + last], arrived)
            compute.append(Span(f"{kind} {number}", arrived, end))
            ready = end
            if block.out == "reduce":
                on_wire.append(wire[sent])
                sent += 1
    return Step(wiring, 0, compute, wire, [Span("sum 0", 0.0, 0.0), *waits])


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        raise LadderError(f"give a folder, and a link if need be, not {len(arguments)} arguments: OUT [LINK]")
    out, link = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "nvlink_nccl"
    check_known("link", link, LINKS)
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a folder")
    plotting()
    device = find_device("cuda:0")
    torch.cuda.set_device(device)
    out.mkdir(parents=True, exist_ok=True)
    model = shard(Case("llama-3-70b", 8), OneRank(8), device)
    cache = model.new_cache(2, CONTEXT + 64)
    lines = torch.tensor([[1], [0], [CONTEXT - 1]], device=device)
    steps: list[Step] = []
    with torch.inference_mode():
        for wiring in ("standard", "ladder"):
            wired(model, wiring, LINKS[link], 1, device)
            graph = Graphs(Fused(model, cache, Kernels.on(device)), spare=1).captured(1)
            for _ in range(5):
                graph.replay(lines)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                graph.replay(lines)
                torch.cuda.synchronize()
            trace = out / f"one_rank_{wiring}.trace.json"
            profiler.export_chrome_trace(str(trace))
            steps.append(step_of(kernels_of(trace), model, wiring))
    about = {"size": "llama-3-70b", "tp": 8, "batch": 1, "mode": "one-rank", "link": link, "link_kind": "timed"}
    lanes: list[dict[str, Any]] = [{**asdict(step), **about, **machine(device)} for step in steps]
    (out / "one_rank_steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lanes), encoding="utf-8")
    chip = torch.cuda.get_device_name(device)
    what = f"First {SHOWN} of 80 layers of a decoding step: Llama-3-70B, one rank of 8, batch 1"
    title = f"{what}, {chip}; link {link}, timed"
    draw([first_layers(step, SHOWN) for step in steps], title, out / "one_rank_lanes.png")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LadderError as error:
        sys.stderr.write(f"step_trace: {error}\n")
        sys.exit(2)
