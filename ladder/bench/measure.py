"""Arms measured in turns on one loaded model: a rank's part of `ladder bench`, all of it where the rank is alone."""

import gc
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ladder.bench.cells import Cell, lots
from ladder.bench.machine import core_peaks, milliseconds, peaks, spread
from ladder.bench.one_rank import wire_us
from ladder.bench.ranks import slowest, together
from ladder.bench.runners import Captured, Plain, Runner
from ladder.bench.shard import prompt_operations, shard, step_bytes, wired
from ladder.comm.base import Comm
from ladder.comm.one_rank import OneRank
from ladder.comm.signalled import Signalled
from ladder.comm.timed import Timed
from ladder.jit import PRESENT
from ladder.kernels.ops import Kernels, Ops
from ladder.layers.attention import KVCache
from ladder.model import Decoder
from ladder.perf.arms import wiring_of
from ladder.wiring import Wiring

PATIENCE = 1.0  # seconds for one arm's prompts, if that allows for more than FEWEST
FEWEST = 3
WARM_UP = {"cpu": 1, "cuda": 15}  # rounds; a GPU's clocks and memory come out of their sleep
WIRE_SUMS = 20
BEST = 2  # numbers that a rank gathers of its best token: its logit and which it is


@dataclass(frozen=True)
class Turn:
    """So many steps were measured."""

    steps: int
    what: str


@dataclass(frozen=True)
class Measured:
    """An arm's figures, for its line."""

    cell: Cell
    figures: dict[str, Any]


def measured(comm: Comm, device: torch.device, cells: Sequence[Cell]) -> Iterator[Turn | Measured]:
    """All of `cells`, which share one model. `comm` is this rank's; where the rank is alone, any of that size."""
    first = cells[0]
    yield Turn(0, "what this machine can do at best")
    dtype = getattr(torch, first.dtype)
    peak = _peak(device, dtype)
    yield Turn(0, f"drawing weights of {first.size}, TP {first.tp}")
    model = shard(first.case(), comm, device, dtype)
    ops = Kernels.on(device) if device.type == "cuda" and PRESENT else None
    for lot in lots(cells):
        yield from in_turns(model, comm, lot, peak, ops)


def in_turns(
    model: Decoder, comm: Comm, lot: Sequence[Cell], peak: dict[str, float], ops: Ops | None
) -> Iterator[Turn | Measured]:
    """The arms of one cell, repetition by repetition, so that drift hits all alike. `none` is always among them: what
    the others have exposed is measured against it.
    """
    cell, device = lot[0], model.embed_tokens.weight.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    reference = cell.beside("none", str(wiring_of("none", cell.layers)))
    arms = list(dict.fromkeys((*lot, reference)))
    what = f"{cell.size}, TP {cell.tp}, batch {cell.batch}, link {cell.cell_link or 'none'}"
    yield Turn(0, f"{what}: first tokens")
    cache = model.new_cache(cell.batch + 1, cell.capacity)
    model.comm = comm
    if cell.mode == "ranks" and not all(getattr(_wire(arm, comm), "capturable", False) for arm in arms):
        ops = None  # for none of them: arms that are compared run the same software
    runners = {arm: runner(model, cache, arm, comm, ops) for arm in arms}
    clock = _clock(device)
    firsts = _first_tokens(runners, clock, cell.repetitions)
    steps: dict[Cell, list[float]] = {arm: [] for arm in arms}
    for number in range(-WARM_UP[device.type], cell.repetitions):
        for arm, each in runners.items():
            seconds = clock(each.step)
            if number >= 0:
                steps[arm].append(seconds * 1e3)
        if number >= 0:
            yield Turn(len(lot), f"{what}: decoding")
    none = statistics.median(steps[reference])
    wires = {link: _messages_ms(arm, model, comm, ops) for link, arm in {arm.link: arm for arm in lot}.items()}
    memory = _peak_memory(device)
    for arm in lot:
        facts = Facts(firsts[arm], steps[arm], none, *wires[arm.link], memory)
        yield Measured(arm, figures(arm, model, facts, peak))
    del runners, cache
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_tokens(
    runners: dict[Cell, Runner], clock: Callable[[Callable[[], object]], float], repetitions: int
) -> dict[Cell, list[float]]:
    """Milliseconds of each arm's prompts, in turns. A first time compiles and captures, and counts for nothing; the
    second says how many there is patience for.
    """
    for each in runners.values():
        each.prompt()
    found = {arm: [clock(each.prompt) * 1e3] for arm, each in runners.items()}
    longest = max(times[0] for times in found.values()) / 1e3
    for _ in range(1, max(FEWEST, min(repetitions, int(PATIENCE / longest)))):
        for arm, each in runners.items():
            found[arm].append(clock(each.prompt) * 1e3)
    return found


