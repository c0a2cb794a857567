"""Does the next sub-block hide a sum? Two CPU ranks, a timed link, and the four wirings that answer it.

python -m ladder.bench.overlap

The link's alpha is the measured time of the shorter sub-block, the longest that one sub-block can hide. Arms are
interleaved, so that drift hits all alike. Prints JSON lines: one per round and arm, then a summary with

    hidden = (T_standard - T_ladder) / (T_standard - T_none)         T: median over the rounds

and, with one rank and no link, what the ladder wiring itself costs over the standard one. The last sum of a step has
nothing to hide behind: with L layers at most 1 - 1 / 2L can be hidden.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ladder.bench.ranks import run_ranks
from ladder.checkpoint import Random, load
from ladder.comm.base import Comm, Solo
from ladder.comm.link import Link
from ladder.comm.timed import Timed
from ladder.config import ModelConfig
from ladder.layers.attention import Place
from ladder.model import Decoder

ARMS = ("standard", "ladder", "parallel", "none")


@dataclass(frozen=True)
class Setting:
    """A model whose sub-blocks take milliseconds on a CPU core: the machine's own noise is small beside them."""

    ranks: int = 2
    hidden: int = 1024
    layers: int = 12
    heads: int = 16
    ffn: int = 2048
    batch: int = 16
    context: int = 64
    steps: int = 5  # per round and arm; a round's figure is their median
    rounds: int = 5


def model_for(setting: Setting, comm: Comm) -> Decoder:
    s = setting
    config = ModelConfig(s.hidden, s.layers, s.heads, s.heads, s.ffn, vocab=256, context=s.context)
    return load(Decoder(config, comm), Random())


def rewire(model: Decoder, pattern: str) -> None:
    """A wiring changes no tensor: the same weights serve every arm."""
    for layer, wiring in zip(model.layers, model.config.rewired(pattern).wiring.sub_blocks(), strict=True):
        layer.wiring = wiring  # type: ignore[assignment]


def sub_block_seconds(model: Decoder, setting: Setting) -> dict[str, float]:
    """Median time of one attention and one MLP, norm included, in the middle of a decoding step."""
    cache = model.new_cache(setting.batch, setting.context)
    cache.advance([setting.context - 1] * setting.batch)
    shape = torch.Size((setting.batch, 1))
    place = Place.of(shape, cache, None, model.config, model.get_buffer("frequencies"), torch.float32)
    x = torch.randn(setting.batch, 1, setting.hidden)
    times: dict[str, list[float]] = {"attention": [], "mlp": []}
    for _ in range(5):
        for layer in model.layers:
            blocks: dict[str, Callable[[], object]] = {
                "attention": lambda layer=layer: layer.self_attn(layer.input_layernorm(x), place, cache),  # type: ignore[misc]
                "mlp": lambda layer=layer: layer.mlp(layer.post_attention_layernorm(x)),  # type: ignore[misc]
            }
            for name, block in blocks.items():
                begin = time.perf_counter()
                block()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def step_seconds(model: Decoder, setting: Setting, arm: str) -> float:
    """Median time of a decoding step under a wiring."""
    rewire(model, arm)
    tokens = torch.zeros(setting.batch, 1, dtype=torch.long)
    found = []
    for _ in range(setting.steps):
        cache = model.new_cache(setting.batch, setting.context)
        cache.advance([setting.context - 1] * setting.batch)
        if model.comm.size > 1:
            dist.barrier()  # ranks begin together
        begin = time.perf_counter()
        model(tokens, cache)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def rounds(
    model: Decoder, setting: Setting, arms: tuple[str, ...], tell: Callable[[dict[str, object]], None]
) -> dict[str, float]:
    """Every arm in every round; the medians over the rounds."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for arm in arms:
        step_seconds(model, setting, arm)  # warm-up
    for number in range(setting.rounds):
        for arm in arms:
            times[arm].append(step_seconds(model, setting, arm))
            tell({"round": number, "wiring": arm, "tp": model.comm.size, "step_ms": times[arm][-1] * 1e3})
    return {arm: statistics.median(found) for arm, found in times.items()}


def tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def work(comm: Comm, device: torch.device, setting: Setting) -> None:
    """One rank of the measurement; the first prints."""
    say = tell if comm.rank == 0 else lambda line: None
    model = model_for(setting, comm)
    blocks = sub_block_seconds(model, setting)
    shorter = torch.tensor([min(blocks.values())], dtype=torch.float64)
    dist.broadcast(shorter, src=0)  # all ranks must have the same link
    link = Link(alpha=float(shorter), beta=float("inf"))
    medians = rounds(model_for(setting, Timed(comm, link)), setting, ARMS, say)
    if comm.rank != 0:
        return
    alone = rounds(model_for(setting, Solo()), setting, ("standard", "ladder"), say)
    standard, ladder, none = (medians[arm] for arm in ("standard", "ladder", "none"))
    summary = {
        "summary": "overlap",
        "setting": asdict(setting),
        "link": "timed",
        "alpha_ms": link.alpha * 1e3,
        "sub_block_ms": {name: seconds * 1e3 for name, seconds in blocks.items()},
        "step_ms": {arm: seconds * 1e3 for arm, seconds in medians.items()},
        "hidden": (standard - ladder) / (standard - none),
        "speedup": standard / ladder,
        "one_rank_ladder_over_standard": alone["ladder"] / alone["standard"],
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    say(summary)


if __name__ == "__main__":
    run_ranks(Setting.ranks, torch.device("cpu"), work, Setting())
