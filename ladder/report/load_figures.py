"""The data of the figures of `ladder load`: distributions of latencies, and figures against the rate. No torch here."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ladder.charts.looks import figure
from ladder.load.summary import percentile
from ladder.report.figures import Mark, Panel, joined
from ladder.report.lines.loads import TIMES, LoadRow, LoadRun

SHOWN = (50, 90, 99)  # percentiles that are points on a distribution's line
PERCENTS = (0, 1, 2, *range(5, 100, 5), 98, 99, 99.5, 100)
# against the rate: what is drawn, and the key of a run's line
AGAINST = {
    "output tokens/s": "output_tokens_per_s",
    "requests/s": "requests_per_s",
    "goodput, requests/s": "goodput_per_s",
    "TTFT p50, ms": "ttft_ms_p50",
    "TTFT p99, ms": "ttft_ms_p99",
    "TPOT p50, ms": "tpot_ms_p50",
    "TPOT p99, ms": "tpot_ms_p99",
}
# A column's key, its title, and how many digits its numbers have after the point
COLUMNS: tuple[tuple[str, str, int | None], ...] = (
    ("label", "label", None),
    ("arrived", "arrivals", None),
    ("lengths", "tokens", None),
    ("api", "API", None),
    ("requests", "requests", 0),
    ("completed", "completed", 0),
    ("failed", "failed", 0),
    ("requests_per_s", "requests/s", 2),
    ("output_tokens_per_s", "output tokens/s", 1),
    ("total_tokens_per_s", "with prompts", 1),
    ("goodput_per_s", "goodput/s", 2),
    ("goodput_share", "of requests", 2),
    *((f"{key}_p{p}", f"{name} p{p}", 1) for key, name in TIMES.items() for p in SHOWN),
    ("duration_s", "seconds", 1),
    ("lag_ms_p99", "client's lag ms p99", 1),
    ("client_cpu_share", "client's CPU share", 2),
    ("model", "model", None),
    ("url", "endpoint", None),
    ("chip", "client's chip", None),
    ("commit", "commit", None),
    ("time", "time", None),
)


def load_latency(runs: Sequence[LoadRun]) -> list[Panel]:
    """Which share of the requests took at most how long: a panel for each way of arriving; an arm is a label."""
    panels = []
    for (arrived, lengths, api), group in _grouped(runs, lambda row: (row.arrived, row.lengths, row.api)).items():
        marks = {name: [mark for run in group for mark in _distribution(run, name)] for name in TIMES.values()}
        if any(marks.values()):
            keys = {"arrivals": arrived, "tokens": lengths, "API": api or "unknown"}
            panels.append(Panel(keys, facts(group), marks))
    return panels


def load_rate(runs: Sequence[LoadRun]) -> list[Panel]:
    """Throughput and latencies against the rate of requests, or against how many are under way at a time."""
    panels = []
    for against, at in (("requests/s offered", _rate), ("requests at a time", _concurrency)):
        chosen = [run for run in runs if at(run.row) is not None]
        for (lengths, api), group in _grouped(chosen, lambda row: (row.lengths, row.api), at).items():
            if len({at(run.row) for run in group}) < 2:
                continue  # a single point is no curve
            marks = {name: [m for run in group for m in _point(run, key, at)] for name, key in AGAINST.items()}
            keys = {"against": against, "tokens": lengths, "API": api or "unknown"}
            panels.append(Panel(keys, facts(group), marks))
    return panels


def load_table(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """All runs, with the columns that have a value somewhere."""
    shown = [column for column in COLUMNS if any(getattr(run.row, column[0]) is not None for run in runs)]
    cells = [[getattr(run.row, key) for key, _, _ in shown] for run in runs]
    return {"columns": [{"title": title, "digits": digits} for _, title, digits in shown], "cells": cells}


def facts(runs: Sequence[LoadRun]) -> str:
    """Where a figure comes from: endpoints, clients, commits, dates."""
    rows = [run.row for run in runs]
    models, places = _distinct(row.model for row in rows), _distinct(row.url for row in rows)
    chips, commits = _distinct(row.chip for row in rows), _distinct(row.commit for row in rows)
    dates = _distinct(row.time and row.time[:10] for row in rows)
    parts = [f"model {models}", f"at {places}", f"client on {chips}", f"client's commit {commits}", dates]
    return joined(*parts)


def _distinct(values: Iterable[str | None]) -> str:
    return ", ".join(sorted({value for value in values if value})) or "unknown"


def _grouped(
    runs: Sequence[LoadRun],
    key: Callable[[LoadRow], Any],
    at: Callable[[LoadRow], Hashable] = lambda row: None,
) -> dict[Any, list[LoadRun]]:
    """Runs by key; of those with the same label and place the newest counts."""
    found: dict[Any, dict[Hashable, LoadRun]] = {}
    for run in runs:
        found.setdefault(key(run.row), {})[run.row.label, at(run.row)] = run
    return {group: list(own.values()) for group, own in found.items()}


def _rate(row: LoadRow) -> float | None:
    return row.rate if row.concurrency is None else None


def _concurrency(row: LoadRow) -> float | None:
    return None if row.concurrency is None else float(row.concurrency)


def _distribution(run: LoadRun, name: str) -> list[Mark]:
    values, label = run.times.get(name, []), run.row.label
    marks = []
    for percent in PERCENTS if values else ():
        ms = percentile(values, percent)
        tips = [(f"{percent:g}% within", f"{figure(ms)} ms"), ("of", f"{len(values):,}")]
        marks.append(Mark(label, ms, percent, None, None, f"{label} · {name}", tips, percent in SHOWN))
    return marks


def _point(run: LoadRun, key: str, at: Callable[[LoadRow], float | None]) -> list[Mark]:
    row = run.row
    x, y = at(row), getattr(row, key)
    if x is None or y is None:
        return []
    tips = [("requests/s", figure(row.requests_per_s)), ("output tokens/s", figure(row.output_tokens_per_s))]
    if row.goodput_per_s is not None:
        tips.append(("goodput, requests/s", figure(row.goodput_per_s)))
    for name, own in (("TTFT", (row.ttft_ms_p50, row.ttft_ms_p99)), ("TPOT", (row.tpot_ms_p50, row.tpot_ms_p99))):
        if own[0] is not None and own[1] is not None:
            tips.append((f"{name} p50, p99", f"{figure(own[0])}, {figure(own[1])} ms"))
    if row.failed:
        tips.append(("failed", str(row.failed)))
    return [Mark(row.label, x, y, None, None, f"{row.label} · {row.arrived}", tips)]
