"""One decode step of one rank of many, from the profiler: a trace for each way to run it, and one picture.

python -m ladder.bench.trace.step_trace OUT [LINK]

The rank is Llama-3-70B's at TP 8; the steps are replays of its CUDA graphs: the standard wiring, and ladder on one lane
and on two. The picture shows the first layers: when each sub-block computed, when each all-reduce ran (the link is
emulated), and where a sub-block had to wait for one.
"""

import argparse
import json
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ladder.bench.machine import machine
from ladder.bench.model import Case, FusedModel, configure, random_model
from ladder.bench.one_rank import CONTEXT
from ladder.bench.trace.lanes import Span, Step, draw
from ladder.charts.library import load_library
from ladder.comm.link import LINKS
from ladder.comm.one_rank import OneRank
from ladder.devices import device as find_device
from ladder.engine.forward import Schedule
from ladder.errors import LadderError, check_known
from ladder.files import check_folder, write_text
from ladder.kernels.launch import Kernels
from ladder.model import Decoder, Layer

SHOWN = 6  # layers in the picture
SLACK = 0.002  # milliseconds by which the profiler may be wrong about what ended before what began
RUNS = {
    "standard": ("standard", Schedule()),
    "ladder, one lane": ("ladder", Schedule()),
    "ladder, two lanes": ("ladder", Schedule(2)),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step, in milliseconds since the first began."""

    name: str
    begin: float
    end: float
    stream: int | None = None  # that a replay used, which need not be that of the capture
    node: int | None = None  # of the graph; newer profilers say it
    launch: str = ""  # threads and shared memory of a block: they differ between weights of different shapes

    @property
    def is_attend(self) -> bool:
        return "attend" in self.name


@dataclass(frozen=True)
class Part:
    """A sub-block of a step."""

    kind: str
    layer: int
    needs: int  # so many of the sub-blocks' all-reduces, the oldest
    sends: int | None  # which of them is its own


def kernels_of(trace: Path) -> list[Kernel]:
    """The step's kernels in the order in which they began."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    first = min(event["ts"] for event in found)
    kernels = []
    for event in found:
        about, begin = event.get("args", {}), (event["ts"] - first) / 1e3
        launch = f"{about.get('block')} {about.get('shared memory')}"
        end = begin + event["dur"] / 1e3
        kernels.append(Kernel(event["name"], begin, end, about.get("stream"), about.get("graph node id"), launch))
    return sorted(kernels, key=lambda kernel: kernel.begin)


def parts_of(model: Decoder) -> list[Part]:
    """The sub-blocks of a pass, in its order."""
    parts, sent = [], 0
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for kind, block in zip(("attention", "MLP"), layer.wiring, strict=True):
            reduces = block.out == "reduce"
            parts.append(Part(kind, number, max(0, sent - block.lag), sent if reduces else None))
            sent += reduces
    return parts


def step_of(kernels: Sequence[Kernel], model: Decoder, name: str, lanes: int = 1) -> Step:
    """When the step's sub-blocks computed. One computes from when all it waits for has arrived; its kernels may start
    before.
    """
    emulated = [kernel for kernel in kernels if "emulate_all_reduce" in kernel.name][:-1]  # the last is the all-gather
    comm = [Span(f"all-reduce {n}", kernel.begin, kernel.end) for n, kernel in enumerate(emulated)]
    products = [kernel for kernel in kernels if "gemv" in kernel.name or kernel.is_attend]
    parts, sums = parts_of(model), comm[1:]  # the first all-reduce is the embedding's
    of_parts = _on_one_lane(products) if lanes == 1 else _on_two_lanes(products, parts, sums)
    compute, waits = [], []
    free = dict.fromkeys(("attention", "MLP"), comm[0].end if comm else kernels[0].end)  # since when its lane is
    for part, own in zip(parts, of_parts, strict=True):
        ready = free[part.kind]
        arrived = max([ready, *(span.end for span in sums[: part.needs])])
        if arrived > ready:
            waits.append(Span(f"{part.kind} {part.layer}", ready, arrived))
        begin = max(arrived, own[0].begin)
        compute.append(Span(f"{part.kind} {part.layer}", begin, max(begin, own[-1].end)))
        for kind in (part.kind,) if lanes == 2 else free:
            free[kind] = compute[-1].end
    return Step(name, 0, compute, comm, [Span("all-reduce 0", 0.0, 0.0), *waits])


def _on_one_lane(products: Sequence[Kernel]) -> Iterator[Sequence[Kernel]]:
    """The kernels of each sub-block, in the order of a pass: three of an attention, two of an MLP, and so on."""
    for at in range(0, len(products) - 4, 5):
        yield products[at : at + 3]
        yield products[at + 3 : at + 5]


def _on_two_lanes(products: Sequence[Kernel], parts: Sequence[Part], sums: Sequence[Span]) -> list[Sequence[Kernel]]:
    """The same where attention and MLP run at the same time.

    A replay may run kernels on other streams than those of the capture, and not every profiler names the graph's nodes.
    So kernels are divided by what can tell them apart, and a division counts if it is the only possible one.
    """
    layers = products[: max(n for n, kernel in enumerate(products) if not kernel.is_attend)]  # the last is the head
    for marks in _marks(layers):
        attend = {mark for mark, kernel in zip(marks, layers, strict=True) if kernel.is_attend}
        others = sorted({*marks} - attend, key=str)
        if len(others) > 8:
            continue
        possible = []
        for chosen in chain.from_iterable(combinations(others, count) for count in range(len(others) + 1)):
            is_attention = [mark in attend or mark in chosen for mark in marks]
            attention = [kernel for kernel, its in zip(layers, is_attention, strict=True) if its]
            mlp = [kernel for kernel, its in zip(layers, is_attention, strict=True) if not its]
            if (divided := _divided(attention, mlp, parts, sums)) is not None:
                possible.append(divided)
        if len(possible) == 1:
            return possible[0]
    raise LadderError("the trace does not tell which kernels are the attention's and which the MLP's")


def _marks(kernels: Sequence[Kernel]) -> Iterator[list[Hashable]]:
    """What may tell the lanes' kernels apart: their place in the graph, their stream, how they are launched."""
    nodes = sorted(kernel.node for kernel in kernels if kernel.node is not None)
    if len({*nodes}) == len(kernels):
        place = {node: number for number, node in enumerate(nodes)}
        yield [place[kernel.node] % 5 < 3 for kernel in kernels if kernel.node is not None]
    yield [kernel.stream for kernel in kernels]
    yield [(kernel.is_attend, kernel.launch) for kernel in kernels]


def _divided(
    attention: Sequence[Kernel], mlp: Sequence[Kernel], parts: Sequence[Part], sums: Sequence[Span]
) -> list[Sequence[Kernel]] | None:
    """The kernels of each sub-block, if those of the two lanes can be these: a lane's kernels end in the order in which
    they begin, and an all-reduce begins when what it adds up has been computed.
    """
    layers = len(parts) // 2
    if [kernel.is_attend for kernel in attention] != [False, True, False] * layers or len(mlp) != 2 * layers:
        return None
    for lane in (attention, mlp):
        if any(one.end >= other.end for one, other in pairwise(lane)):
            return None
    found = []
    for part in parts:
        lane, count = (attention, 3) if part.kind == "attention" else (mlp, 2)
        found.append(lane[count * part.layer : count * (part.layer + 1)])
        if part.sends is not None and sums[part.sends].begin < found[-1][-1].end - SLACK:
            return None
    return found


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        raise LadderError(f"give a folder, and a link if need be, not {len(arguments)} arguments: OUT [LINK]")
    out, link = Path(arguments[0]), arguments[1] if len(arguments) > 1 else "nvlink_oneshot"
    check_known("link", link, LINKS)
    check_folder(out)
    load_library()
    device = find_device("cuda:0")
    torch.cuda.set_device(device)
    out.mkdir(parents=True, exist_ok=True)
    model = random_model(Case("llama-3-70b", 8), OneRank(8), device)
    cache = model.new_cache(2, CONTEXT + 64)
    steps: list[Step] = []
    whole: list[float] = []  # milliseconds of the steps, with what comes after the layers
    with torch.inference_mode():
        for name, (wiring, schedule) in RUNS.items():
            configure(model, wiring, LINKS[link])
            step = FusedModel(model, cache, Kernels.on(device), schedule).decode_step(1, CONTEXT)
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step()
                torch.cuda.synchronize()
            trace = out / f"one_rank_{name.replace(', ', '_').replace(' ', '_')}.trace.json"
            profiler.export_chrome_trace(str(trace))
            kernels = kernels_of(trace)
            steps.append(step_of(kernels, model, name, schedule.lanes))
            whole.append(max(kernel.end for kernel in kernels))
    about = {"size": "llama-3-70b", "tp": 8, "batch": 1, "mode": "one-rank", "link": link, "link_kind": "emulated"}
    lines: list[dict[str, Any]] = [
        {**asdict(step), "step_ms": ms, **about, **machine(device)} for step, ms in zip(steps, whole, strict=True)
    ]
    write_text(out / "one_rank_steps.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    what = f"Llama-3-70B, one rank of 8, batch 1, {torch.cuda.get_device_name(device)}; link {link}, emulated"
    draw_first(steps, whole, what, out / "one_rank_lanes.png")


def draw_first(steps: Sequence[Step], whole: Sequence[float], what: str, path: Path) -> None:
    """The steps' first layers; above them the time of all."""
    titles = [step.title_of(ms) for step, ms in zip(steps, whole, strict=True)]
    title = f"First {SHOWN} of {len(steps[0].compute) // 2} layers of a decode step (figures: of all layers): {what}"
    draw(steps, title, path, titles, SHOWN)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ladder.bench.trace.step_trace", description=__doc__)
    parser.add_argument("given", nargs="*", metavar="OUT [LINK]", help="folder for the trace, and the emulated link")
    try:
        main(parser.parse_args().given)
    except LadderError as error:
        sys.stderr.write(f"step_trace: {error}\n")
        sys.exit(2)
