"""Arms measured in turns on one loaded model: a rank's part of `ladder bench`, all of it where the rank is alone."""

import gc
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ladder.bench.machine import core_peaks, milliseconds, peaks, spread
from ladder.bench.model import configure, random_model
from ladder.bench.one_rank import all_reduce_us
from ladder.bench.ranks import slowest, together
from ladder.bench.sweep.cells import Cell, comparisons
from ladder.bench.sweep.runners import GraphRunner, PlainRunner, Runner
from ladder.comm.base import Comm
from ladder.comm.one_rank import OneRank
from ladder.comm.signalled import Signalled
from ladder.comm.timed import Timed
from ladder.config import ModelConfig
from ladder.jit import PRESENT
from ladder.kernels.launch import Kernels, Launch
from ladder.layers.cache import KVCache
from ladder.model import Decoder
from ladder.perf.arms import wiring_of
from ladder.perf.costs import ELEMENT_BYTES, RankCosts
from ladder.perf.schedule import hideable
from ladder.wiring import Wiring

PROMPT_SECONDS = 1.0  # for all of one arm's prompts, if that allows for more than FEWEST
FEWEST = 3
WARM_UP = {"cpu": 1, "cuda": 15}  # rounds; a GPU's clocks rise first
ALL_REDUCES = 20  # that are timed by themselves
ARGMAX = 2  # numbers that a rank gathers of its largest logit: the logit and its token


@dataclass(frozen=True)
class StepsDone:
    """So many more steps were measured."""

    steps: int
    what: str


@dataclass(frozen=True)
class Measured:
    """An arm's figures, for its line."""

    cell: Cell
    figures: dict[str, Any]


def measured(comm: Comm, device: torch.device, cells: Sequence[Cell]) -> Iterator[StepsDone | Measured]:
    """All of `cells`, which share one model. `comm` is this rank's; where the rank is alone, any of that size."""
    first = cells[0]
    yield StepsDone(0, "what this machine can do at best")
    dtype = getattr(torch, first.dtype)
    peak = _peak(device, dtype)
    yield StepsDone(0, f"drawing weights of {first.size}, {first.weights}, TP {first.tp}")
    model = random_model(first.case(), comm, device, dtype)
    launch = Kernels.on(device) if device.type == "cuda" and PRESENT else None
    for compared in comparisons(cells):
        yield from in_turns(model, comm, compared, peak, launch)


def in_turns(
    model: Decoder, comm: Comm, compared: Sequence[Cell], peak: dict[str, float], launch: Launch | None
) -> Iterator[StepsDone | Measured]:
    """The arms of one comparison, repetition by repetition, so that drift hits all alike. `none` is always among them:
    what the others have exposed is measured against it.
    """
    cell, device = compared[0], model.embed_tokens.weight.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    reference = cell.compared("none", str(wiring_of("none", cell.layers)))
    arms = list(dict.fromkeys((*compared, reference)))
    what = f"{cell.size}, {cell.weights}, TP {cell.tp}, batch {cell.batch}, link {cell.cell_link or 'none'}"
    yield StepsDone(0, f"{what}: first tokens")
    cache = model.new_cache(cell.batch + 1, cell.capacity)
    model.comm = comm
    if cell.mode == "ranks" and not all(getattr(_comm(arm, comm), "capturable", False) for arm in arms):
        launch = None  # for none of them: arms that are compared run the same software
    runners = {arm: runner(model, cache, arm, comm, launch) for arm in arms}
    clock = _clock(device)
    firsts = _first_tokens(runners, clock, cell.repetitions)
    steps: dict[Cell, list[float]] = {arm: [] for arm in arms}
    for number in range(-WARM_UP[device.type], cell.repetitions):
        for arm, each in runners.items():
            seconds = clock(each.step)
            if number >= 0:
                steps[arm].append(seconds * 1e3)
        if number >= 0:
            yield StepsDone(len(compared), f"{what}: decoding")
    none = statistics.median(steps[reference])
    links = {arm.link: arm for arm in compared}
    messages = {link: _messages_ms(arm, model, comm, launch) for link, arm in links.items()}
    memory = _peak_memory(device)
    for arm in compared:
        timings = Timings(firsts[arm], steps[arm], none, *messages[arm.link], memory, runners[arm].lanes)
        yield Measured(arm, figures(arm, model.config, timings, peak))
    del runners, cache
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_tokens(
    runners: dict[Cell, Runner], clock: Callable[[Callable[[], object]], float], repetitions: int
) -> dict[Cell, list[float]]:
    """Milliseconds of each arm's prompts, in turns. A first time compiles and captures, and counts for nothing; the
    second decides how many follow.
    """
    for each in runners.values():
        each.prompt()
    found = {arm: [clock(each.prompt) * 1e3] for arm, each in runners.items()}
    longest = max(times[0] for times in found.values()) / 1e3
    for _ in range(1, max(FEWEST, min(repetitions, int(PROMPT_SECONDS / longest)))):
        for arm, each in runners.items():
            found[arm].append(clock(each.prompt) * 1e3)
    return found


def runner(model: Decoder, cache: KVCache, cell: Cell, comm: Comm, launch: Launch | None) -> Runner:
    """An arm on its link: by kernels and graphs where there are `launch`, else by plain layers."""
    if cell.mode == "one-rank":
        assert launch is not None
        configure(model, cell.wiring, None if _without_communication(cell) else cell.emulated_link)
        return GraphRunner(model, cache, cell, model.comm, launch)
    own = _comm(cell, comm)
    if launch is None:
        return PlainRunner(model, cache, cell, own)
    if own is comm and comm.size > 1:
        own = Signalled([own], cache.keys[0].device, model.config.most_all_reduces + 1)
    return GraphRunner(model, cache, cell, own, launch)


