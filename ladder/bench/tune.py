"""ladder tune: which configurations of kernels suit this GPU. They are tried inside whole steps, where one kernel
starts while another ends.
"""

import json
import logging
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder.bench.early import check_tuning
from ladder.bench.machine import milliseconds
from ladder.bench.model import Case, FusedModel, configure, random_model
from ladder.bench.one_rank import CONTEXT
from ladder.comm.base import Solo
from ladder.comm.link import LINKS, Link
from ladder.comm.one_rank import OneRank
from ladder.devices import device as find_device
from ladder.engine.forward import Schedule
from ladder.errors import LadderError
from ladder.files import write_text
from ladder.jit import PRESENT
from ladder.kernels.launch import Kernels
from ladder.kernels.table import Config, Shape, Table, candidates
from ladder.layers.cache import KVCache
from ladder.model import Decoder
from ladder.progress import workers

logger = logging.getLogger(__name__)

LAYERS = 12  # enough that no cache holds their weights
LINK = "nvlink_oneshot"  # whose all-reduces set flags while kernels are tuned for two lanes
TOLERANCE = 0.02  # between the logits of two configurations, relative: bfloat16 through LAYERS layers
GAIN = 0.998  # of the best time: what a change must bring to be kept
COMPILERS = 16  # processes at most
PROCESS_BYTES = 1 << 30  # of a GPU's memory that one takes, beside its model
COMPILED_LAYERS = 3  # have every variant of a kernel: the first two begin with fewer all-reduces than all others


@dataclass(frozen=True)
class DecodeStep:
    """What a decode step's kernels depend on, besides the table."""

    case: Case
    wiring: str
    link: Link | None
    lanes: int

    def model(self, layers: int, device: torch.device) -> Decoder:
        """The rank's model with its first `layers` layers, and random weights."""
        tp = self.case.tp
        model = random_model(replace(self.case, layers=layers), OneRank(tp) if tp > 1 else Solo(), device)
        configure(model, self.wiring, self.link)
        return model

    def captured(self, model: Decoder, cache: KVCache, table: Table) -> Callable[[], Tensor]:
        """The step as a CUDA graph: a call replays it, and gives its logits."""
        kernels = Kernels.on(model.embed_tokens.weight.device)
        kernels.table = table
        return FusedModel(model, cache, kernels, Schedule(self.lanes)).decode_step(self.case.batch, CONTEXT)


class RecordingTable(Table):
    """A table that records which shapes are looked up."""

    def __init__(self, chip: str, rows: dict[Shape, Config]) -> None:
        super().__init__(chip, rows)
        self.shapes: dict[Shape, None] = {}

    def __getitem__(self, shape: Shape) -> Config:
        self.shapes[shape] = None
        return super().__getitem__(shape)


