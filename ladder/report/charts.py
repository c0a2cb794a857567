"""The report's figures as charts: its page and its pictures draw the same descriptions. No torch here."""

from collections.abc import Mapping, Sequence
from typing import Any

from ladder.bench.trace.lanes import timeline
from ladder.charts import specs
from ladder.charts.looks import Look, figure
from ladder.charts.specs import Spec
from ladder.report.figures import SPEEDUP, TOKENS, Mark, Panel, heights, joined
from ladder.report.lines.rows import Lanes

SHOWN = 6  # layers in the picture of a step
Looks = Mapping[str, Look]
Charts = dict[str, Spec]


def charts_of(name: str, panel: Panel, looks: Looks) -> Charts:
    """A panel's charts, by what they show where there are several."""
    own = {arm: look for arm, look in looks.items() if arm in panel.arms}
    return _CHARTS[name](panel, own)


def _throughput(panel: Panel, looks: Looks) -> Charts:
    """Speed-ups as bars; tokens/s as points on a logarithmic axis, as batches are far apart."""
    found: Charts = {}
    order = {arm: place for place, arm in enumerate(looks)}
    for metric in (SPEEDUP, TOKENS):
        marks = sorted(panel.marks[metric], key=lambda mark: (mark.x, order[mark.arm]))
        if not marks:
            continue
        records = [{**_record(mark), "group": f"{mark.x:,.0f}", "text": _value(metric, mark)} for mark in marks]
        found[metric] = specs.bars(metric, looks, records, "batch", log=metric == TOKENS)
    return found


def _value(metric: str, mark: Mark) -> str:
    return f"{mark.y:.2f}" if metric == SPEEDUP else figure(mark.y)


def _frontier(panel: Panel, looks: Looks) -> Charts:
    marks = panel.marks[""]
    low, high = min(mark.y for mark in marks), max(mark.y for mark in marks)
    x = specs.Axis("tokens/s for each user (faster answers \N{RIGHTWARDS ARROW})")
    y = specs.Axis(f"tokens/s for each {panel.rank} (cheaper tokens \N{RIGHTWARDS ARROW})", log=high > 8 * low)
    lines = [{"arm": m.arm, "x": m.x, "y": m.y, "order": n} for n, m in enumerate(marks) if m.front]
    rightmost: dict[str, Mark] = {}  # TP and batch stand beside the rightmost point of each
    for mark in marks:
        cell = mark.title.removeprefix(f"{mark.arm} · ")
        if cell not in rightmost or mark.x > rightmost[cell].x:
            rightmost[cell] = mark
    names = [{"arm": mark.arm, "x": mark.x, "y": mark.y, "text": cell} for cell, mark in rightmost.items()]
    return {"": specs.curves(x, y, looks, {"lines": lines, **_points(marks), "names": names})}


def _latency(panel: Panel, looks: Looks) -> Charts:
    """A logarithmic axis has no 0: what is measured there gets a place of its own. One latency makes no curve: bars."""
    marks, arms = panel.marks[""], list(looks)
    above = sorted({mark.x for mark in marks if mark.x > 0}) or [1.0]
    if len({mark.x for mark in marks}) == 1:
        group = f"{marks[0].x:g} \N{MICRO SIGN}s"
        records = [{**_record(mark), "group": group, "text": f"{mark.y:.2f}"} for mark in marks]
        return {"": specs.bars(DECODING, looks, records, "latency of the link, the only one measured")}
    low, high = above[0] / 1.5, above[-1] * 1.5
    nought = low / 1.6 if any(mark.x <= 0 for mark in marks) else None
    names = {tick: f"{tick:g}" for tick in specs.ROUND if low <= tick <= high}
    names = {nought: "0", **names} if nought is not None else names
    x = specs.Axis("latency of the link, alpha (\N{MICRO SIGN}s)", True, (nought / 1.3 if nought else low, high), names)
    records = []
    for mark in marks:
        aside = 1.014 ** (arms.index(mark.arm) - (len(arms) - 1) / 2)  # points of one link stand side by side
        records.append({**_record(mark), "x": aside * (mark.x if mark.x > 0 else nought or low)})
    return {"": _speedups(panel, looks, x, records)}


def _weights(panel: Panel, looks: Looks) -> Charts:
    """A place for each format of weights."""
    arms = list(looks)
    x = specs.Axis("weights of the layers", False, (-0.5, len(panel.ticks) - 0.5), dict(enumerate(panel.ticks)))
    aside = {arm: 0.05 * (place - (len(arms) - 1) / 2) for place, arm in enumerate(arms)}
    records = [{**_record(mark), "x": mark.x + aside[mark.arm]} for mark in panel.marks[""]]
    return {"": _speedups(panel, looks, x, records)}


