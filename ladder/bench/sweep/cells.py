"""The cells of a sweep: size x TP x weights x batch x link x arm, all checked before anything starts."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import torch

from ladder.bench.model import Case
from ladder.bench.sweep.early import check_link, sized
from ladder.bench.sweep.options import REAL, BenchOptions, Preset
from ladder.comm.link import Link
from ladder.config import SIZES
from ladder.config.quantization import named_format
from ladder.errors import LadderError
from ladder.kernels.table import MOST
from ladder.perf.arms import link_of, wiring_of
from ladder.perf.costs import ELEMENT_BYTES, RankCosts
from ladder.perf.memory import USABLE, Need, check_memory, free_bytes, more_ranks
from ladder.perf.plan import check_degree


@dataclass(frozen=True)
class Hardware:
    """What this machine has: GPUs, bytes of memory of each, and of the CPU."""

    gpus: int
    gpu_bytes: int
    cpu_bytes: int

    @classmethod
    def present(cls) -> "Hardware":
        gpus = torch.cuda.device_count()
        each = torch.cuda.get_device_properties(0).total_memory if gpus else 0
        return cls(gpus, each, free_bytes())


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm, and everything that it has in common with the arms it is compared with."""

    size: str
    tp: int
    batch: int
    prompt: int
    new: int
    cell_link: str | None  # that of the arms it is compared with; None: one rank needs none
    arm: str
    wiring: str
    link: str | None  # that of the arm's all-reduces; a real one has its backend's name
    link_kind: str  # real or emulated
    mode: str  # ranks or one-rank
    device: str
    dtype: str
    layers: int
    of_layers: int
    repetitions: int
    weights: str = "bf16"  # the format of the layers' matrices

    @property
    def context(self) -> int:
        """Positions of a decode step: those of the step in the middle."""
        return self.prompt + self.new // 2

    @property
    def capacity(self) -> int:
        """Positions that the cache needs."""
        return self.context + 1

    @property
    def emulated_link(self) -> Link | None:
        """None: the backend as it is."""
        return None if self.link is None or self.link_kind == "real" else Link.parse(self.link)

    def case(self) -> Case:
        layers = None if self.layers == self.of_layers else self.layers
        return Case(self.size, self.tp, self.batch, layers, self.weights)

    def compared(self, arm: str, wiring: str) -> "Cell":
        """Another arm on the link of the cell."""
        return replace(self, arm=arm, wiring=wiring, link=self.cell_link)

    def model_key(self) -> tuple[Any, ...]:
        """What cells have in common that one loaded model serves."""
        return (self.size, self.tp, self.mode, self.device, self.dtype, self.layers, self.weights)

    def comparison_key(self) -> tuple[Any, ...]:
        """What cells have in common that are measured in turns: all but the arm."""
        return (*self.model_key(), self.batch, self.cell_link, self.prompt, self.new)


