"""`ladder trace`, `tune`, `bench` and `report`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ladder.bench.early import check_tuning
from ladder.bench.sweep.early import check_sweep
from ladder.bench.sweep.options import BenchOptions
from ladder.cli.verbs import steps_bar, verb
from ladder.comm.link import Link
from ladder.config import ModelConfig
from ladder.devices import check_name
from ladder.errors import LadderError
from ladder.files import check_folder
from ladder.options import argument, option
from ladder.perf.costs import ELEMENT_BYTES, RankCosts
from ladder.perf.memory import check_host
from ladder.report.options import ReportOptions


@dataclass(frozen=True)
class TraceOptions:
    """What is traced, and where the files go."""

    model: Path | None = option(None, "Directory with config.json and weights; default: --size with random weights.")
    size: str = option("tiny", "A named size, where no model is given.")
    wiring: tuple[str, ...] = option(("standard", "ladder"), "A wiring to draw (may be given several times).")
    tp: int = option(2, "Number of ranks, a process each.")
    emulate_link: str | None = option(
        None, "Make all-reduces as slow as on this link: a name, or alpha,beta as in 50us,10GB/s."
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    batch: int = option(8, "Sequences in the step.")
    context: int = option(128, "Positions of each sequence, the step's included.")
    out: Path = option(Path("trace"), "Folder for the traces, the picture and the spans.")
    json: bool = option(False, "The figures as JSON lines.")

    def __post_init__(self) -> None:
        for name in ("tp", "batch", "context"):
            if getattr(self, name) < 1:
                raise LadderError(f"{name} must be at least 1, not {getattr(self, name)}")


@verb(TraceOptions)
def trace(options: TraceOptions) -> None:
    """Record one decode step per wiring: traces for Chrome or Perfetto, a picture of the lanes, and figures."""
    config, wirings, link = _checked(options)
    from ladder.bench.trace.trace import TraceSetting, trace  # imports for seconds: not for what is refused at once
    from ladder.checkpoint import Directory, Random
    from ladder.devices import computing_dtype, device

    source = Random() if options.model is None else Directory(options.model)
    where = device(options.device)
    config = replace(config, dtype=computing_dtype("auto", config.dtype, where))
    _check_memory(options, config)
    setting = TraceSetting(config, source, wirings, link, where, options.batch, options.context, options.out)
    table = Table("wiring", "all-reduces", "step ms", "comm ms", "exposed ms", "hidden")
    for step in trace(setting, options.tp):
        account = step.account()
        if options.json:
            typer.echo(json.dumps(account))
        figures = [f"{account[key]:.2f}" for key in ("step_ms", "comm_ms", "exposed_ms")]
        hidden = "-" if account["hidden"] is None else f"{account['hidden']:.0%}"
        table.add_row(step.wiring, str(account["all_reduces"]), *figures, hidden)
    if not options.json:
        Console().print(table)
        drawn = "lanes.png, " if (options.out / "lanes.png").exists() else ""
        typer.echo(f"wrote {options.out}: {drawn}steps.rank*.jsonl, *.trace.json (for chrome://tracing or Perfetto)")


def _checked(options: TraceOptions) -> tuple[ModelConfig, tuple[str, ...], Link | None]:
    """The model, the wirings and the link, all of them refused before torch is imported."""
    check_folder(options.out)
    config = ModelConfig.named(options.size) if options.model is None else ModelConfig.from_directory(options.model)
    config.check_degree(options.tp)
    if options.context > config.context:
        raise LadderError(f"context {options.context} is more than the model's {config.context}")
    wirings = tuple(str(config.rewired(pattern).wiring) for pattern in options.wiring)
    link = None if options.emulate_link is None else Link.parse(options.emulate_link)
    check_name(options.device)
    _check_memory(options, config)
    return config, wirings, link


def _check_memory(options: TraceOptions, config: ModelConfig) -> None:
    """Refuse what this machine's CPUs cannot hold in the config's dtype."""
    if options.device.startswith("cpu"):
        costs = RankCosts(config, options.tp, ELEMENT_BYTES[config.dtype])
        each = costs.weight_bytes + costs.cache_bytes(options.batch, options.context)
        check_host(f"a batch of {options.batch} on {options.tp} ranks", options.tp * each, "give a smaller --batch")


@dataclass(frozen=True)
class TuneOptions:
    """Which kernels, for which model."""

    out: Path = argument("File of JSON lines; its other lines stay. `ladder generate --tuned` reads it.")
    size: str = option("llama-3-70b", "A named size: its weights' shapes are tuned for.")
    tp: int = option(8, "Number of ranks that share it.")
    batch: tuple[int, ...] = option((1, 4, 16, 64), "Sequences at a time, up to 64 (may be given several times).")
    lanes: int = option(1, "Lanes that kernels run on at the same time: 1 or 2.")
    weights: str = option("bf16", "The format of the layers' matrices, as in `ladder plan --weights`.")
    shared_norm: bool = option(False, "Of parallel layers with one norm, whose QKV and gate/up may be one product.")


@verb(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the configurations of our kernels that suit this GPU, for one rank of a model."""
    check_tuning(options.out, options.size, options.tp, options.batch, options.lanes, options.weights)
    from ladder.bench.tune import tuned  # imports for seconds: not for what is refused at once

    own = options.lanes, options.weights, options.shared_norm
    for line in tuned(options.out, options.size, options.tp, options.batch, *own):
        typer.echo(json.dumps(line))


@verb(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure wirings side by side on this machine; results are appended cell by cell, a second run continues."""
    check_sweep(options)
    from ladder.bench.sweep.sweep import bench, measured_before, read, table

    old, rows = read(options.out), []
    try:
        with steps_bar("starting") as progress:
            for row in bench(options, progress):
                rows.append(row)
                if options.json:
                    typer.echo(json.dumps(row))
    except KeyboardInterrupt:
        there = (
            f"what is measured is in {options.out}"
            if options.out.exists() and options.out.stat().st_size
            else "nothing is measured yet"
        )
        typer.echo(f"ladder: stopped: {there}, the same command continues", err=True)
        raise typer.Exit(130) from None
    if not options.json:
        console = Console()
        console.width = max(console.width, 118)  # figures that are cut off are none
        console.print(table(rows))
        typer.echo(f"wrote {options.out}; ladder report {options.out} draws it")
    if (remark := measured_before(rows, old, options.out)) is not None:
        typer.echo(remark, err=options.json)


@verb(ReportOptions)
def report(options: ReportOptions) -> None:
    """Draw what `ladder bench` and `ladder load` measured: one page that opens without a network, and pictures."""
    from ladder.report.write import report

    written = report(options.inputs, options.out)
    typer.echo(f"wrote {options.out}: {', '.join(path.name for path in written)}")