def _clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Seconds of the slowest rank; of a GPU that has no others to wait for, by its events."""
    if device.type == "cuda" and not torch.distributed.is_initialized():
        return lambda work: milliseconds(work, 1, 0)[0] / 1e3
    return lambda work: together(work, device)


def _peak(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Of all ranks at the same time, since they may share a memory: the slowest one's."""
    if device.type == "cuda":
        found = peaks(device)
        gc.collect()
        torch.cuda.empty_cache()
        found["tflop_s"] = found.pop("bf16_tflop_s")
    else:
        together(lambda: None, device)
        found = core_peaks(dtype)
    return {name: 1 / slowest(1 / value, device) for name, value in found.items()}


def _messages_ms(cell: Cell, model: Decoder, comm: Comm, launch: Launch | None) -> tuple[float, float]:
    """Milliseconds of one all-reduce of a decode step on the cell's link, by itself, and of the all-gather at its end:
    of every rank's logits, or where kernels choose, of its largest one.
    """
    if cell.tp == 1:
        return 0.0, 0.0
    weight, dtype = model.embed_tokens.weight, getattr(torch, cell.dtype)
    width = model.lm_head.outputs if launch is None else ARGMAX
    if cell.mode == "one-rank":
        link = cell.emulated_link
        assert link is not None
        messages = ((model.config.hidden, dtype), (width, torch.float32))
        found = [all_reduce_us(link, cell.tp, cell.batch, n, weight.device, kind) / 1e3 for n, kind in messages]
        return found[0], found[1]
    own = comm if cell.emulated_link is None else Timed(comm, cell.emulated_link)
    x, logits = (torch.zeros(cell.batch, n, dtype=dtype, device=weight.device) for n in (model.config.hidden, width))

    def median_ms(send: Callable[[], object]) -> float:
        return statistics.median(together(send, weight.device) for _ in range(ALL_REDUCES)) * 1e3

    return median_ms(lambda: own.all_reduce(x).wait()), median_ms(lambda: own.all_gather(logits))


def _comm(cell: Cell, comm: Comm) -> Comm:
    """An arm's communicator. Without communication there is not even the embedding's all-reduce."""
    if comm.size > 1 and _without_communication(cell):
        return OneRank(comm.size)
    return comm if cell.emulated_link is None else Timed(comm, cell.emulated_link)


def _without_communication(cell: Cell) -> bool:
    return not Wiring.parse(cell.wiring, cell.layers).all_reduces()


def _peak_memory(device: torch.device) -> float:
    """Bytes: of this process, on its GPU where it has one."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


@dataclass(frozen=True)
class Timings:
    """What was measured of one arm: milliseconds, and bytes."""

    firsts: Sequence[float]
    steps: Sequence[float]
    none: float  # the median step without communication
    all_reduce: float  # one, by itself
    all_gather: float  # of the logits, at the end of a step
    memory: float
    lanes: int = 1


def figures(cell: Cell, config: ModelConfig, timings: Timings, peak: dict[str, float]) -> dict[str, Any]:
    """A line's figures. `all_reduces` are a step's, the embedding's included; `comm_ms` is theirs and the all-gather's,
    all of which `none` does without: `exposed_ms` has them too, and at least those that no wiring of this kind hides.
    """
    costs = RankCosts(config, cell.tp, ELEMENT_BYTES[cell.dtype])
    ttft, first, step = statistics.median(timings.firsts), spread(timings.firsts), spread(timings.steps)
    tpot = statistics.median(timings.steps)
    rate = cell.batch * cell.new / (ttft + (cell.new - 1) * tpot) * 1e3
    read = costs.step_bytes(cell.batch, cell.context) / tpot / 1e9
    work = costs.prompt_operations(cell.batch, cell.prompt) / ttft / 1e9
    all_reduces = (
        0 if cell.tp == 1 or _without_communication(cell) else Wiring.parse(cell.wiring, cell.layers).all_reduces() + 1
    )
    comm = all_reduces * timings.all_reduce + timings.all_gather if all_reduces else 0.0
    # what nothing computes beside is exposed, though a process that was descheduled meanwhile would not see it
    beside = hideable(Wiring.parse(cell.wiring, cell.layers)) if all_reduces else 0
    exposed = max(0.0, tpot - timings.none, comm - beside * timings.all_reduce)
    half = cell.dtype in ("bfloat16", "float16") or cell.device == "cpu"  # a GPU's peak is that of bfloat16
    return {
        "ttft_ms": round(ttft, 4),
        "ttft_ms_q1": first["ms_q1"],
        "ttft_ms_q3": first["ms_q3"],
        "tpot_ms_p50": step["ms"],
        "tpot_ms_p99": round(statistics.quantiles(timings.steps, n=100, method="inclusive")[-1], 4),
        "tpot_ms_q1": step["ms_q1"],
        "tpot_ms_q3": step["ms_q3"],
        "tokens_per_s": round(rate, 3),
        "tokens_per_s_user": round(1e3 / tpot, 3),  # while it is being answered
        "tokens_per_s_gpu": round(rate / cell.tp, 3),
        "peak_memory_gb": round(timings.memory / 1e9, 3),
        "bandwidth_tb_s": round(read, 5),
        "bandwidth_share": round(read / peak["read_tb_s"], 4),
        "prefill_tflop_s": round(work, 4),
        "prefill_share": round(work / peak["tflop_s"], 4) if half else None,
        "all_reduces": all_reduces,
        "lanes": timings.lanes,
        "comm_ms": round(comm, 4),
        "exposed_ms": round(exposed, 4),
        "hidden": round(max(0.0, 1 - exposed / comm), 4) if comm else None,
        "repetitions": len(timings.steps),
        "ttft_repetitions": len(timings.firsts),
    }