def tune(
    size: str,
    tp: int,
    batches: tuple[int, ...],
    device: torch.device,
    lanes: int = 1,
    weights: str = "bf16",
    shared_norm: bool = False,
) -> Iterator[dict[str, Any]]:
    """Lines of a table for one rank of a model: for every kernel of a step, what made the whole step fastest; on two
    lanes also where its all-reduces set flags. `shared_norm`: of parallel layers with one norm, where QKV and gate/up
    may be one product.

    Before them a line per batch with the milliseconds of LAYERS layers before and after.
    """
    wiring = ("parallel" if lanes == 1 else "parallel-1") if shared_norm else ("none" if lanes == 1 else "ladder")
    links = (None, LINKS[LINK]) if lanes > 1 and tp > 1 else (None,)
    chip, model = torch.cuda.get_device_name(device), None
    for batch, link in product(batches, links):
        step = DecodeStep(Case(size, tp, batch, weights=weights, shared_norm=shared_norm), wiring, link, lanes)
        if model is None:
            model = step.model(LAYERS, device)
        configure(model, wiring, link)
        cache = model.new_cache(batch + 1, CONTEXT + 64)
        table = RecordingTable(chip, Table.of(chip).rows)

        def timed(
            step: DecodeStep = step, model: Decoder = model, cache: KVCache = cache, table: Table = table
        ) -> tuple[float, Any]:
            """Milliseconds of a step with the table as it is, and its logits."""
            replay = step.captured(model, cache, table)
            return statistics.median(milliseconds(replay, 15, 3)), replay().clone()

        before, expected = timed()
        best = before
        tries = {shape: candidates(shape, table[replace(shape, lanes=1, flags=False)]) for shape in list(table.shapes)}
        compile_all(step, [(shape, config) for shape, configs in tries.items() for config in configs], device)
        kept: dict[Shape, Config] = {}
        for shape in sorted(tries, key=lambda shape: shape.kernel == "both"):  # when two products are tuned
            kept[shape] = table[shape]
            for config in tries[shape]:
                if config == kept[shape]:
                    continue
                table.rows[shape] = config
                try:
                    found, logits = timed()
                except Exception as error:  # too much shared memory, too many registers: not for this chip
                    if not _out_of_resources(error):
                        raise
                    continue
                wrong = (logits - expected).norm() / expected.norm()
                if found < GAIN * best and wrong < TOLERANCE:
                    best, kept[shape] = found, config
            table.rows[shape] = kept[shape]
        found_for = {"tuned": size, "tp": tp, "batch": batch, "lanes": lanes, "flags": bool(link), "layers": LAYERS}
        found_for |= {"weights": weights, "shared_norm": shared_norm}
        yield {**found_for, "ms_before": before, "ms": best, "chip": chip}
        yield from Table(chip, kept).lines()


def _out_of_resources(error: Exception) -> bool:
    return "out of resource" in str(error).lower()


def compile_all(step: DecodeStep, tries: Sequence[tuple[Shape, Config]], device: torch.device) -> None:
    """Compile every configuration into Triton's cache on the disk, in many processes; tuning goes on without."""
    free, own = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)  # of more layers than theirs
    count = min(COMPILERS, len(os.sched_getaffinity(0)), len(tries), free // (PROCESS_BYTES + own))
    if count < 2:
        return
    try:
        with workers(count) as submit:
            for share in [submit(_compile, step, tries[at::count], device) for at in range(count)]:
                share.result()
    except Exception as error:  # of any kind: a process that was killed, memory, a GPU that takes one process alone
        reason = str(error) or type(error).__name__
        logger.warning("configurations are compiled one after the other, which takes longer: %s", reason)


def _compile(step: DecodeStep, tries: Sequence[tuple[Shape, Config]], device: torch.device) -> None:
    torch.cuda.set_device(device)
    chip = torch.cuda.get_device_name(device)
    with torch.inference_mode():
        model = step.model(COMPILED_LAYERS, device)
        cache = model.new_cache(step.case.batch + 1, CONTEXT + 64)
        for shape, config in tries:
            try:
                step.captured(model, cache, Table(chip, {**Table.of(chip).rows, shape: config}))
            except Exception as error:
                if not _out_of_resources(error):
                    raise


def tuned(
    out: Path,
    size: str,
    tp: int,
    batches: tuple[int, ...],
    lanes: int = 1,
    weights: str = "bf16",
    shared_norm: bool = False,
) -> Iterator[dict[str, Any]]:
    """Tune, and write `out`: its lines, with what was found instead of its lines of the same shapes."""
    check_tuning(out, size, tp, batches, lanes, weights)
    device = find_device("cuda:0")
    if not PRESENT:
        raise LadderError("our kernels need Triton: pip install triton")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    table = {_shape(json.loads(line)): line for line in lines}
    with torch.inference_mode():
        for found in tune(size, tp, batches, device, lanes, weights, shared_norm):
            if "config" in found:
                table[_shape(found)] = json.dumps(found)
            else:
                yield found
    write_text(out, "".join(f"{line}\n" for line in table.values()))


def _shape(line: dict[str, Any]) -> str:
    shape = {"lanes": 1, "flags": False, "bits": 0, "group": 0, **line}  # which older tables do not name
    del shape["config"]
    return json.dumps(shape, sort_keys=True)
