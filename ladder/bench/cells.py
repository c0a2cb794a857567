"""The cells of a sweep: size x TP x batch x link x arm, all of them checked before anything starts."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ladder.bench.options import REAL, BenchOptions, Preset
from ladder.bench.shard import Case
from ladder.comm.base import RankOnly
from ladder.comm.link import Link
from ladder.config import SIZES, ModelConfig
from ladder.engine.graphs import Graphs
from ladder.errors import LadderError, check_known
from ladder.kernels.table import MOST
from ladder.model import Decoder
from ladder.perf.arms import link_of, wiring_of
from ladder.perf.plan import check_degree, known_link

USABLE = 0.92  # of a memory: activations, libraries and graphs need the rest


@dataclass(frozen=True)
class Here:
    """What this machine has: GPUs, bytes of each, bytes of its own."""

    gpus: int
    gpu_bytes: int
    bytes: int

    @classmethod
    def now(cls) -> "Here":
        gpus = torch.cuda.device_count()
        each = torch.cuda.get_device_properties(0).total_memory if gpus else 0
        return cls(gpus, each, _free_bytes())


def _free_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        text = ""
    if match := re.search(r"MemAvailable:\s*([0-9]+) kB", text):
        return int(match[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm, and everything that it shares with the arms beside it."""

    size: str
    tp: int
    batch: int
    prompt: int
    new: int
    cell_link: str | None  # that of the arms beside it; None: one rank needs none
    arm: str
    wiring: str
    link: str | None  # that the arm's sums travel on; a real one has its library's name
    link_kind: str  # real or timed
    mode: str  # ranks or one-rank
    device: str
    dtype: str
    layers: int
    of_layers: int
    repetitions: int

    @property
    def context(self) -> int:
        """Positions of a decoding step: those of the step in the middle."""
        return self.prompt + self.new // 2

    @property
    def capacity(self) -> int:
        """Positions that the cache needs; a graph's prompt is filled up to a power of two."""
        return max(self.context, Graphs.width(self.prompt) if self.batch == 1 and self.device == "cuda" else 0) + 1

    @property
    def timing(self) -> Link | None:
        """None: it takes what it takes."""
        return None if self.link is None or self.link_kind == "real" else Link.parse(self.link)

    def case(self) -> Case:
        return Case(self.size, self.tp, self.batch, None if self.layers == self.of_layers else self.layers)

    def beside(self, arm: str, wiring: str) -> "Cell":
        """Another arm on the link of the cell."""
        return replace(self, arm=arm, wiring=wiring, link=self.cell_link)

    def load(self) -> tuple[Any, ...]:
        """What cells share that one loaded model serves."""
        return (self.size, self.tp, self.mode, self.device, self.dtype, self.layers)

    def lot(self) -> tuple[Any, ...]:
        """What cells share that are measured in turns: all but the arm."""
        return (*self.load(), self.batch, self.cell_link, self.prompt, self.new)


