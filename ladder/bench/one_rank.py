"""One rank of many on one GPU: its real shard, kernels, graphs and streams; the link is emulated.

python -m ladder.bench.one_rank [NAME ...] > results/one_rank_h200.jsonl

NAMEs are those of `MEASUREMENTS`; without any, all of them. A JSON line for every result: milliseconds per decode step
(median and spread over the steps, after warm-up), the bytes that a step must read and the share of the measured peak at
which it did, for every wiring, link and schedule (one lane or two); the same over no communication (the wiring `none`)
and over the same wiring without a link; the bound of one lane, and an estimate of two, from the measured parts; prefill
with its share of the measured peak of a matrix product. `link` is `none` or `emulated`. With an empty TRITON_CACHE_DIR
the time of the first capture includes all compilation.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ladder.bench.machine import machine, milliseconds, peaks, spread
from ladder.bench.model import Case, FusedModel, configure, random_model
from ladder.comm.base import Comm, Solo
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import LibraryRank, OneRank
from ladder.comm.signalled import Signalled
from ladder.config import ModelConfig
from ladder.devices import device as find_device
from ladder.engine.executors.control import MULTIPROCESSORS
from ladder.engine.forward import Schedule
from ladder.errors import LadderError, check_known
from ladder.kernels.launch import Kernels
from ladder.layers.cache import KVCache
from ladder.model import Decoder
from ladder.perf.costs import RankCosts
from ladder.perf.schedule import Phase, walk, walk_two_lanes
from ladder.wiring import Wiring

ONE_LANE = Schedule()
SETTLING = 0.5  # seconds that a GPU works before its first time counts: clocks and memory come out of their sleep
CONTEXT = 1024


def decode(
    model: Decoder,
    cache: KVCache,
    kernels: Kernels,
    batch: int,
    pattern: str,
    link: Link | None,
    concurrent: int = 1,
    rank: Callable[..., Comm] = OneRank,
    schedule: Schedule = ONE_LANE,
) -> list[float]:
    """Milliseconds of the decode steps of a wiring, each a replay of its graph."""
    configure(model, pattern, link, concurrent, rank)
    return milliseconds(FusedModel(model, cache, kernels, schedule).decode_step(batch, CONTEXT))


def parts(model: Decoder, cache: KVCache, kernels: Kernels, batch: int) -> dict[str, float]:
    """Microseconds of one attention, of one MLP and of the rest under the ladder wiring without a link, from graphs
    without the other one.
    """
    configure(model, "ladder", None)

    def median(without: str | None) -> float:
        return statistics.median(
            milliseconds(FusedModel(model, cache, kernels, ONE_LANE, without).decode_step(batch, CONTEXT))
        )

    # whole = rest + layers x (attention + mlp)
    layers, whole = model.config.layers, median(None)
    attention, mlp = (whole - median("attention")) / layers, (whole - median("mlp")) / layers
    return {"attention_us": attention * 1e3, "mlp_us": mlp * 1e3, "rest_us": (whole - layers * (attention + mlp)) * 1e3}


def all_reduce_us(
    link: Link, size: int, batch: int, hidden: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Microseconds of one all-reduce among many that follow each other on the communication stream, launch included."""
    comm = Signalled([OneRank(size, link)], device, 64)
    x = torch.zeros(batch, hidden, dtype=dtype, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        comm.all_reduce(x).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.begin()
            for _ in range(64):
                comm.all_reduce(x)
            comm.end()
        found = milliseconds(graph.replay)
    return statistics.median(found) / 64 * 1e3


def bound_ms(pattern: str, part: dict[str, float], all_reduce: float, concurrent: int, layers: int) -> float:
    """What a step of this schedule takes if its parts and its all-reduces take what they took by themselves."""
    table = Wiring.parse(pattern, layers).sub_blocks()
    blocks = [pair for a, m in table for pair in ((a, part["attention_us"]), (m, part["mlp_us"]))]
    total = walk(blocks, all_reduce, first=pattern != "none", concurrent=concurrent).total
    return (total + part["rest_us"]) / 1e3


def two_lanes_ms(pattern: str, part: dict[str, float], costs: RankCosts, tb_s: float, all_reduce: float) -> float:
    """An estimate of the same on two lanes, which share the memory's bandwidth of `tb_s`: what a part reads takes at
    least so long. No bound: some steps were measured to take less.
    """

    def phases(us: float, weights: Sequence[float]) -> list[Phase]:
        """Reading of each of the weights, and what else it takes between the first and the last of them."""
        reading = [size / tb_s / 1e6 for size in weights]
        rest = Phase(max(0.0, us - sum(reading)), False)
        return [Phase(reading[0], True), rest, Phase(us - rest.seconds - reading[0], True)]

    config = costs.config
    attention, mlp = (
        phases(part[name], (share * size, (1 - share) * size))
        for name, size, share in zip(
            ("attention_us", "mlp_us"), (costs.attention_bytes, costs.mlp_bytes()), costs.inward_shares, strict=True
        )
    )
    table = config.rewired(pattern).sub_blocks()
    blocks = [pair for a, m in table for pair in ((a, attention), (m, mlp))]
    total = walk_two_lanes(blocks, all_reduce, first=True).total
    return (total + part["rest_us"]) / 1e3


_LINKS = {"zero": Link(0.0, float("inf")), **LINKS}  # zero: an all-reduce costs its launch and its memory traffic only
WIRINGS = (
    *("none", "standard", "parallel", "parallel-1", "desync-2x", "desync-2x-1"),
    *("ladder", "ladder-2", "ladder-1-2"),
)


def schedules(pattern: str, layers: int) -> tuple[Schedule, ...]:
    """Those that the engine would try."""
    blocks = [block for layer in Wiring.parse(pattern, layers).sub_blocks() for block in layer]
    return Schedule.worth_trying(blocks, pdl=True, library=False)


def table(
    case: Case, links: Sequence[str], wirings: Sequence[str], device: torch.device, peak: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Every wiring on every link by every schedule, in turns."""
    begun = time.monotonic()
    kernels = Kernels.on(device)
    model = random_model(case, OneRank(case.tp) if case.tp > 1 else Solo(), device)
    cache = model.new_cache(case.batch + 1, CONTEXT + 64)
    torch.cuda.synchronize()
    loaded = time.monotonic()
    costs = RankCosts(model.config, case.tp)
    read = costs.step_bytes(case.batch, CONTEXT)
    common: dict[str, Any] = {
        "size": case.size,
        "tp": case.tp,
        "mode": "one-rank",
        "batch": case.batch,
        "context": CONTEXT,
        "dtype": "bfloat16",
        "weights": case.weights,
    }
    common |= {"layers": model.config.layers, "of_layers": ModelConfig.named(case.size).layers}

    def line(
        pattern: str, link: str | None, found: Sequence[float], how: Schedule = ONE_LANE, **more: Any
    ) -> dict[str, Any]:
        ms = statistics.median(found)
        rate = read / ms / 1e9
        share = {"read_gb": read / 1e9, "tb_s": round(rate, 3), "share_of_peak": round(rate / peak["read_tb_s"], 3)}
        name = {"link": "emulated" if link else "none", "link_name": link}
        told = {"lanes": how.lanes, "programmatic_launch": how.pdl}
        return {"measure": "decode", **common, "wiring": pattern, **name, **told, **spread(found), **share, **more}

    configure(model, "none", None)
    begin = time.monotonic()
    FusedModel(model, cache, kernels, ONE_LANE).decode_step(case.batch, CONTEXT)
    torch.cuda.synchronize()
    capture: dict[str, Any] = {"capture_s": round(time.monotonic() - begin, 2), "load_s": round(loaded - begun, 2)}
    settled = time.monotonic() + SETTLING
    while time.monotonic() < settled:
        decode(model, cache, kernels, case.batch, "none", None)
    none = decode(model, cache, kernels, case.batch, "none", None)
    yield line("none", None, none, **capture)
    part = parts(model, cache, kernels, case.batch)
    yield {"measure": "parts", **common, **{name: round(us, 2) for name, us in part.items()}}
    no_comm = statistics.median(none)
    free: dict[tuple[str, Schedule], float] = {}
    for pattern in wirings if case.tp > 1 else ("standard", "parallel-1", "ladder"):
        for how in () if pattern == "none" else schedules(pattern, model.config.layers):
            found = decode(model, cache, kernels, case.batch, pattern, None, schedule=how)
            free[pattern, how] = statistics.median(found)
            yield line(pattern, None, found, how, over_none=round(free[pattern, how] / no_comm, 4))
    for name in links:
        taken = all_reduce_us(_LINKS[name], case.tp, case.batch, model.config.hidden, device)
        link = {"link": "emulated", "link_name": name}
        yield {"measure": "all_reduce", **common, **link, "all_reduce_us": round(taken, 2)}
        standard = None
        for pattern in wirings:
            several = (1, 2) if pattern == "ladder-1-2" else (1,)
            for concurrent, how in product(several, schedules(pattern, model.config.layers)):
                if pattern == "none":
                    continue
                found = decode(model, cache, kernels, case.batch, pattern, _LINKS[name], concurrent, schedule=how)
                ms = statistics.median(found)
                standard = ms if pattern == "standard" else standard
                more: dict[str, Any] = {"concurrent_all_reduces": concurrent, "over_none": round(ms / no_comm, 4)}
                more["over_same_wiring_without_link"] = round(ms / free[pattern, how], 4)
                if case.layers is not None:  # all layers, the rest of the step once
                    scale = common["of_layers"] / common["layers"]
                    more["ms_scaled_to_all_layers"] = round(scale * ms - (scale - 1) * part["rest_us"] / 1e3, 3)
                if how.lanes == 1:
                    bound = bound_ms(pattern, part, taken, concurrent, model.config.layers)
                    more |= {"bound_ms": round(bound, 4), "over_bound": round(ms / bound, 4)}
                else:
                    estimate = two_lanes_ms(pattern, part, costs, peak["read_tb_s"], taken)
                    more |= {"estimate_ms": round(estimate, 4), "over_estimate": round(ms / estimate, 4)}
                if standard is not None:
                    more["speedup_over_standard"] = round(standard / ms, 3)
                yield line(pattern, name, found, how, **more)
    del model, cache
    gc.collect()
    torch.cuda.empty_cache()


def prefill(
    case: Case, tokens: int, link: str, device: torch.device, peak: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """A prompt of `tokens`: operations per second without communication, and how much of the link's time is hidden."""
    kernels = Kernels.on(device)
    model = random_model(case, OneRank(case.tp), device)
    cache = model.new_cache(2, tokens)
    ids = torch.randint(model.config.vocab, (tokens,)).tolist()
    operations = RankCosts(model.config, case.tp).prompt_operations(1, tokens)
    arms = [("none", None), ("ladder", None), ("standard", "zero"), ("ladder", "zero")]
    arms += [("standard", link), ("ladder", link)]
    found: dict[tuple[str, str | None], list[float]] = {}
    for _ in range(2):  # the second time round everything is warm
        for arm in arms:
            configure(model, arm[0], _LINKS[arm[1]] if arm[1] else None)
            found[arm] = milliseconds(partial(FusedModel(model, cache, kernels).prompt, ids), 20, 3)
    ms = {arm: statistics.median(times) for arm, times in found.items()}
    common = {"measure": "prefill", "size": case.size, "tp": case.tp, "mode": "one-rank", "tokens": tokens, "batch": 1}
    for pattern, name in arms:
        rate = operations / ms[pattern, name] / 1e9
        more = {"tflop_s": round(rate, 1), "share_of_peak": round(rate / peak["bf16_tflop_s"], 3)}
        if (pattern, name) == ("ladder", link):
            # of what standard waits for: over no communication, and over all-reduces that take no time on the link
            for key, without in (("hidden", ("none", None)), ("hidden_of_link_time", ("standard", "zero"))):
                exposed = ms["ladder", link] - ms["ladder" if without[1] else "none", without[1]]
                more[key] = round(1 - exposed / (ms["standard", link] - ms[without]), 3)
        keys = {"link": "emulated" if name else "none", "link_name": name}
        yield {**common, "wiring": pattern, **keys, **spread(found[pattern, name]), **more}


def library(case: Case, link: str, device: torch.device, peak: dict[str, float]) -> Iterator[dict[str, Any]]:
    """All-reduces of a library, which set no flags: readers that wait for events, beside readers that poll flags which
    a small kernel behind each all-reduce sets.
    """
    model, kernels = random_model(case, OneRank(case.tp), device), Kernels.on(device)
    cache = model.new_cache(case.batch + 1, CONTEXT + 64)
    rank = partial(LibraryRank, multiprocessors=MULTIPROCESSORS)
    for pattern in ("standard", "ladder", "ladder-2"):
        for polls, each in product((False, True), schedules(pattern, model.config.layers)):
            how = replace(each, polls=polls)
            found = decode(model, cache, kernels, case.batch, pattern, _LINKS[link], rank=rank, schedule=how)
            told = {"size": case.size, "tp": case.tp, "mode": "one-rank", "batch": case.batch, "context": CONTEXT}
            told |= {"wiring": pattern, "link": "emulated", "link_name": link, "flags": polls}
            rate = RankCosts(model.config, case.tp).step_bytes(case.batch, CONTEXT) / statistics.median(found) / 1e9
            told |= {"lanes": how.lanes, "programmatic_launch": how.pdl}
            share = {"share_of_peak": round(rate / peak["read_tb_s"], 3)}
            yield {"measure": "library", **told, **spread(found), **share}


FEW_LINKS, FEW_WIRINGS = ("nvlink_nccl", "pcie_shm_tp8"), ("none", "standard", "parallel", "ladder")
LANE_LINKS = ("nvlink_oneshot", "nvlink_nccl_graph", "nvlink_nccl", "pcie_shm_tp8")
LANE_WIRINGS = ("none", "standard", "parallel-1", "ladder", "ladder-2")
WEIGHT_LINKS = ("nvlink_oneshot", "nvlink_nccl", "pcie_shm_tp8")
LINKS_70B = ("zero", "nvlink_oneshot", "nvlink_nccl_graph", "nvlink_nccl", "pcie_shm_tp8")


Measurement = Callable[[torch.device, dict[str, float]], Iterator[dict[str, Any]]]
MEASUREMENTS: dict[str, Measurement] = {
    "70b": lambda *on: table(Case("llama-3-70b", 8), LINKS_70B, WIRINGS, *on),
    "70b-16": lambda *on: table(Case("llama-3-70b", 8, 16), LINKS_70B, WIRINGS, *on),
    "70b-4": lambda *on: table(Case("llama-3-70b", 8, 4), FEW_LINKS, FEW_WIRINGS, *on),
    "70b-64": lambda *on: table(Case("llama-3-70b", 8, 64), FEW_LINKS, FEW_WIRINGS, *on),
    "8b": lambda *on: table(Case("llama-3-8b", 1), (), WIRINGS, *on),
    "8b-16": lambda *on: table(Case("llama-3-8b", 1, 16), (), WIRINGS, *on),
    "mixtral": lambda *on: table(Case("mixtral-8x7b", 1), (), WIRINGS, *on),
    "mixtral-16": lambda *on: table(Case("mixtral-8x7b", 1, 16), (), WIRINGS, *on),
    "qwen3-moe": lambda *on: table(Case("qwen3-30b-a3b", 1), (), WIRINGS, *on),
    "qwen3-moe-16": lambda *on: table(Case("qwen3-30b-a3b", 1, 16), (), WIRINGS, *on),
    "qwen3-moe-tp4": lambda *on: table(Case("qwen3-30b-a3b", 4), FEW_LINKS, FEW_WIRINGS, *on),
    "405b": lambda *on: table(Case("llama-3.1-405b", 16, layers=63), ("ib_2node_nccl",), WIRINGS, *on),
    "lanes": lambda *on: table(Case("llama-3-70b", 8), LANE_LINKS, LANE_WIRINGS, *on),
    "lanes-16": lambda *on: table(Case("llama-3-70b", 8, 16), LANE_LINKS, LANE_WIRINGS, *on),
    "lanes-64": lambda *on: table(Case("llama-3-70b", 8, 64), FEW_LINKS, LANE_WIRINGS, *on),
    "library": lambda *on: library(Case("llama-3-70b", 8), "nvlink_nccl", *on),
    "prefill": lambda *on: prefill(Case("llama-3-70b", 8), 1024, "nvlink_nccl", *on),
}


def _of_weights(weights: str) -> dict[str, Measurement]:
    """Of one rank of 70B and of 8B on one GPU, with the layers' matrices in this format."""
    large = {name: Case("llama-3-70b", 8, batch, weights=weights) for name, batch in (("70b", 1), ("70b-16", 16))}
    found: dict[str, Measurement] = {
        f"{name}-{weights}": partial(table, case, WEIGHT_LINKS, LANE_WIRINGS) for name, case in large.items()
    }
    return found | {f"8b-{weights}": partial(table, Case("llama-3-8b", 1, weights=weights), (), WIRINGS)}


MEASUREMENTS |= {name: each for weights in ("fp8", "int4") for name, each in _of_weights(weights).items()}


def main(only: Sequence[str]) -> None:
    for name in only:
        check_known("measurement", name, MEASUREMENTS)
    device = find_device("cuda:0")
    torch.cuda.set_device(device)
    peak = peaks(device)

    stamp = machine(device)

    def write(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({**line, **stamp}) + "\n")
        sys.stdout.flush()

    write({"measure": "peak", **{name: round(value, 3) for name, value in peak.items()}})
    with torch.inference_mode():
        for name, measurement in MEASUREMENTS.items():
            if not only or name in only:
                for line in measurement(device, peak):
                    write(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ladder.bench.one_rank", description=__doc__)
    parser.add_argument("measurement", nargs="*", help=f"which; default: all of {', '.join(MEASUREMENTS)}")
    try:
        main(parser.parse_args().measurement)
    except LadderError as error:
        sys.stderr.write(f"one_rank: {error}\n")
        sys.exit(2)
