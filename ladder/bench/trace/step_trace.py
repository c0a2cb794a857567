"""One decode step of one rank of many, from the profiler: a trace and a picture for each wiring.

python -m ladder.bench.trace.step_trace OUT [LINK]

The rank is Llama-3-70B's at TP 8; the steps are replays of its CUDA graphs. The picture shows the first layers: when
each sub-block computed, when each all-reduce ran (the link is emulated), and where a sub-block had to wait for one.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ladder.bench.machine import machine
from ladder.bench.model import Case, FusedModel, configure, random_model
from ladder.bench.one_rank import CONTEXT
from ladder.bench.trace.lanes import Span, Step, draw, first_layers
from ladder.comm.link import LINKS
from ladder.comm.one_rank import OneRank
from ladder.devices import device as find_device
from ladder.errors import LadderError, check_known
from ladder.kernels.launch import Kernels
from ladder.model import Decoder, Layer
from ladder.plotting import load_pyplot

SHOWN = 6  # layers in the picture


def kernels_of(trace: Path) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the step's kernels in milliseconds since the first began, in order."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found = [(e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e.get("cat") == "kernel"]
    first = min(begin for _, begin, _ in found)
    return sorted(((name, begin - first, end - first) for name, begin, end in found), key=lambda kernel: kernel[1])


def step_of(kernels: list[tuple[str, float, float]], model: Decoder, wiring: str) -> Step:
    """The lanes of a step. A sub-block computes from when all it waits for has arrived; its kernels start before."""
    emulated = [(begin, end) for name, begin, end in kernels if "travel" in name][:-1]  # the last is the all-gather
    comm = [Span(f"all-reduce {n}", begin, end) for n, (begin, end) in enumerate(emulated)]
    ends = [end for name, _, end in kernels if "gemv" in name or "attend" in name]
    compute, waits, sent = [], [], 1  # the first all-reduce is the embedding's
    ready = comm[0].end if comm else kernels[0][2]
    in_flight: list[Span] = []
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for kind, block, last in (("attention", layer.wiring[0], 2), ("MLP", layer.wiring[1], 4)):
            arrived = ready
            while len(in_flight) > block.lag:
                arrived = max(arrived, in_flight.pop(0).end)
            if arrived > ready:
                waits.append(Span(f"{kind} {number}", ready, arrived))
            end = max(ends[5 * number + last], arrived)
            compute.append(Span(f"{kind} {number}", arrived, end))
            ready = end
            if block.out == "reduce":
                in_flight.append(comm[sent])
                sent += 1
    return Step(wiring, 0, compute, comm, [Span("all-reduce 0", 0.0, 0.0), *waits])


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        raise LadderError(f"give a folder, and a link if need be, not {len(arguments)} arguments: OUT [LINK]")
    out, link = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "nvlink_nccl"
    check_known("link", link, LINKS)
    if out.exists() and not out.is_dir():
        raise LadderError(f"{out} is a file: name a folder")
    load_pyplot()
    device = find_device("cuda:0")
    torch.cuda.set_device(device)
    out.mkdir(parents=True, exist_ok=True)
    model = random_model(Case("llama-3-70b", 8), OneRank(8), device)
    cache = model.new_cache(2, CONTEXT + 64)
    steps: list[Step] = []
    with torch.inference_mode():
        for wiring in ("standard", "ladder"):
            configure(model, wiring, LINKS[link])
            step = FusedModel(model, cache, Kernels.on(device)).decode_step(1, CONTEXT)
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step()
                torch.cuda.synchronize()
            trace = out / f"one_rank_{wiring}.trace.json"
            profiler.export_chrome_trace(str(trace))
            steps.append(step_of(kernels_of(trace), model, wiring))
    about = {"size": "llama-3-70b", "tp": 8, "batch": 1, "mode": "one-rank", "link": link, "link_kind": "emulated"}
    lanes: list[dict[str, Any]] = [{**asdict(step), **about, **machine(device)} for step in steps]
    (out / "one_rank_steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lanes), encoding="utf-8")
    chip = torch.cuda.get_device_name(device)
    what = f"First {SHOWN} of 80 layers of a decode step: Llama-3-70B, one rank of 8, batch 1"
    title = f"{what}, {chip}; link {link}, emulated"
    draw([first_layers(step, SHOWN) for step in steps], title, out / "one_rank_lanes.png")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LadderError as error:
        sys.stderr.write(f"step_trace: {error}\n")
        sys.exit(2)
