"""Arms measured in turns on one loaded model: a rank's part of `ladder bench`, all of it where the rank is alone."""

import gc
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ladder.bench.cells import Cell, lots
from ladder.bench.machine import core_peaks, milliseconds, peaks, spread
from ladder.bench.one_rank import wire_us
from ladder.bench.options import wiring_of
from ladder.bench.overlap import rewire
from ladder.bench.ranks import slowest, together
from ladder.bench.shard import prompt_operations, shard, step_bytes, wired
from ladder.comm.base import Comm
from ladder.comm.link import Link
from ladder.comm.signalled import Signalled
from ladder.comm.timed import Timed
from ladder.engine.fused import Fused
from ladder.engine.graphs import LONGEST, Graphs
from ladder.jit import PRESENT
from ladder.kernels.ops import Kernels, Ops
from ladder.layers.attention import KVCache
from ladder.model import Decoder
from ladder.wiring import Wiring

PIECE = 16_384  # tokens of prompts in one pass, as a server would cut them
PATIENCE = 1.0  # seconds for one arm's prompts, if that allows for more than FEWEST
FEWEST = 2
WARM_UP = {"cpu": 1, "cuda": 15}  # rounds; a GPU's clocks and memory come out of their sleep
WIRE_SUMS = 20


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


class Runner(Protocol):
    """One arm, ready to run."""

    def prompt(self) -> None:
        """Read all prompts and choose each one's first token."""
        ...

    def step(self) -> None:
        """One more token of each request."""
        ...


class Plain:
    """The decoder's own layers."""

    def __init__(self, model: Decoder, cache: KVCache, cell: Cell, wire: Comm) -> None:
        self._model, self._cache, self._cell, self._wire = model, cache, cell, wire
        self._ids = torch.zeros(cell.batch, cell.prompt, dtype=torch.long, device=cache.keys[0].device)
        self._choice: Tensor | None = None

    def prompt(self) -> None:
        self._enter(0)
        for slots in pieces(self._cell):
            ids = self._ids[slots[0] : slots[-1] + 1]
            last = torch.full((len(slots),), self._cell.prompt - 1, device=ids.device)
            self._choose(self._model(ids, self._cache, last, slots))

    def step(self) -> None:
        self._enter(self._cell.context - 1)
        self._choose(self._model(self._ids[:, :1], self._cache))

    def _enter(self, length: int) -> None:
        """The model is this arm's from here on."""
        rewire(self._model, self._cell.wiring)
        self._model.comm = self._wire
        self._cache.lengths = [length] * len(self._cache.lengths)

    def _choose(self, block: Tensor) -> None:
        self._choice = self._wire.all_gather(block[:, -1])[:, : self._model.config.vocab].argmax(-1)


class Captured:
    """Our kernels: decoding steps, and a single short prompt, as CUDA graphs."""

    def __init__(self, model: Decoder, cache: KVCache, cell: Cell, wire: Comm, ops: Ops) -> None:
        self._model, self._cache, self._cell, self._wire = model, cache, cell, wire
        device = cache.keys[0].device
        self._enter()
        self._fused = Fused(model, cache, ops)
        self._graphs = Graphs(self._fused, spare=cell.batch)
        self._decoding = self._graphs.captured(cell.batch)
        lines = [[1] * cell.batch, list(range(cell.batch)), [cell.context - 1] * cell.batch]
        self._lines = torch.tensor(lines, device=device)
        self._ids = torch.zeros(cell.batch, cell.prompt, dtype=torch.long, device=device)
        self._prompt = [0] * cell.prompt
        self._choice: Tensor | None = None

    def prompt(self) -> None:
        self._enter()
        if self._cell.batch == 1 and self._cell.prompt <= LONGEST:
            return self._choose(self._graphs.prompt(self._prompt, 0))
        for slots in pieces(self._cell):
            ids = self._ids[slots[0] : slots[-1] + 1]
            last = torch.full((len(slots),), self._cell.prompt - 1, device=ids.device)
            self._choose(self._fused.prompts(ids, last, slots))

    def step(self) -> None:
        self._decoding.replay(self._lines)

    def _enter(self) -> None:
        rewire(self._model, self._cell.wiring)
        self._model.comm = self._wire
        self._cache.lengths = [0] * len(self._cache.lengths)

    def _choose(self, block: Tensor) -> None:
        self._choice = self._wire.all_gather(block)[:, : self._model.config.vocab].argmax(-1)


