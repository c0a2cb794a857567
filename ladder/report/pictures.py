"""The report's charts as files, for documents. No torch here."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ladder.bench.trace.lanes import draw
from ladder.charts import specs
from ladder.charts.library import picture
from ladder.charts.looks import Look
from ladder.report.charts import SHOWN, charts_of, timeline_title
from ladder.report.figures import Panel, joined
from ladder.report.lines.rows import Lanes

TITLES = {
    "throughput": "Throughput by wiring",
    "frontier": "Pareto frontier over batch and TP",
    "latency": "Speed-up against link latency (points: measured)",
    "weights": "Speed-up by weight format (points: measured)",
    "load-latency": "Latency of requests (points: p50, p90, p99)",
    "load-rate": "Load",
    "training": "Training",
}
COLUMNS = {"load-latency": 2, "load-rate": 2, "training": 2}  # of a picture of several charts
LINE = 135  # letters
_PREFIX = {"TP": "tp", "batch": "batch"}


def pictures(
    figures: Mapping[str, Sequence[Panel]], lanes: Sequence[Lanes], looks: Mapping[str, Look], out: Path
) -> list[Path]:
    """One file for each panel and each rank's timeline; their names are made of their choices."""
    taken: set[str] = set()
    written = []
    for name, panels in figures.items():
        for panel in panels:
            path = out / _name([name, *(f"{_PREFIX.get(key, '')}{value}" for key, value in choices(panel))], taken)
            arms = [arm for arm in looks if arm in panel.arms]
            where = joined(*(f"{key} {value}" if key in _PREFIX else value for key, value in choices(panel)))
            charts = list(charts_of(name, panel, looks).values())
            chart = specs.beside(charts, arms, COLUMNS.get(name, 1))
            facts = textwrap.wrap(panel.facts, LINE) + textwrap.wrap(panel.remark, LINE)
            picture(specs.titled(chart, f"{TITLES[name]}: {where}"[:LINE], facts), path)
            written.append(path)
    for lane in lanes:
        path = out / _name(["timeline", *(["rank", str(lane.rank)] if lane.rank else [])], taken)
        draw(lane.steps, timeline_title(lane), path, count=SHOWN)
        written.append(path)
    return written


def choices(panel: Panel) -> list[tuple[str, str]]:
    """What tells a panel from the others; the setting, which is long, stands below it."""
    return [(key, value) for key, value in panel.keys.items() if key != "measured"]


def _name(parts: Iterable[str], taken: set[str]) -> str:
    """A file name of small letters, digits and hyphens that is not taken yet."""
    stem = "-".join(re.sub(r"[^a-z0-9._]+", "-", re.sub(r" \(.*\)$", "", part).lower()).strip("-.") for part in parts)
    stem, name, count = stem[:80], f"{stem[:80]}.png", 1
    while name in taken:
        count += 1
        name = f"{stem}-{count}.png"
    taken.add(name)
    return name
