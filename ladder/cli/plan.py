"""`ladder plan` and `ladder list`."""

import json
import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ladder.cli.verbs import verb
from ladder.config import ModelConfig
from ladder.config.quantization import NAMED, format_names
from ladder.errors import LadderError, check_known
from ladder.options import option
from ladder.perf.chips import CHIPS
from ladder.perf.table import LISTED, named, print_named, print_plan

if TYPE_CHECKING:
    from ladder.perf.plan import Deployment

WIRINGS = ("standard", "parallel", "parallel-1", "ladder", "none")
NOT_PROPOSED = ("none", "parallel-1")  # no model; a wiring whose price in quality is not known yet


@dataclass(frozen=True)
class PlanOptions:
    """What is to be predicted. Options that may be given several times give a row for every combination."""

    size: tuple[str, ...] = option(
        ("llama-3-70b",), "A named size (may be given several times), see `ladder list sizes`."
    )
    model: Path | None = option(None, "A directory with a config.json, in place of a named size.")
    chip: tuple[str, ...] = option(("h100",), f"{', '.join(CHIPS)}, or '141GB,4.8TB/s,989TFLOP/s'.")
    tp: tuple[str, ...] = option((), "Ranks that share a model, as in 8 or 2,4,8; default: 8.")
    link: tuple[str, ...] = option(
        ("auto",), "A link's name, alpha,beta as in 50us,10GB/s, or auto: what GPUs of the chip are usually joined by."
    )
    batch: tuple[str, ...] = option((), "Sequences at a time, as in 4 or 1,4,16; default: 1.")
    prompt: tuple[str, ...] = option(("1024",), "Tokens of a prompt.")
    new: tuple[str, ...] = option(("512",), "New tokens.")
    wiring: tuple[str, ...] = option((), f"A wiring, or an arm of `ladder bench`; default: {', '.join(WIRINGS)}.")
    engine: str = option("auto", "Which implementation: paper, ladder, or auto (the paper's on an h100, else ours).")
    weights: tuple[str, ...] = option(
        ("bf16",), f"Formats of the layers' matrices, as in fp8 or bf16,fp8,int4: {', '.join(NAMED)}."
    )
    nodes: int = option(1, "Machines that the ranks of one model are spread over; all-reduces are then hierarchical.")
    node_link: str | None = option(None, "The link between machines, for each GPU's share; default: 20us,45GB/s.")
    pp: int = option(1, "Pipeline stages, each of --tp ranks.")
    gpus: int | None = option(None, "Number of GPUs in all, used as replicas.")
    target_ms: float | None = option(
        None, "Find the best wiring, TP degree and batch with at most this time per token."
    )
    sweep: str | None = option(None, "Vary the link's latency (link) or the batch (batch).")
    details: bool = option(False, "A row for every prediction, with the time of each sub-block.")
    json: bool = option(False, "JSON: one object, or a list where there are several.")


def _numbers(name: str, texts: tuple[str, ...]) -> list[int]:
    """`--tp 2,4 --tp 8` as [2, 4, 8]."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,7}", part) for part in parts):
        raise LadderError(f"--{name} {','.join(texts)!r} must be whole numbers, with commas between: 1,4,16")
    return [int(part) for part in parts]


@verb(PlanOptions)
def plan(options: PlanOptions, named: frozenset[str]) -> None:
    """Predict a deployment: time per token under each wiring, how much faster than standard, tokens/s, best choice."""
    from ladder.perf.plan import plan

    rows = plan(_deployments(options, named)) if options.target_ms is None else _best(options, named)
    if options.json:
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    print_plan(rows, Console(), options.details)


@dataclass(frozen=True)
class ListOptions:
    """What is listed."""

    what: str | None = field(
        default=None, metadata={"argument": True, "help": f"One of {', '.join(LISTED)}; default: all of them."}
    )
    json: bool = option(False, "JSON: an object with a list for each.")

    def __post_init__(self) -> None:
        if self.what is not None:
            check_known("list", self.what, LISTED)


@verb(ListOptions, name="list")
def list_names(options: ListOptions) -> None:
    """List what has a name: sizes of models, chips, links, wirings, and formats of weights."""
    found = {what: named(what) for what in LISTED if options.what in (None, what)}
    if options.json:
        typer.echo(json.dumps(found))
        return
    for what, rows in found.items():
        print_named(what, rows, Console())


def _models(options: PlanOptions, named: frozenset[str]) -> list[tuple[str, ModelConfig | None]]:
    """Names of sizes, or of the directory with its config."""
    if options.model is None:
        return [(size, None) for size in options.size]
    if "size" in named:
        raise LadderError(f"--size and --model {options.model} name two models: give one of them")
    return [(options.model.resolve().name, ModelConfig.from_directory(options.model))]


def _deployments(options: PlanOptions, named: frozenset[str]) -> "list[Deployment]":
    """Every combination of what was asked for, with whatever is swept."""
    from ladder.perf.plan import Deployment, swept

    wirings, formats = options.wiring or WIRINGS, format_names(options.weights)
    rest = (options.engine, options.nodes, options.node_link, options.pp, options.gpus)
    tps, batches, prompts, news = (_numbers(name, getattr(options, name)) for name in ("tp", "batch", "prompt", "new"))
    found = [
        Deployment(size, chip, tp, link, batch, prompt, new, wiring, *rest, weights=weights, model=model)
        for (size, model), chip, link, prompt, new, tp, batch, weights, wiring in product(
            _models(options, named),
            options.chip,
            options.link,
            prompts,
            news,
            tps or [8],
            batches or [1],
            formats,
            wirings,
        )
    ]
    if options.sweep is not None:
        found = [one for deployment in found for one in swept(deployment, options.sweep)]
    return found


def _best(options: PlanOptions, named: frozenset[str]) -> list[dict[str, Any]]:
    """The best choices within --target-ms."""
    from ladder.perf.plan import Deployment, best

    if options.sweep is not None:
        raise LadderError("--target-ms looks for the best by itself: leave out --sweep")
    if options.target_ms is None or not options.target_ms > 0:
        raise LadderError(f"--target-ms must be more than 0, not {options.target_ms:g}")
    able = options.wiring or tuple(name for name in WIRINGS if name not in NOT_PROPOSED)
    rest = (options.engine, options.nodes, options.node_link, options.pp, options.gpus)
    tps, batches, prompts, news = (_numbers(name, getattr(options, name)) for name in ("tp", "batch", "prompt", "new"))
    rows: list[dict[str, Any]] = []
    for (size, model), chip, link, prompt, new, weights in product(
        _models(options, named), options.chip, options.link, prompts, news, format_names(options.weights)
    ):
        deployment = Deployment(
            size, chip, options.nodes, link, 1, prompt, new, able[0], *rest, weights=weights, model=model
        )
        rows += best(deployment, able, options.target_ms, tps, batches)[: 1 if options.json else 10]
    return rows