DECODING = "times as fast as standard, decoding"


def _speedups(panel: Panel, looks: Looks, x: specs.Axis, records: list[dict[str, Any]]) -> Spec:
    """Points are measured, lines the model's."""
    numbers: dict[str, specs.Records] = {"lines": _lines(panel), "points": records, "whiskers": specs.whiskers(records)}
    return specs.curves(x, specs.speedup_axis(DECODING, heights(panel)), looks, numbers, base=True)


def _distributions(panel: Panel, looks: Looks) -> Charts:
    """The share of requests against the time they took at most."""
    found: Charts = {}
    for name, marks in panel.marks.items():
        if marks:
            low, high = min(mark.x for mark in marks), max(mark.x for mark in marks)
            x = specs.Axis(f"{name}, ms", log=high > 8 * low > 0)
            y = specs.Axis("% of tokens" if name == "ITL" else "% of requests", reach=(0, 102))
            lines = [{"arm": m.arm, "x": m.x, "y": m.y, "order": n} for n, m in enumerate(marks)]
            found[name] = specs.curves(x, y, looks, {"lines": lines, **_points([m for m in marks if m.front])})
    return found


def _load(panel: Panel, looks: Looks) -> Charts:
    found: Charts = {}
    for name, marks in panel.marks.items():
        if marks:
            ordered = sorted(marks, key=lambda mark: mark.x)
            lines = [{"arm": m.arm, "x": m.x, "y": m.y, "order": n} for n, m in enumerate(ordered)]
            x, y = (specs.Axis(title, reach=(0, 1.05 * most or 1.0)) for title, most in (
                (panel.keys["against"], max(m.x for m in marks)), (name, max(m.y for m in marks)),
            ))  # fmt: skip
            found[name] = specs.curves(x, y, looks, {"lines": lines, **_points(marks)})
    return found


def _training(panel: Panel, looks: Looks) -> Charts:
    """What a run's log has, against its tokens or steps."""
    found: Charts = {}
    for name, marks in panel.marks.items():
        if marks:
            lines = [{"arm": m.arm, "x": m.x, "y": m.y, "order": n} for n, m in enumerate(marks)]
            dots = [_record(mark) for mark in marks if mark.front]
            x, y = specs.Axis(panel.keys["against"]), specs.Axis(name)
            found[name] = specs.curves(x, y, looks, {"lines": lines, "points": dots})
    return found


_CHARTS = {
    "throughput": _throughput,
    "frontier": _frontier,
    "latency": _latency,
    "weights": _weights,
    "load-latency": _distributions,
    "load-rate": _load,
    "training": _training,
}


def _record(mark: Mark) -> dict[str, Any]:
    spread = {} if mark.low is None or mark.high is None else {"low": mark.low, "high": mark.high}
    return {"arm": mark.arm, "x": mark.x, "y": mark.y, **spread, "title": mark.title, "tips": mark.tips}


def _points(marks: Sequence[Mark]) -> dict[str, list[dict[str, Any]]]:
    records = [_record(mark) for mark in marks]
    return {"points": records, "whiskers": [dict(record) for record in specs.whiskers(records)]}


def _lines(panel: Panel) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "x": x, "y": y, "order": n}
        for arm, points in panel.curves.items()
        for n, (x, y) in enumerate(points)
    ]


def timelines(lane: Lanes) -> Charts:
    """A rank's steps below each other, by how many of their layers are shown."""
    most = max(step.layers for step in lane.steps)
    counts = sorted({min(count, most) for count in (SHOWN, 4 * SHOWN)})
    names = {count: f"all {most}" if count == most else f"first {count}" for count in counts}
    return {names[count]: timeline(lane.steps, count) for count in counts}


def facts_of(lane: Lanes) -> str:
    """Where the steps come from, and which of these facts are missing in their lines."""
    wanted = {"chip": "chip", "mode": "mode", "link_kind": "link kind", "time": "date", "commit": "commit"}
    missing = [name for key, name in wanted.items() if key not in lane.facts]
    return joined(lane.source, *lane.facts.values(), f"unknown: {', '.join(missing)}" if missing else "")


def timeline_title(lane: Lanes) -> str:
    """Of the picture."""
    most = max(step.layers for step in lane.steps)
    layers = f"All {most} layers" if most <= SHOWN else f"First {SHOWN} of {most} layers (figures: of all)"
    return joined(f"{layers} of a step, rank {lane.rank}", facts_of(lane))