def runner(model: Decoder, cache: KVCache, cell: Cell, comm: Comm, ops: Ops | None) -> Runner:
    """An arm on its wire: by kernels and graphs where there are `ops`, else by plain layers."""
    device = cache.keys[0].device
    if cell.mode == "one-rank":
        assert ops is not None
        wired(model, cell.wiring, None if _silent(cell) else cell.timing, 1, device)
        return Captured(model, cache, cell, model.comm, ops)
    wire = _wire(cell, comm)
    if ops is None:
        return Plain(model, cache, cell, wire)
    if wire is comm and comm.size > 1:
        wire = Signalled([wire], device, 2 * model.config.layers + 2)
    return Captured(model, cache, cell, wire, ops)


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


def _messages_ms(cell: Cell, model: Decoder, comm: Comm, ops: Ops | None) -> tuple[float, float]:
    """Milliseconds of one sum of a decoding step on the cell's link, by itself, and of the gathering at its end: every
    rank's logits, or where kernels choose, its best one.
    """
    if cell.tp == 1:
        return 0.0, 0.0
    weight, dtype = model.lm_head.weight, getattr(torch, cell.dtype)
    width = len(weight) if ops is None else BEST
    if cell.mode == "one-rank":
        assert cell.timing is not None
        messages = ((model.config.hidden, dtype), (width, torch.float32))
        one_sum, gathering = (wire_us(cell.timing, cell.tp, cell.batch, n, weight.device, kind) for n, kind in messages)
        return one_sum / 1e3, gathering / 1e3
    wire = comm if cell.timing is None else Timed(comm, cell.timing)
    x, logits = (torch.zeros(cell.batch, n, dtype=dtype, device=weight.device) for n in (model.config.hidden, width))

    def median_ms(send: Callable[[], object]) -> float:
        return statistics.median(together(send, weight.device) for _ in range(WIRE_SUMS)) * 1e3

    return median_ms(lambda: wire.all_reduce(x).wait()), median_ms(lambda: wire.all_gather(logits))


def _wire(cell: Cell, comm: Comm) -> Comm:
    """What an arm's messages travel on. Without communication not even the embedding's sum does."""
    if comm.size > 1 and _silent(cell):
        return OneRank(comm.size)
    return comm if cell.timing is None else Timed(comm, cell.timing)


def _silent(cell: Cell) -> bool:
    return not Wiring.parse(cell.wiring, cell.layers).sums()


def _peak_memory(device: torch.device) -> float:
    """Bytes: of this process, on its GPU where it has one."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


@dataclass(frozen=True)
class Facts:
    """What was measured of one arm: milliseconds, and bytes."""

    firsts: Sequence[float]
    steps: Sequence[float]
    none: float  # the median step without communication
    one_sum: float
    gathering: float  # of the logits, at the end of a step
    memory: float


def figures(cell: Cell, model: Decoder, facts: Facts, peak: dict[str, float]) -> dict[str, Any]:
    """A line's figures. `sums` are a step's, the embedding's included; `wire_ms` is theirs and the gathering's, all of
    which `none` does without: `exposed_ms` has them too.
    """
    ttft, first, step = statistics.median(facts.firsts), spread(facts.firsts), spread(facts.steps)
    tpot = statistics.median(facts.steps)
    rate = cell.batch * cell.new / (ttft + (cell.new - 1) * tpot) * 1e3
    read = step_bytes(model, cell.batch, cell.context) / tpot / 1e9
    work = prompt_operations(model, cell.batch, cell.prompt) / ttft / 1e9
    sums = 0 if cell.tp == 1 or _silent(cell) else Wiring.parse(cell.wiring, cell.layers).sums() + 1
    wire = sums * facts.one_sum + facts.gathering if sums else 0.0
    exposed = max(0.0, tpot - facts.none)
    half = cell.dtype in ("bfloat16", "float16") or cell.device == "cpu"  # a GPU's peak is that of bfloat16
    return {
        "ttft_ms": round(ttft, 4),
        "ttft_ms_q1": first["ms_q1"],
        "ttft_ms_q3": first["ms_q3"],
        "tpot_ms_p50": step["ms"],
        "tpot_ms_p99": round(statistics.quantiles(facts.steps, n=100, method="inclusive")[-1], 4),
        "tpot_ms_q1": step["ms_q1"],
        "tpot_ms_q3": step["ms_q3"],
        "tokens_per_s": round(rate, 3),
        "tokens_per_s_user": round(1e3 / tpot, 3),  # while it is being answered
        "tokens_per_s_gpu": round(rate / cell.tp, 3),
        "peak_memory_gb": round(facts.memory / 1e9, 3),
        "bandwidth_tb_s": round(read, 5),
        "bandwidth_share": round(read / peak["read_tb_s"], 4),
        "prefill_tflop_s": round(work, 4),
        "prefill_share": round(work / peak["tflop_s"], 4) if half else None,
        "sums": sums,
        "wire_ms": round(wire, 4),
        "exposed_ms": round(exposed, 4),
        "hidden": round(max(0.0, 1 - exposed / wire), 4) if wire else None,
        "repetitions": len(facts.steps),
        "ttft_repetitions": len(facts.firsts),
    }
