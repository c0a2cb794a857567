"""`ladder plan`."""

import json
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from ladder.cli.verbs import verb
from ladder.config.quantization import NAMED, format_names
from ladder.errors import LadderError
from ladder.options import option

WIRINGS = ("standard", "parallel", "parallel-1", "ladder", "none")
NOT_PROPOSED = ("none", "parallel-1")  # no model; a wiring whose price in quality is not known yet
GIVEN = {"wiring": "wiring", "tp": "TP", "batch": "batch", "link": "link", "alpha_us": "alpha us", "pp": "PP"}
GIVEN |= {"nodes": "nodes", "gpus": "GPUs", "prompt": "prompt", "new": "new", "weights": "weights"}
FIGURES = {
    "attention_us": "attn us",
    "mlp_us": "MLP us",
    "all_reduce_us": "all-reduce us",
    "lanes": "lanes",
    "comm_ms": "comm ms",
    "exposed_ms": "exposed",
    "tpot_ms": "ms/token",
    "speedup": "x standard",
    "prefill_s": "prefill s",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_user": "/user",
    "tokens_per_s_gpu": "/GPU",
}

FOOT = {
    "bytes_per_weight": "bytes per weight of the layers' matrices",
    "weights_gb": "GB of weights on each GPU",
    "cache_gb": "GB of keys and values on each GPU",
}


@dataclass(frozen=True)
class PlanOptions:
    """What is to be predicted. Options that may be given several times give a row for every combination."""

    size: tuple[str, ...] = option(("llama-3-70b",), "A named size (may be given several times).")
    chip: tuple[str, ...] = option(("h100",), "a100, h100, h200, b200, l40s, rtx-4090, or '141GB,4.8TB/s,989TFLOP/s'.")
    tp: tuple[str, ...] = option((), "Ranks that share a model, as in 8 or 2,4,8; default: 8.")
    link: tuple[str, ...] = option(("nvlink_nccl",), "A link's name, or alpha,beta as in 50us,10GB/s.")
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
    json: bool = option(False, "JSON: one object, or a list where there are several.")


def _numbers(name: str, texts: tuple[str, ...]) -> list[int]:
    """`--tp 2,4 --tp 8` as [2, 4, 8]."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,7}", part) for part in parts):
        raise LadderError(f"--{name} {','.join(texts)!r} is not numbers with commas between, as in 1,4,16")
    return [int(part) for part in parts]


@verb(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict a deployment: time per sub-block, cost of communication, tokens/s, best choice."""
    from ladder.perf.plan import Deployment, best, plan, swept

    wirings, formats = options.wiring or WIRINGS, format_names(options.weights)
    rest = (options.engine, options.nodes, options.node_link, options.pp, options.gpus)
    numbers = [_numbers(name, getattr(options, name)) for name in ("tp", "batch", "prompt", "new")]
    rows: list[dict[str, Any]] = []
    if options.target_ms is not None:
        if options.sweep is not None:
            raise LadderError("--target-ms looks for the best by itself: leave out --sweep")
        if not options.target_ms > 0:
            raise LadderError(f"--target-ms must be more than 0, not {options.target_ms:g}")
        able = options.wiring or tuple(name for name in WIRINGS if name not in NOT_PROPOSED)
        for size, chip, link, prompt, new, weights in product(
            options.size, options.chip, options.link, numbers[2], numbers[3], formats
        ):
            deployment = Deployment(size, chip, options.nodes, link, 1, prompt, new, able[0], *rest, weights=weights)
            rows += best(deployment, able, options.target_ms, numbers[0], numbers[1])[: 1 if options.json else 10]
    else:
        wanted = [
            Deployment(size, chip, tp, link, batch, prompt, new, wiring, *rest, weights=weights)
            for size, chip, link, prompt, new, tp, batch, weights, wiring in product(
                options.size,
                options.chip,
                options.link,
                numbers[2],
                numbers[3],
                numbers[0] or [8],
                numbers[1] or [1],
                formats,
                wirings,
            )
        ]
        if options.sweep is not None:
            wanted = [one for deployment in wanted for one in swept(deployment, options.sweep)]
        rows = plan(wanted)
    if options.json:
        typer.echo(json.dumps(rows[0] if len(rows) == 1 else rows))
        return
    for some in _grouped(rows):
        _print(some)
        _print_formats(some)


def _grouped(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of one model on one chip."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["size"], row["chip"], row["engine"]), []).append(row)
    return list(found.values())


def _print(rows: list[dict[str, Any]]) -> None:
    """A table; what is the same in all rows stands above it."""
    first = rows[0]
    same = [key for key in GIVEN if key != "wiring" and len({row[key] for row in rows}) == 1]
    common = ", ".join(f"{GIVEN[key]} {first[key]}" for key in same)
    typer.echo(f"{first['size']} on {first['chip']}, engine {first['engine']}, {common}")
    columns = {key: head for key, head in (GIVEN | FIGURES).items() if key not in same}
    if all(row["speedup"] is None for row in rows):
        del columns["speedup"]
    table = Table(*(Column(head, justify="right", no_wrap=True) for head in columns.values()), box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(_shown(row[key]) for key in columns))
    console = Console()
    console.width = max(console.width, 12 * len(columns))  # figures that are cut off are none
    console.print(table)
    for key, what in FOOT.items():
        values = [row[key] for row in rows]
        many = f"{_shown(min(values))} to {_shown(max(values))}" if len(set(values)) > 1 else _shown(values[0])
        typer.echo(f"{what}: {many}")
    for remark in dict.fromkeys(row["remark"] for row in rows if row["remark"]):
        typer.echo(f"remark: {remark}")
    for assumed in dict.fromkeys(row["assumed"] for row in rows if row["assumed"]):
        names = dict.fromkeys(row["weights"] for row in rows if row["assumed"] == assumed)
        typer.echo(f"remark: {', '.join(names)}: {assumed}")
    if any(row["wiring"] == "none" for row in rows):
        typer.echo("none is no model: no communication, one sub-block after the other")


def _print_formats(rows: list[dict[str, Any]]) -> None:
    """How much faster than standard each wiring is, format by format, where there are several."""
    formats = dict.fromkeys(row["weights"] for row in rows)
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    given = [key for key in GIVEN if key != "weights" and (key == "wiring" or len({row[key] for row in rows}) > 1)]
    for row in rows:
        if row["speedup"] is not None:
            found.setdefault(tuple(row[key] for key in given), {})[row["weights"]] = f"{row['speedup']:.2f}"
    if len(formats) > 1 and found:
        typer.echo("Times as fast as standard with the same weights (ms/token, predicted):")
        heads = [*(GIVEN[key] for key in given), *formats]
        table = Table(*(Column(head, justify="right", no_wrap=True) for head in heads), box=SIMPLE_HEAD)
        for key, speedups in found.items():
            table.add_row(*map(_shown, key), *(speedups.get(name, "-") for name in formats))
        Console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
