"""How much of an all-reduce does the next sub-block hide? Two CPU ranks, an emulated link, three wirings.

python -m ladder.bench.overlap          (some 3 minutes; on a machine with nothing else to do)

The link's alpha is the measured time of the shorter sub-block, the longest that one sub-block can hide. The wirings
take turns step by step, so that drift hits all alike. Prints JSON lines: one per round with

    hidden = (T_standard - T_ladder) / (T_standard - T_none)         T: median over the round's steps, slowest rank

then rounds of one rank without a link, which show what the ladder wiring itself costs over the standard one, then the
medians over the rounds. The last all-reduce of a step has nothing to hide behind: with L layers at most 1 - 1 / 2L is
hidden.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ladder.bench.model import watch_sub_blocks
from ladder.bench.ranks import run_ranks, together
from ladder.checkpoint import Random, load
from ladder.comm.base import Comm, Solo
from ladder.comm.link import Link
from ladder.comm.timed import Timed
from ladder.config import ModelConfig
from ladder.layers.cache import KVCache
from ladder.model import Decoder

WIRINGS = ("standard", "ladder", "none")


@dataclass(frozen=True)
class OverlapSetting:
    """The layers of Llama-2-7B: their sub-blocks take 10 ms and more on a CPU core, beside which the millisecond that
    gloo's threads take from that core for an all-reduce is small.
    """

    ranks: int = 2
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    ffn: int = 11008
    batch: int = 1
    context: int = 64
    steps: int = 5  # per round and wiring; a round's figure is their median
    rounds: int = 5


def model_for(setting: OverlapSetting, comm: Comm) -> Decoder:
    """Layers take turns with the weights of the first two: no cache holds those, so they are read from memory anew."""
    s = setting
    two, all_of_them = (
        ModelConfig(s.hidden, layers, s.heads, s.heads, s.ffn, vocab=256, context=s.context) for layers in (2, s.layers)
    )
    model = load(Decoder(two, comm), Random())
    model.config = all_of_them
    model.layers = nn.ModuleList(copy(model.layers[index % 2]) for index in range(s.layers))
    return model


def decoding(model: Decoder, setting: OverlapSetting) -> KVCache:
    """A cache with every sequence about to write its last position, its memory touched by one step."""
    cache = model.new_cache(setting.batch, setting.context)
    step_seconds(model, setting, cache)
    return cache


def step_seconds(model: Decoder, setting: OverlapSetting, cache: KVCache) -> float:
    """One decode step of the whole batch, from when all ranks are ready to when the last has finished."""
    cache.lengths = [setting.context - 1] * setting.batch
    tokens = torch.zeros(setting.batch, 1, dtype=torch.long)
    if model.comm.size == 1:  # beside the ranks that are there, which do something else
        begin = time.perf_counter()
        model(tokens, cache)
        return time.perf_counter() - begin
    return together(lambda: model(tokens, cache), torch.device("cpu"))


def sub_block_ms(model: Decoder, setting: OverlapSetting, cache: KVCache) -> dict[str, float]:
    """Median milliseconds of one attention and one MLP, norm included, inside steps without communication."""
    model.rewire("none")
    times: dict[str, list[float]] = {"attention": [], "mlp": []}
    begun = 0.0

    def begin(name: str) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(name: str) -> None:
        times[name.split()[0].lower()].append((time.perf_counter() - begun) * 1e3)

    hooks = watch_sub_blocks(model, begin, end)
    for _ in range(setting.steps):
        step_seconds(model, setting, cache)
    for hook in hooks:
        hook.remove()
    return {name: statistics.median(found) for name, found in times.items()}


def turns(model: Decoder, setting: OverlapSetting, cache: KVCache, wirings: tuple[str, ...]) -> dict[str, float]:
    """Median milliseconds of each wiring's steps; the wirings take turns, step by step."""
    steps: dict[str, list[float]] = {wiring: [] for wiring in wirings}
    for _ in range(setting.steps):
        for wiring in wirings:
            model.rewire(wiring)
            steps[wiring].append(step_seconds(model, setting, cache) * 1e3)
    return {wiring: statistics.median(found) for wiring, found in steps.items()}


def write(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def overlap(comm: Comm, setting: OverlapSetting) -> Iterator[dict[str, Any]]:
    """A line for each round: the link's alpha and the steps' times. Cores speed up and slow down by a tenth within
    minutes, so every round measures the sub-blocks anew and sets the link by them.
    """
    model = model_for(setting, comm)
    cache = decoding(model, setting)
    for number in range(setting.rounds):
        model.comm = comm  # a link changes no tensor either
        blocks = sub_block_ms(model, setting, cache)
        alpha = torch.tensor([min(blocks.values())], dtype=torch.float64)
        dist.broadcast(alpha, src=0)  # all ranks must have the same link
        model.comm = Timed(comm, Link(alpha=float(alpha) * 1e-3, beta=float("inf")))
        steps = turns(model, setting, cache, WIRINGS)
        yield {
            "round": number,
            "tp": comm.size,
            "link": "emulated",
            "alpha_ms": float(alpha),
            "sub_block_ms": blocks,
            "step_ms": steps,
            "hidden": (steps["standard"] - steps["ladder"]) / (steps["standard"] - steps["none"]),
            "speedup": steps["standard"] / steps["ladder"],
        }


def alone(setting: OverlapSetting) -> Iterator[dict[str, Any]]:
    """A line for each round of one rank without a link: what the wiring itself costs."""
    model = model_for(setting, Solo())
    cache = decoding(model, setting)
    for number in range(setting.rounds):
        steps = turns(model, setting, cache, ("standard", "ladder"))
        yield {"round": number, "tp": 1, "step_ms": steps, "cost": steps["ladder"] / steps["standard"]}


def work(comm: Comm, device: torch.device, setting: OverlapSetting) -> None:
    """One rank of the measurement; the first prints."""
    lines = []
    for line in overlap(comm, setting):
        lines.append(line)
        if comm.rank == 0:
            write(line)
    if comm.rank != 0:
        return
    costs = []
    for line in alone(replace(setting, layers=4, steps=10)):
        costs.append(line)
        write(line)
    write(
        {
            "summary": "overlap",
            "setting": asdict(setting),
            "hidden": statistics.median(line["hidden"] for line in lines),
            "speedup": statistics.median(line["speedup"] for line in lines),
            "one_rank_ladder_over_standard": statistics.median(line["cost"] for line in costs),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        }
    )


if __name__ == "__main__":
    about = (__doc__ or "").split("\n\n")[0]
    argparse.ArgumentParser(prog="python -m ladder.bench.overlap", description=about).parse_args()
    run_ranks(OverlapSetting.ranks, torch.device("cpu"), work, OverlapSetting())
