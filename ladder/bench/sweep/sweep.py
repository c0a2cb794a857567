"""ladder bench: the sweep. A cell's arms are measured in turns, so their lines come together; they are in the file as
soon as the cell is measured, and are not measured again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from ladder.bench.machine import machine
from ladder.bench.ranks import stream_ranks
from ladder.bench.sweep.cells import Cell, cells
from ladder.bench.sweep.measure import Measured, StepsDone, measured
from ladder.bench.sweep.options import BenchOptions
from ladder.comm.base import Solo
from ladder.comm.one_rank import OneRank
from ladder.errors import LadderError
from ladder.files import LineFile, check_appendable, locked
from ladder.perf.measurements import read_lines
from ladder.progress import Progress

# what makes two lines the same measurement
WHAT = ("size", "arm", "wiring", "tp", "batch", "prompt", "new", "dtype", "weights", "layers")
WHERE = ("cell_link", "link", "link_kind", "mode", "chip", "cores")
KEYS = WHAT + WHERE

Key = tuple[Any, ...]


def key(row: Mapping[str, Any]) -> Key:
    return tuple(row[name] for name in KEYS)


def done(out: Path) -> set[Key]:
    """The keys of what `out` already has."""
    return {key(row) for row in read(out)}


def read(out: Path) -> list[dict[str, Any]]:
    """The measurements in a file. Its last line may be torn: the program was stopped while it wrote that."""
    if out.is_dir():
        raise LadderError(f"{out} is a directory: name a file, as in --out {out / 'bench.jsonl'}")
    if not out.exists():
        return []
    # lines of other programs may be there too
    return [row for _, row in read_lines(out).objects if all(name in row for name in KEYS)]


def bench(options: BenchOptions, progress: Progress) -> Iterator[dict[str, Any]]:
    """A row for every cell, those that `out` already has with as many repetitions included. `progress` is called
    with steps done, steps in all, and what is being done. All that can be refused is refused before the first row.
    """
    planned = cells(options)
    check_appendable(options.out)
    device = torch.device(planned[0].device)
    stamp = machine(device)
    with _owned(options.out):
        yield from _rows(options, planned, stamp, progress)


@contextmanager
def _owned(out: Path) -> Iterator[None]:
    """No other sweep appends to the file meanwhile, nor measures beside this one for it."""
    new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    try:
        with locked(out):
            yield
    finally:
        if new and not out.stat().st_size:
            out.unlink()


def _rows(
    options: BenchOptions, planned: Sequence[Cell], stamp: dict[str, Any], progress: Progress
) -> Iterator[dict[str, Any]]:
    old = {key(row): row for row in read(options.out)}
    lines = LineFile(options.out)
    steps, total = 0, sum(cell.repetitions for cell in planned)
    for _, group in groupby(planned, Cell.model_key):
        todo = []
        for cell in group:
            known = old.get(key({**line_of(cell), **stamp}))
            if known is not None and known.get("repetitions", 0) >= cell.repetitions:
                steps += cell.repetitions
                progress(steps, total, "measured before")
                yield known
            else:
                todo.append(cell)
        for result in _measured(todo) if todo else ():
            match result:
                case StepsDone(count, what):
                    steps += count
                    progress(steps, total, what)
                case Measured(cell, figures):
                    row = {**line_of(cell), **stamp, **figures}
                    row["time"] = datetime.now(UTC).isoformat(timespec="seconds")
                    lines.append(row)
                    yield row


def _measured(todo: Sequence[Cell]) -> Iterator[StepsDone | Measured]:
    """Cells that share one model, by a process for each rank, or by this one alone."""
    first = todo[0]
    if first.mode == "ranks":
        yield from stream_ranks(first.tp, torch.device(first.device), measured, list(todo))
        return
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    try:
        with torch.inference_mode():
            yield from measured(OneRank(first.tp) if first.tp > 1 else Solo(), device, todo)
    except torch.OutOfMemoryError as error:
        raise LadderError(f"the GPU has not enough memory for {first.size} at TP {first.tp}: {error}") from None


def line_of(cell: Cell) -> dict[str, Any]:
    """A line's description of its cell."""
    line = {field.name: getattr(cell, field.name) for field in fields(Cell)}
    del line["repetitions"], line["device"]
    link = cell.emulated_link
    line["context"] = cell.context
    line["link_alpha_us"] = None if link is None else round(link.alpha * 1e6, 4)
    line["link_beta_gb_s"] = None if link is None else round(link.beta / 1e9, 6)
    return line