def pieces(cell: Cell) -> Iterator[list[int]]:
    """The slots whose prompts are read in one pass, pass by pass."""
    each = max(1, PIECE // cell.prompt)
    for first in range(0, cell.batch, each):
        yield list(range(first, min(first + each, cell.batch)))


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
    runners = {arm: runner(model, cache, arm, comm, ops) for arm in arms}
    clock = _clock(device)
    warm = [clock(each.prompt) for each in runners.values()]
    count = max(FEWEST, min(cell.repetitions, int(PATIENCE / max(warm))))
    firsts: dict[Cell, list[float]] = {arm: [] for arm in arms}
    for _ in range(count):
        for arm, each in runners.items():
            firsts[arm].append(clock(each.prompt) * 1e3)
    steps: dict[Cell, list[float]] = {arm: [] for arm in arms}
    for number in range(-WARM_UP[device.type], cell.repetitions):
        for arm, each in runners.items():
            seconds = clock(each.step)
            if number >= 0:
                steps[arm].append(seconds * 1e3)
        if number >= 0:
            yield Turn(len(lot), f"{what}: decoding")
    wires = {link: _sum_ms(arm, model, comm, device) for link, arm in {arm.link: arm for arm in arms}.items()}
    memory = _peak_memory(device)
    for arm in lot:
        facts = Facts(firsts[arm], steps[arm], statistics.median(steps[reference]), wires[arm.link], memory)
        yield Measured(arm, figures(arm, model, facts, peak))
    del runners, cache
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def runner(model: Decoder, cache: KVCache, cell: Cell, comm: Comm, ops: Ops | None) -> Runner:
    """An arm on its wire: by kernels and graphs where there are `ops` and its wire allows it, else by plain layers."""
    device = cache.keys[0].device
    if cell.mode == "one-rank":
        assert ops is not None
        wired(model, cell.wiring, _timing(cell), 1, device)
        return Captured(model, cache, cell, model.comm, ops)
    wire = _wire(_timing(cell), comm)
    if ops is None or not getattr(wire, "capturable", False):
        return Plain(model, cache, cell, wire)
    if wire.size > 1:
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


def _sum_ms(cell: Cell, model: Decoder, comm: Comm, device: torch.device) -> float:
    """Milliseconds of one sum of a decoding step on the arm's link, by itself."""
    hidden, dtype = model.config.hidden, getattr(torch, cell.dtype)
    if cell.tp == 1:
        return 0.0
    if cell.mode == "one-rank":
        assert cell.timing is not None
        return wire_us(cell.timing, cell.tp, cell.batch, hidden, device, dtype) / 1e3
    wire = _wire(cell.timing, comm)
    x = torch.zeros(cell.batch, hidden, dtype=dtype, device=device)
    return statistics.median(together(lambda: wire.all_reduce(x).wait(), device) for _ in range(WIRE_SUMS)) * 1e3


def _wire(timing: Link | None, comm: Comm) -> Comm:
    return comm if timing is None else Timed(comm, timing)


def _timing(cell: Cell) -> Link | None:
    """Without communication not even the embedding's sum is timed."""
    return cell.timing if Wiring.parse(cell.wiring, cell.layers).sums() else None


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
    memory: float


def figures(cell: Cell, model: Decoder, facts: Facts, peak: dict[str, float]) -> dict[str, Any]:
    """A line's figures."""
    ttft, step = statistics.median(facts.firsts), spread(facts.steps)
    tpot = statistics.median(facts.steps)
    rate = cell.batch * cell.new / (ttft + (cell.new - 1) * tpot) * 1e3
    read = step_bytes(model, cell.batch, cell.context) / tpot / 1e9
    work = prompt_operations(model, cell.batch, cell.prompt) / ttft / 1e9
    sums = Wiring.parse(cell.wiring, cell.layers).sums() if cell.tp > 1 else 0
    wire, exposed = sums * facts.one_sum, max(0.0, tpot - facts.none)
    half = cell.dtype in ("bfloat16", "float16") or cell.device == "cpu"  # a GPU's peak is that of bfloat16
    return {
        "ttft_ms": round(ttft, 4),
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
