"""The report as one HTML page: template, style and script with the numbers inside. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from statistics import median
from typing import Any

from ladder.bench.trace.lanes import GAPS
from ladder.charts.looks import TIMES, Look
from ladder.charts.page import assembled, legend, text_of
from ladder.charts.theme import KINDS
from ladder.report.charts import charts_of, facts_of, timelines
from ladder.report.figures import BASE, SPEEDUP, Panel, predicted_ms, rank_name
from ladder.report.lines.read import ReportData
from ladder.report.lines.rows import Lanes, Row
from ladder.report.load_figures import load_table
from ladder.report.published import beside, published
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


def page(lines: ReportData, figures: Mapping[str, Sequence[Panel]], looks: dict[str, Look]) -> str:
    """The whole page, to be opened from disk."""
    data = {
        "summary": summary(lines, figures),
        "notes": list(lines.not_drawn),
        "looks": legend(looks),
        "figures": {name: [_panel(name, panel, looks) for panel in panels] for name, panels in figures.items()},
        "timelines": [_timeline(lane) for lane in lines.lanes],
        "kinds": KINDS,
        "gaps": GAPS,
        "rows": _table(lines.rows),
        "weights": weights_table(figures["weights"]),
        "loads": load_table(lines.loads),
        "published": {"source": published()["source"], "setting": published()["setting"], **_beside(lines.rows)},
    }
    parts = [text_of("ladder.report", f"page.{kind}") for kind in ("html", "css", "js")]
    return assembled(parts[0], parts[1], parts[2], data)


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
    if len(ladder) == 1:
        bound = _bound(figures["throughput"])
        sentences.append(f"Ladder gives {ladder[0]:.2f}{TIMES} standard's tokens/s{bound}.")
    elif ladder:
        cells = f"{len(ladder)} cells of size, TP, link and batch"
        spread = f"{ladder[0]:.2f}{TIMES} to {ladder[-1]:.2f}{TIMES} over {cells}"
        bound = _bound(figures["throughput"])
        sentences.append(f"Ladder gives {median(ladder):.2f}{TIMES} standard's tokens/s ({spread}){bound}.")
    return sentences


def _bound(panels: Sequence[Panel]) -> str:
    """How much standard would gain without communication, in the cells that have ladder too."""
    found = []
    for panel in panels:
        own = {(mark.arm, mark.x): mark.y for mark in panel.marks[SPEEDUP]}
        found += [y for (arm, x), y in own.items() if arm == "none" and ("ladder", x) in own]
    return f"; without communication standard would give {median(found):.2f}{TIMES}" if found else ""


def _panel(name: str, panel: Panel, looks: dict[str, Look]) -> dict[str, Any]:
    """A panel as the page's program reads it. `size`: how many marks it has."""
    about = {"keys": panel.keys, "facts": panel.facts, "remark": panel.remark, "lead": panel.lead}
    size = sum(len(marks) for marks in panel.marks.values())
    return {
        **about,
        "arms": [arm for arm in looks if arm in panel.arms],
        "size": size,
        "charts": charts_of(name, panel, looks),
    }


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
    columns = [{"title": title.replace("GPU", rank_name(rows)), "digits": digits} for _, title, digits in shown]
    return {"columns": columns, "cells": cells}


def _cell(row: Row) -> tuple[Any, ...]:
    return row.size, row.tp, row.batch, row.compared_on, row.setting


def _beside(rows: Sequence[Row]) -> dict[str, Any]:
    """The published figures that have a counterpart, and how many there are."""
    found = beside(rows)
    return {"count": len(found), "rows": [asdict(line) for line in found if line.ours is not None]}


def _timeline(lane: Lanes) -> dict[str, Any]:
    """A rank's steps, by how many of their layers are shown."""
    keys = {"file": lane.source, "rank": str(lane.rank)}
    return {"keys": keys, "facts": facts_of(lane), "arms": [], "size": 0, "lead": 0, "charts": timelines(lane)}
