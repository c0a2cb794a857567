"""The demo on a GPU: decode steps, standard against Ladder, by the classes of `ladder bench`. Weights are random, so
there is no text.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from ladder.bench.demo.options import DemoOptions
from ladder.bench.demo.timeline import timeline
from ladder.bench.sweep.cells import Hardware, cells
from ladder.bench.sweep.options import BenchOptions
from ladder.bench.sweep.sweep import bench
from ladder.bench.trace import step_trace
from ladder.bench.trace.lanes import Step
from ladder.errors import LadderError
from ladder.jit import PRESENT
from ladder.perf.memory import TooLarge
from ladder.progress import Progress

SIZES = ("llama-3-8b", "llama-3.2-3b", "llama-3.2-1b", "smollm2-135m")  # the first that fits is measured as a whole
ARMS = ("standard", "ladder")
TOKENS: dict[str, Any] = {"prompt": 1024, "new": 64, "repetitions": 25}
SHARD, RANKS, LINK = "llama-3-70b", 8, "nvlink_nccl"  # one rank of it, where its shard fits; `step_trace` has the same
SHOWN = 6  # layers of the timeline
KEYS = ("wiring", "rank", "compute", "comm", "waits")  # of a recorded step
NEXT = (
    ("ladder doctor", "what this machine can do, and which wiring suits it"),
    (f"ladder bench --size {SHARD} --tp {RANKS} --emulate-link {LINK}", "every wiring, and no communication at all"),
    ("ladder serve DIR --device cuda", "a model of your own, converted by ladder convert"),
)
Row = Mapping[str, Any]
Measure = Callable[[BenchOptions, Progress], Iterator[dict[str, Any]]]


def planned(out: Path, here: Hardware) -> list[BenchOptions]:
    """What is measured on this GPU: a whole model by itself, and one rank of a large one."""
    found = []
    for size in SIZES:
        options = BenchOptions(size=(size,), arm=ARMS, tp=(1,), batch=(1, 16), device="cuda", out=out, **TOKENS)
        if _fits(options, here):
            found.append(options)
            break
    one_rank = BenchOptions(
        size=(SHARD,), arm=ARMS, tp=(RANKS,), emulate_link=(LINK,), mode="one-rank", device="cuda", out=out, **TOKENS
    )
    if PRESENT and _fits(one_rank, here):  # a rank alone is measured by our kernels
        found.append(one_rank)
    if not found:
        raise LadderError("this GPU has no room for the smallest model of the demo: use --device cpu")
    return found


def _fits(options: BenchOptions, here: Hardware) -> bool:
    try:
        cells(options, here)
    except TooLarge:
        return False
    return True


def measured(progress: Progress, measure: Measure) -> Iterator[Row]:
    """A row for each arm, as `measure` gives them."""
    with TemporaryDirectory(prefix="ladder-demo-") as folder:
        for options in planned(Path(folder) / "bench.jsonl", Hardware.present()):
            yield from measure(options, progress)


def demo_gpu(
    options: DemoOptions,
    console: Console,
    measure: Measure = bench,
    trace: Callable[[list[str]], None] = step_trace.main,
) -> None:
    """`ladder demo` on a GPU. `measure` and `trace`: what measures, and what records steps; for tests."""
    rows: list[Row] = []
    if options.json:
        for row in measured(lambda *_: None, measure):
            console.file.write(json.dumps(row) + "\n")
        return
    doing = "starting"

    def progress(done: int, total: int, what: str) -> None:
        nonlocal doing
        doing = f"{what} ({done} of {total} steps)"
        live.update(_table(rows, doing))

    with Live(_table(rows, doing), console=console, refresh_per_second=4) as live:
        for row in measured(progress, measure):
            rows.append(row)
            live.update(_table(rows, doing))
        live.update(_table(rows, ""))
    console.print(_said(rows), markup=False, highlight=False)
    if any(row["tp"] > 1 for row in rows):
        _traced(options, console, trace)
    console.print("\n[bold]Next[/bold]")
    for command, what in NEXT:
        console.print(f"  {command}", style="bold", highlight=False, soft_wrap=True)
        console.print(f"      {what}", highlight=False)


def _traced(options: DemoOptions, console: Console, trace: Callable[[list[str]], None]) -> None:
    """A decode step of the shard, under each way to compute it: its first layers as lines, and the picture."""
    with TemporaryDirectory(prefix="ladder-demo-") as folder:
        try:
            trace([folder, LINK])
        except (LadderError, RuntimeError) as error:  # no library for charts, or a profiler that does not tell enough
            console.print(f"no timeline: {error}", markup=False, highlight=False, soft_wrap=True)
            return
        lines = (Path(folder) / "one_rank_steps.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [Step.read({key: row[key] for key in KEYS}) for row in rows]
    what = f"{SHARD}, one rank of {RANKS}, batch 1, {rows[0].get('chip')}; link {LINK}, emulated"
    step_trace.draw_first(steps, [row["step_ms"] for row in rows], what, options.out)
    ms = max(span.end for step in steps for span in step.compute[: 2 * SHOWN])
    about = f"The first layers of one decode step of {SHARD}, one rank of {RANKS}: {ms:.2f} ms from left to right"
    console.print(f"\n[bold]{about}[/bold]", highlight=False)
    titles = [f"{step.wiring}: {row['step_ms']:.2f} ms in all" for step, row in zip(steps, rows, strict=True)]
    timeline(list(zip(titles, steps, strict=True)), console, ms)
    console.print(f"wrote {options.out}: the same as a picture", markup=False, highlight=False, soft_wrap=True)


def speedup(rows: Sequence[Row], row: Row) -> float | None:
    """Over the standard arm of the same cell, while tokens are decoded."""
    same = ("size", "tp", "batch", "cell_link")
    base = [one for one in rows if one["arm"] == "standard" and all(one[key] == row[key] for key in same)]
    return base[0]["tpot_ms_p50"] / row["tpot_ms_p50"] if base else None


def _table(rows: Sequence[Row], doing: str) -> Table:
    heads = ("model", "batch", "wiring", "ms/token", "tokens/s", "x standard", "exposed ms", "hidden", "lanes")
    table = Table(*(Column(head, justify="left" if head in ("model", "wiring") else "right") for head in heads))
    table.box, table.caption = SIMPLE_HEAD, doing
    for row in rows:
        share = "" if row["tp"] == 1 else f", one rank of {row['tp']}"
        times, comm = speedup(rows, row), row["tp"] > 1
        figures = (f"{row['tpot_ms_p50']:.2f}", f"{row['batch'] * 1e3 / row['tpot_ms_p50']:.0f}")
        table.add_row(
            f"{row['size']}{share}", str(row["batch"]), row["arm"], *figures,
            "-" if times is None else f"{times:.2f}",
            f"{row['exposed_ms']:.2f}" if comm else "-",
            "-" if row["hidden"] is None else f"{row['hidden']:.0%}",
            str(row["lanes"]),
        )  # fmt: skip
    return table


def _said(rows: Sequence[Row]) -> str:
    """What the table says, and what it compares."""
    lines = []
    for row in rows:
        times = speedup(rows, row)
        if row["arm"] == "ladder" and times is not None:
            where = "on this GPU alone" if row["tp"] == 1 else f"as one rank of {row['tp']}"
            lines.append(f"{row['size']}, batch {row['batch']}, {where}: Ladder {times:.2f} times as fast as standard.")
    lines.append("Weights are random: a decode step's time does not depend on them, and a wiring changes no tensor.")
    if any(row["tp"] > 1 for row in rows):
        lines.append(f"The link between the {RANKS} ranks is emulated ({LINK}); the other ranks do not exist.")
    if any(row["lanes"] > 1 for row in rows):
        lines.append("Two lanes: attention and MLP are computed at the same time, which only Ladder's wirings allow.")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
    return "\n".join([f"Measured just now on {device}:", *lines])
