"""The report as one HTML page: template, style and script with the numbers inside. No torch here.

What comes from the lines is in the page only as JSON, which the program shows as text; none of it is ever HTML.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from statistics import median
from typing import Any

from ladder.bench.trace.lanes import COLOURS, Step
from ladder.report.figures import BASE, SPEEDUP, Panel, heights, predicted_ms
from ladder.report.load_figures import load_table
from ladder.report.looks import TIMES, Look
from ladder.report.plots import SHOWN, SPEEDUP_TICKS, timeline_title
from ladder.report.published import beside, published
from ladder.report.rows import Lanes, ReportData, Row
from ladder.report.weight_figures import weights_table

# A column's key, its title, and how many digits its numbers have after the point; columns without a value are left out.
COLUMNS: tuple[tuple[str, str, int | None], ...] = (
    ("size", "size", None),
    ("arm", "arm", None),
    ("tp", "TP", 0),
    ("batch", "batch", 0),
    ("link", "link", None),
    ("link_alpha_us", "alpha µs", 1),
    ("link_beta_gb_s", "beta GB/s", 1),
    ("link_kind", "link is", None),
    ("tokens_per_s", "tokens/s", 1),
    ("speedup", f"{TIMES} standard", 2),
    ("tokens_per_s_user", "tokens/s/user", 1),
    ("tokens_per_s_gpu", "tokens/s/GPU", 1),
    ("ttft_ms", "TTFT ms", 1),
    ("tpot_ms_p50", "TPOT ms p50", 2),
    ("tpot_ms_p99", "p99", 2),
    ("tpot_ms_q1", "q1", 2),
    ("tpot_ms_q3", "q3", 2),
    ("model_ms", "model's TPOT ms", 2),
    ("all_reduces", "all-reduces", 0),
    ("lanes", "lanes", 0),
    ("comm_ms", "comm ms", 2),
    ("exposed_ms", "exposed ms", 2),
    ("hidden", "hidden", 2),
    ("bandwidth_tb_s", "TB/s", 2),
    ("bandwidth_share", "of peak", 2),
    ("prefill_tflop_s", "prefill TFLOP/s", 1),
    ("prefill_share", "of peak", 2),
    ("peak_memory_gb", "memory GB", 1),
    ("prompt", "prompt", 0),
    ("new", "new", 0),
    ("context", "context", 0),
    ("layers", "layers", 0),
    ("of_layers", "of layers", 0),
    ("repetitions", "repetitions", 0),
    ("mode", "mode", None),
    ("chip", "chip", None),
    ("cores", "cores", 0),
    ("dtype", "dtype", None),
    ("weights", "weights", None),
    ("wiring", "wiring", None),
    ("torch", "torch", None),
    ("triton", "triton", None),
    ("python", "python", None),
    ("commit", "commit", None),
    ("time", "time", None),
)
LANES = ("compute", "waits", "comm")


def page(lines: ReportData, figures: Mapping[str, Sequence[Panel]], looks: dict[str, Look]) -> str:
    """The whole page, to be opened from disk."""
    data = {
        "summary": summary(lines, figures),
        "notes": list(lines.not_drawn),
        "looks": {arm: asdict(look) for arm, look in looks.items()},
        "figures": {name: [_panel(name, panel) for panel in panels] for name, panels in figures.items()},
        "timelines": [_timeline(lane) for lane in lines.lanes],
        "spans": COLOURS,
        "rows": _table(lines.rows),
        "weights": weights_table(figures["weights"]),
        "loads": load_table(lines.loads),
        "published": {"source": published()["source"], "setting": published()["setting"], "rows": _beside(lines.rows)},
    }
    parts = {
        "STYLE": _file("page.css"),
        "PROGRAM": _file("charts.js") + _file("page.js"),
        "DATA": harmless(data),
    }
    # in one pass, so that nothing in the data is taken for a place to fill
    return re.sub(r"/\*(STYLE|PROGRAM|DATA)\*/", lambda found: parts[found[1]], _file("page.html"))


def harmless(data: Any) -> str:
    """JSON that no browser takes for the end of a script or the beginning of anything."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def summary(lines: ReportData, figures: Mapping[str, Sequence[Panel]]) -> list[str]:
    """What was read, and the answer in a sentence."""
    chips = sorted({row.chip for row in lines.rows if row.chip})
    counted = [f"{len(lines.rows)} measurements"] if lines.rows or not lines.loads else []
    counted += [f"{len(lines.loads)} runs of requests"] if lines.loads else []
    sentences = [
        f"{' and '.join(counted)} from {', '.join(lines.sources)}" + (f" on {', '.join(chips)}." if chips else ".")
    ]
    if any(row.link_kind == "emulated" for row in lines.rows):
        sentences[0] += " On an emulated link an all-reduce takes no less than alpha + bytes / beta of that link."
    marks = [mark for panel in figures["throughput"] for mark in panel.marks[SPEEDUP]]
    ladder = sorted(mark.y for mark in marks if mark.arm == "ladder")
    if ladder:
        low, middle, high = ladder[0], median(ladder), ladder[-1]
        cells = f"over {len(ladder)} cells of size, TP, link and batch" if len(ladder) > 1 else "in one cell"
        times = f"{low:.2f} to {high:.2f} times standard's tokens/s {cells} (median {middle:.2f})"
        sentences.append(f"Ladder gives {times}.")
    return sentences


def _panel(figure: str, panel: Panel) -> dict[str, Any]:
    """A panel as the page's program reads it; panels of speed-ups bring the reach of their axis along."""
    if figure not in ("latency", "weights"):
        return asdict(panel)
    low, high = heights(panel)
    return {**asdict(panel), "heights": (low, high), "marked": [tick for tick in SPEEDUP_TICKS if low <= tick <= high]}


def _file(name: str) -> str:
    return (files("ladder.report") / name).read_text(encoding="utf-8")


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    """All rows, with the columns that have a value somewhere."""
    bases = {_cell(row): row for row in rows if row.arm == BASE}
    records = []
    for row in rows:
        record = {field.name: getattr(row, field.name) for field in fields(Row)}
        record |= {"tokens_per_s": row.total, "tokens_per_s_user": row.per_user, "tokens_per_s_gpu": row.per_gpu}
        base = bases.get(_cell(row))
        record |= {"speedup": base and row.total / base.total, "model_ms": predicted_ms(row)}
        records.append(record)
    shown = [column for column in COLUMNS if any(record[column[0]] is not None for record in records)]
    cells = [[record[key] for key, _, _ in shown] for record in records]
    return {"columns": [{"title": title, "digits": digits} for _, title, digits in shown], "cells": cells}


def _cell(row: Row) -> tuple[Any, ...]:
    return row.size, row.tp, row.batch, row.compared_on, row.setting


def _beside(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Those that have a counterpart first."""
    return [asdict(line) for line in sorted(beside(rows), key=lambda line: line.ours is None)]


def _timeline(lane: Lanes) -> dict[str, Any]:
    """A rank's steps for the page, which can show all layers."""
    return {
        "keys": {"file": lane.source, "rank": str(lane.rank)},
        "facts": timeline_title(lane).split(" · ", 1)[-1],
        "shown": SHOWN,
        "steps": [_lanes(step) for step in lane.steps],
    }


def _lanes(step: Step) -> dict[str, Any]:
    spans = {lane: [[s.name, round(s.begin, 5), round(s.end, 5)] for s in getattr(step, lane)] for lane in LANES}
    return {"title": step.title, "ms": step.ms, "layers": len(step.compute) // 2, **spans}