def lots(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that are measured in turns, together."""
    return [list(group) for _, group in groupby(cells, Cell.lot)]


def cells(options: BenchOptions, here: Here | None = None) -> list[Cell]:
    """Everything that is to be measured, in order. Refuses what cannot be, before anything has started."""
    here = here or Here.now()
    found = list(dict.fromkeys(_planned(options, options.chosen, here)))
    if not found:
        raise LadderError("nothing to measure: standard-fused is an arm of timed links, give --link nvlink_nccl")
    for _, group in groupby(found, Cell.load):
        _check_memory(max(group, key=lambda cell: cell.batch), here)
    return found


def _planned(options: BenchOptions, chosen: Preset, here: Here) -> Iterator[Cell]:
    device = chosen.device if chosen.device != "auto" else "cuda" if here.gpus else "cpu"
    if device == "cuda" and not here.gpus:
        raise LadderError("device 'cuda' is not there: torch sees no GPU; the nearest is --device cpu")
    for size in chosen.size:
        whole, config = _configs(size, options.layers)
        if chosen.prompt + chosen.new > config.context:
            raise LadderError(
                f"a prompt of {chosen.prompt} and {chosen.new} new tokens are more than {size}'s context of "
                f"{config.context}: the longest prompt is {max(0, config.context - chosen.new)}"
            )
        wirings = {arm: str(wiring_of(arm, config.layers)) for arm in chosen.arm}
        auto = config.dtype if device == "cuda" else "float32"
        dtype = auto if options.dtype == "auto" else options.dtype
        for tp in chosen.tp:
            check_degree(config, tp)
            mode = _mode(options.mode, device, tp, here)
            if device == "cuda" and max(chosen.batch) > MOST:
                raise LadderError(f"batch must be from 1 to {MOST} on a GPU, not {max(chosen.batch)}")
            links = _links(options, chosen, tp, mode, device)
            rest: dict[str, Any] = {"device": device, "mode": mode, "dtype": dtype, "repetitions": chosen.repetitions}
            rest |= {"prompt": chosen.prompt, "new": chosen.new, "layers": config.layers, "of_layers": whole.layers}
            for batch in chosen.batch:
                for link, kind in links:
                    for arm, wiring in wirings.items():
                        own = link_of(arm)
                        if own is None or kind == "timed":  # no timed link is faster than the wire below it
                            yield Cell(
                                size, tp, batch, cell_link=link, arm=arm, wiring=wiring, link=own or link,
                                link_kind=kind, **rest,
                            )  # fmt: skip


def _configs(size: str, layers: int | None) -> tuple[ModelConfig, ModelConfig]:
    """The whole model, and what is measured of it."""
    check_known("size", size, SIZES)
    whole = ModelConfig.named(size)
    if layers is not None and layers > whole.layers:
        raise LadderError(f"layers must be at most {size}'s {whole.layers}, not {layers}")
    return whole, Case(size, 1, layers=layers).config()


def _mode(wanted: str, device: str, tp: int, here: Here) -> str:
    mode = wanted
    if wanted == "auto":
        mode = "ranks" if device == "cpu" or here.gpus >= tp else "one-rank"
    if mode == "one-rank" and device != "cuda":
        raise LadderError("mode 'one-rank' needs a GPU: use --mode ranks")
    if mode == "ranks" and device == "cuda" and here.gpus < tp:
        raise LadderError(f"{tp} ranks need {tp} GPUs, this machine has {here.gpus}: use --mode one-rank")
    return mode


def _links(options: BenchOptions, chosen: Preset, tp: int, mode: str, device: str) -> list[tuple[str | None, str]]:
    """(name, real or timed) of each link. GPUs that have a wire use that one, unless a link was asked for by a flag."""
    if tp == 1:
        return [(None, "real")]
    wire = "nccl" if device == "cuda" else "gloo"
    names = [REAL] if device == "cuda" and mode == "ranks" and not options.link else list(chosen.link)
    found: list[tuple[str | None, str]] = []
    for name in (name.replace("{tp}", str(tp)) for name in names):
        if name != REAL:
            known_link(name, more=(REAL,))
        elif mode == "one-rank":
            raise LadderError("one rank alone has no wire: give --link, as in --link nvlink_nccl")
        found.append((wire, "real") if name == REAL else (name, "timed"))
    return found


def _check_memory(cell: Cell, here: Here) -> None:
    """`cell`: the largest of those that share a model."""
    room = USABLE * (here.gpu_bytes if cell.device == "cuda" else here.bytes)
    weights, cache = needs(cell)
    together = 1 if cell.device == "cuda" else cell.tp  # CPU ranks share one memory
    if together * (weights + cache) <= room:
        return
    where = "each GPU" if cell.device == "cuda" else "this machine"
    raise LadderError(
        f"{cell.size} at TP {cell.tp} needs {together * weights / 1e9:.1f} GB for weights and "
        f"{together * cache / 1e9:.1f} GB for batch {cell.batch} on {where}, which has {room / 1e9:.1f} GB to use: "
        f"{_smaller(cell, here, room)}"
    )


def needs(cell: Cell) -> tuple[int, int]:
    """Bytes of one rank's weights and of its cache."""
    model = Decoder(cell.case().config(), RankOnly(0, cell.tp), "meta", getattr(torch, cell.dtype))
    cache = model.new_cache(cell.batch + 1, cell.capacity)
    weights, tables = list(model.parameters()), (*cache.keys, *cache.values)
    return sum(w.numel() * w.element_size() for w in weights), sum(t.numel() * t.element_size() for t in tables)


def _smaller(cell: Cell, here: Here, room: float) -> str:
    """The nearest choice that fits: a smaller batch, more ranks, else fewer layers."""
    ranks = 1 if cell.device == "cuda" else cell.tp

    def most(low: float, high: float) -> int:
        """How many fit, if one takes `low` bytes and two take `high`."""
        return int((room / ranks - low) / (high - low)) + 1

    one, two = (sum(needs(replace(cell, batch=n))) for n in (1, 2))
    if one * ranks <= room:
        return f"the nearest that fits is --batch {most(one, two)}"
    if cell.device == "cuda":
        limit = here.gpus if here.gpus > 1 and cell.mode == "ranks" else 1024  # one GPU can be one rank of many
        for tp in SIZES[cell.size].degrees():
            if cell.tp < tp <= limit and sum(needs(replace(cell, tp=tp))) <= room:
                return f"the nearest that fits is --tp {tp}"
    one, two = (sum(needs(replace(cell, layers=n, of_layers=0))) for n in (1, 2))
    if one * ranks <= room:
        return f"the nearest that fits is --layers {most(one, two)}"
    return "choose a smaller size"