def comparisons(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that are compared: their arms are measured in turns."""
    return [list(group) for _, group in groupby(cells, Cell.comparison_key)]


def cells(options: BenchOptions, here: Hardware | None = None) -> list[Cell]:
    """Everything that is to be measured, in order. Refuses what cannot be, before anything has started."""
    here = here or Hardware.present()
    found = list(dict.fromkeys(_planned(options, options.chosen, here)))
    if not found:
        raise LadderError("nothing to measure: standard-fused needs an emulated link, give --emulate-link nvlink_nccl")
    for _, group in groupby(found, Cell.model_key):
        _check_memory(max(group, key=lambda cell: cell.batch), here)
    return found


def _planned(options: BenchOptions, chosen: Preset, here: Hardware) -> Iterator[Cell]:
    device = chosen.device if chosen.device != "auto" else "cuda" if here.gpus else "cpu"
    if device == "cuda" and not here.gpus:
        raise LadderError("device 'cuda' is not there: torch sees no GPU; the nearest is --device cpu")
    for size, whole, config in sized(options):
        wirings = {arm: str(wiring_of(arm, config.layers)) for arm in chosen.arm}
        auto = config.dtype if device == "cuda" else "float32"
        dtype = auto if options.dtype == "auto" else options.dtype
        for tp, weights in product(chosen.tp, chosen.weights):
            check_degree(replace(config, weights=named_format(weights)), tp)
            mode = _mode(options.mode, device, tp, here)
            if device == "cuda" and max(chosen.batch) > MOST:
                raise LadderError(f"batch must be from 1 to {MOST} on a GPU, not {max(chosen.batch)}")
            links = _links(options, chosen, tp, mode, device)
            rest: dict[str, Any] = {"device": device, "mode": mode, "dtype": dtype, "repetitions": chosen.repetitions}
            rest |= {"prompt": chosen.prompt, "new": chosen.new, "layers": config.layers, "of_layers": whole.layers}
            rest["weights"] = weights
            for batch in chosen.batch:
                for link, kind in links:
                    for arm, wiring in wirings.items():
                        own = link_of(arm)
                        if own is None or kind == "emulated":  # no emulated link is faster than the backend below it
                            yield Cell(
                                size, tp, batch, cell_link=link, arm=arm, wiring=wiring, link=own or link,
                                link_kind=kind, **rest,
                            )  # fmt: skip


def _mode(wanted: str, device: str, tp: int, here: Hardware) -> str:
    mode = wanted
    if wanted == "auto":
        mode = "ranks" if device == "cpu" or here.gpus >= tp else "one-rank"
    if mode == "one-rank" and device != "cuda":
        raise LadderError("mode 'one-rank' needs a GPU: use --mode ranks")
    if mode == "ranks" and device == "cuda" and here.gpus < tp:
        raise LadderError(f"{tp} ranks need {tp} GPUs, this machine has {here.gpus}: use --mode one-rank")
    return mode


def _links(options: BenchOptions, chosen: Preset, tp: int, mode: str, device: str) -> list[tuple[str | None, str]]:
    """(name, real or emulated) of each link. Several GPUs use their own, unless one to emulate was asked for."""
    if tp == 1:
        return [(None, "real")]
    backend = "nccl" if device == "cuda" else "gloo"
    names = [REAL] if device == "cuda" and mode == "ranks" and not options.emulate_link else chosen.emulate_link
    found: list[tuple[str | None, str]] = []
    for name in (name.replace("{tp}", str(tp)) for name in names):
        check_link(name)
        if name == REAL and mode == "one-rank":
            raise LadderError("one rank alone has no real link: give one, as in --emulate-link nvlink_nccl")
        found.append((backend, "real") if name == REAL else (name, "emulated"))
    return found


def _check_memory(cell: Cell, here: Hardware) -> None:
    """`cell`: the largest of those that share a model."""
    room = USABLE * (here.gpu_bytes if cell.device == "cuda" else here.cpu_bytes)

    def fits(cell: Cell) -> bool:
        return needs(cell).total <= room

    def ways() -> list[str]:
        """The nearest choice that fits: a smaller batch, more ranks, else fewer layers."""
        if fits(replace(cell, batch=1)):
            return [f"--batch {_most(cell.batch, lambda n: fits(replace(cell, batch=n)))}"]
        limit = here.gpus if here.gpus > 1 and cell.mode == "ranks" else 1024  # one GPU can be one rank of many
        limit = limit if cell.device == "cuda" else cell.tp  # ranks on a CPU share its memory
        if ranks := more_ranks(SIZES[cell.size], cell.tp, limit, lambda n: fits(replace(cell, tp=n))):
            return ranks
        if fits(replace(cell, layers=1, of_layers=0)):
            return [f"--layers {_most(cell.layers, lambda n: fits(replace(cell, layers=n, of_layers=0)))}"]
        return ["a smaller size"]

    where = "each GPU" if cell.device == "cuda" else "this machine"
    check_memory(f"{cell.size} at TP {cell.tp}, batch {cell.batch},", needs(cell), room, where, ways)


def needs(cell: Cell) -> Need:
    """Bytes on one GPU, or of all ranks on a CPU, which share one memory."""
    costs = RankCosts(cell.case().config(), cell.tp, ELEMENT_BYTES[cell.dtype])
    ranks = 1 if cell.device == "cuda" else cell.tp
    return Need(ranks * costs.weight_bytes, ranks * costs.cache_bytes(cell.batch + 1, cell.capacity))


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number below `count` that fits."""
    return bisect_left(range(1, count), True, key=lambda n: not fits(n))