def measured_before(rows: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]], out: Path) -> str | None:
    """A sentence about those of `rows` that were in `out` when the sweep began: they may be another commit's."""
    kept = [row for row in rows if row in old]
    if not kept:
        return None
    commits = ", ".join(dict.fromkeys(str(row.get("commit") or "unknown") for row in kept))
    return (
        f"{len(kept)} of {len(rows)} rows were measured before, at commit {commits}: "
        f"they are measured again where {out} is removed"
    )


COLUMNS = ("arm", "TTFT ms", "TPOT ms", "p99", "tokens/s", "speed-up", "comm ms", "exposed ms", "hidden", "of peak")


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Arms under each other, cell by cell. `speed-up` is tokens/s over those of the cell's standard arm, `of peak` the
    share of the measured rate of reading memory, `lanes` those of the chosen schedule, which not every line names.
    """
    grid = Table(caption=_caption(rows))
    with_lanes = any("lanes" in row for row in rows)
    for name in (*COLUMNS, *(["lanes"] if with_lanes else [])):
        grid.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    groups = [list(group) for _, group in groupby(rows, lambda row: tuple(row[name] for name in _CELL))]
    plain = all(row["weights"] == "bf16" for row in rows)
    titles = [[part for part in _title(some[0]) if part != "weights bf16" or not plain] for some in groups]
    common = [part for part in titles[0] if all(part in title for title in titles)] if titles else []
    grid.title = ", ".join(common)
    for some, title in zip(groups, titles, strict=True):
        if len(groups) > 1:
            grid.add_section()
            grid.add_row(Text("\n".join(part for part in title if part not in common), style="bold"))
        base = next((row["tokens_per_s"] for row in some if row["arm"] == "standard"), None)
        for row in some:
            grid.add_row(*_shown(row, base), *([str(row.get("lanes", "-"))] if with_lanes else []))
    return grid


_CELL = ("size", "tp", "batch", "prompt", "new", "cell_link", "mode", "layers", "weights")


def _title(row: Mapping[str, Any]) -> list[str]:
    """What a cell is, in parts: those that all cells have in common are shown once."""
    part = "" if row["layers"] == row["of_layers"] else f" ({row['layers']} of {row['of_layers']} layers)"
    parts = [f"{row['size']}{part}", f"TP {row['tp']}", f"batch {row['batch']}", f"{row['prompt']}+{row['new']} tokens"]
    parts.append(f"weights {row['weights']}")
    return parts + ([f"link {row['cell_link']} ({row['link_kind']})"] if row["cell_link"] else [])


def _shown(row: Mapping[str, Any], base: float | None) -> list[str]:
    return [
        row["arm"],
        *(_ms(row[name]) for name in ("ttft_ms", "tpot_ms_p50", "tpot_ms_p99")),
        f"{row['tokens_per_s']:.1f}",
        "-" if base is None else f"{row['tokens_per_s'] / base:.2f}",
        *(_ms(row[name]) for name in ("comm_ms", "exposed_ms")),
        "-" if row["hidden"] is None else f"{row['hidden']:.0%}",
        f"{row['bandwidth_share']:.0%}",
    ]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = dict.fromkeys((row["chip"], row["mode"], row["dtype"], row["commit"]) for row in rows)
    return "\n".join(f"{chip}, {mode}, {dtype}, commit {commit or 'unknown'}" for chip, mode, dtype, commit in kinds)
