"""The report's pictures as files, for documents. The page draws the same numbers by itself."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder.bench.trace.lanes import draw, first_layers
from ladder.plotting import load_pyplot, plot_style
from ladder.report.figures import SPEEDUP, TOKENS, Mark, Panel, heights, joined
from ladder.report.looks import TIMES, Look, figure
from ladder.report.rows import Lanes

MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "down": "v",
    "diamond": "D",
    "pentagon": "p",
    "cross": "X",
}
SHOWN = 6  # layers in the timeline
LABELLED = 32  # bars in a panel that still have room for their numbers
SPEEDUP_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
_INK = "#444444"
_PREFIX = {"TP": "tp", "batch": "batch"}

Drawing = Callable[[Any, Panel, dict[str, Look]], Any]


def pictures(
    figures: Mapping[str, Sequence[Panel]],
    drawings: Mapping[str, Drawing],
    lanes: Sequence[Lanes],
    looks: dict[str, Look],
    out: Path,
) -> list[Path]:
    """One file for each panel and each rank's timeline; their names are made of their choices."""
    pyplot = load_pyplot()
    taken: set[str] = set()
    written = []
    with plot_style(pyplot, **{"hatch.linewidth": 1.0}):
        for name, panels in figures.items():
            for panel in panels:
                path = out / _name([name, *(f"{_PREFIX.get(key, '')}{value}" for key, value in choices(panel))], taken)
                drawn = drawings[name](pyplot, panel, looks)
                drawn.savefig(path, dpi=100)
                pyplot.close(drawn)
                written.append(path)
        for lane in lanes:
            path = out / _name(["timeline", *(["rank", str(lane.rank)] if lane.rank else [])], taken)
            draw([first_layers(step, SHOWN) for step in lane.steps], timeline_title(lane), path)
            written.append(path)
    return written


def choices(panel: Panel) -> list[tuple[str, str]]:
    """What tells a panel from the others; the setting, which is long, stands below it."""
    return [(key, value) for key, value in panel.keys.items() if key != "measured"]


def timeline_title(lane: Lanes) -> str:
    """Where the steps come from, and which of these facts are missing in their lines."""
    wanted = {"chip": "chip", "mode": "mode", "link_kind": "link kind", "time": "date", "commit": "commit"}
    missing = [name for key, name in wanted.items() if key not in lane.facts]
    unknown = f"unknown: {', '.join(missing)}" if missing else ""
    return joined(f"First {SHOWN} layers of a step, rank {lane.rank}", lane.source, *lane.facts.values(), unknown)


def _name(parts: Iterable[str], taken: set[str]) -> str:
    """A file name of small letters, digits and hyphens that is not taken yet."""
    stem = "-".join(re.sub(r"[^a-z0-9._]+", "-", re.sub(r" \(.*\)$", "", part).lower()).strip("-.") for part in parts)
    stem, name, count = stem[:80], f"{stem[:80]}.png", 1
    while name in taken:
        count += 1
        name = f"{stem}-{count}.png"
    taken.add(name)
    return name


def _throughput(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    """Above tokens/s, each batch on a scale of its own; below speed-ups, all on one."""
    batches = sorted({int(mark.x) for marks in panel.marks.values() for mark in marks})
    metrics = [metric for metric in (TOKENS, SPEEDUP) if panel.marks[metric]]
    arms = [arm for arm in looks if arm in panel.arms]
    width = max(8.0, min(16.0, 1.2 + 0.45 * len(batches) * (len(arms) + 1)))
    size = (width, 1.4 + 2.5 * len(metrics))
    drawn, axes = pyplot.subplots(len(metrics), len(batches), figsize=size, squeeze=False, layout="constrained")
    small = len(arms) * len(batches) > LABELLED
    for line, metric in zip(axes, metrics, strict=True):
        tallest = max(mark.high or mark.y for mark in panel.marks[metric])
        for place, (axis, batch) in enumerate(zip(line, batches, strict=True)):
            marks = {mark.arm: mark for mark in panel.marks[metric] if mark.x == batch}
            middle = (len(arms) - len(marks)) / 2  # fewer bars stand in the middle
            for at, arm in enumerate(arm for arm in arms if arm in marks):
                _bar(axis, at + middle, marks[arm], looks[arm], metric, small)
            axis.set_xticks([])
            axis.set_xlim(-0.7, len(arms) - 0.3)
            if metric == metrics[0]:
                axis.set_title(f"batch {batch}", fontsize=11)
            axis.tick_params(axis="y", labelsize=9)
            if metric == SPEEDUP:
                axis.set_ylim(0, 1.15 * tallest)
                axis.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
                axis.tick_params(labelleft=place == 0)
            else:
                axis.set_ylim(0, 1.15 * max(mark.high or mark.y for mark in marks.values()))
            if place == 0:
                axis.set_ylabel(metric)
    return finish(pyplot, drawn, panel, arms, looks, "Throughput by wiring", bars=True)


def _bar(axis: Any, at: float, mark: Mark, look: Look, metric: str, small: bool) -> None:
    style = _bar_style(look)
    axis.bar(at, mark.y, 0.82, **style)
    top = mark.y
    if mark.low is not None and mark.high is not None:
        below, above = max(0.0, mark.y - mark.low), max(0.0, mark.high - mark.y)
        axis.errorbar(at, mark.y, yerr=[[below], [above]], color=_INK, linewidth=1, capsize=2.5)
        top += above
    text = f"{mark.y:.2f}" if metric == SPEEDUP else figure(mark.y)
    axis.annotate(text, (at, top), (0, 2), textcoords="offset points", ha="center", fontsize=7.5 if small else 9)


def _bar_style(look: Look) -> dict[str, Any]:
    if look.fill == "solid":
        return {"color": look.colour}
    hatch = "////" if look.fill == "hatched" else None
    return {"facecolor": "white", "edgecolor": look.colour, "hatch": hatch, "linewidth": 1.3, "linestyle": "-"}


def _frontier(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    drawn, axis = pyplot.subplots(figsize=(10, 6.4), layout="constrained")
    marks = panel.marks[""]
    arms = [arm for arm in looks if arm in panel.arms]
    for arm in arms:
        own, look = [mark for mark in marks if mark.arm == arm], looks[arm]
        front = [mark for mark in own if mark.front]
        axis.plot([m.x for m in front], [m.y for m in front], dash(look), color=look.colour, linewidth=1.6, zorder=2)
        axis.scatter([m.x for m in own], [m.y for m in own], **dot(look), zorder=3)
    low, high = min(mark.y for mark in marks), max(mark.y for mark in marks)
    if high > 8 * low:
        axis.set_yscale("log")
        log_ticks(axis, "y", low / 1.25, high * 1.25)
    _point_names(axis, panel)
    axis.margins(x=0.08)
    axis.grid(alpha=0.25)
    axis.set_xlabel("tokens/s for each user  (faster answers →)")
    axis.set_ylabel("tokens/s for each GPU  (cheaper tokens →)")
    return finish(pyplot, drawn, panel, arms, looks, "Pareto frontier over batch and TP")


def _point_names(axis: Any, panel: Panel) -> None:
    """TP and batch beside the rightmost point of each: all arms' points of a batch lie side by side."""
    rightmost: dict[str, Mark] = {}
    for mark in panel.marks[""]:
        cell = mark.title.removeprefix(f"{mark.arm} · ")
        if cell not in rightmost or mark.x > rightmost[cell].x:
            rightmost[cell] = mark
    for cell, mark in rightmost.items():
        axis.annotate(cell, (mark.x, mark.y), (7, 5), textcoords="offset points", fontsize=9, color=_INK)


def dash(look: Look) -> str:
    """How an arm's line is drawn."""
    return "-" if look.fill == "solid" else "--"


def dot(look: Look) -> dict[str, Any]:
    """How an arm's points are drawn."""
    face = "white" if look.fill != "solid" else look.colour
    return {"marker": MARKERS[look.marker], "s": 46, "facecolors": face, "edgecolors": look.colour, "linewidths": 1.4}


def _latency(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    drawn, axis = pyplot.subplots(figsize=(10, 6.0), layout="constrained")
    marks = panel.marks[""]
    arms = [arm for arm in looks if arm in panel.arms]
    above = [mark.x for mark in marks if mark.x > 0] or [1.0]
    low, high = min(above) / 1.5, max(above) * 1.5
    nought = low / 1.6 if any(mark.x <= 0 for mark in marks) else None  # where a logarithmic axis shows 0
    axis.set_xscale("log")
    axis.set_yscale("log")
    for place, arm in enumerate(arms):
        look = looks[arm]
        aside = 1.014 ** (place - (len(arms) - 1) / 2)  # points of one link stand side by side
        curve = panel.curves.get(arm, ())
        axis.plot([x for x, _ in curve], [y for _, y in curve], dash(look), color=look.colour, linewidth=1.6, zorder=2)
        own = [(aside * (mark.x if mark.x > 0 else nought or low), mark) for mark in marks if mark.arm == arm]
        for x, mark in own:
            if mark.low is not None and mark.high is not None:
                axis.plot([x, x], [mark.low, mark.high], color=look.colour, linewidth=1.2, zorder=2)
        axis.scatter([x for x, _ in own], [mark.y for _, mark in own], **dot(look), zorder=3)
    axis.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
    log_ticks(axis, "x", low, high, nought)
    _speedup_ticks(axis, *heights(panel))
    axis.grid(alpha=0.25)
    axis.set_xlabel("latency of the link, alpha (µs)")
    axis.set_ylabel("times as fast as standard, decoding")
    return finish(pyplot, drawn, panel, arms, looks, "Speed-up against link latency (points: measured)")


def _weights(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    """A place for each format of weights: points are measured, lines predicted."""
    drawn, axis = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    arms = [arm for arm in looks if arm in panel.arms]
    for number, arm in enumerate(arms):
        look, aside = looks[arm], 0.05 * (number - (len(arms) - 1) / 2)
        curve = panel.curves.get(arm, ())
        axis.plot([x for x, _ in curve], [y for _, y in curve], dash(look), color=look.colour, linewidth=1.6, zorder=2)
        for mark in (mark for mark in panel.marks[""] if mark.arm == arm):
            at = mark.x + aside
            if mark.low is not None and mark.high is not None:
                axis.plot([at, at], [mark.low, mark.high], color=look.colour, linewidth=1.2, zorder=2)
            axis.scatter([at], [mark.y], **dot(look), zorder=3)
    axis.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    axis.set_xlim(-0.5, len(panel.ticks) - 0.5)
    axis.set_yscale("log")
    _speedup_ticks(axis, *heights(panel))
    axis.grid(alpha=0.25)
    axis.set_xlabel("weights of the layers")
    axis.set_ylabel("times as fast as standard, decoding")
    return finish(pyplot, drawn, panel, arms, looks, "Speed-up by weight format")


def _speedup_ticks(axis: Any, low: float, high: float) -> None:
    ticks = [tick for tick in SPEEDUP_TICKS if low <= tick <= high]
    axis.set_ylim(low, high)
    axis.set_yticks(ticks, [f"{tick:g}{TIMES}" for tick in ticks])
    axis.set_yticks([], minor=True)


def log_ticks(axis: Any, which: str, low: float, high: float, nought: float | None = None) -> None:
    """1, 2, 5, 10, ... as plain numbers, and 0 at a place of its own."""
    ticks = [digit * 10**power for power in range(-3, 9) for digit in (1, 2, 5) if low <= digit * 10**power <= high]
    places, names = [float(tick) for tick in ticks], [f"{tick:g}" for tick in ticks]
    if nought is not None:
        places, names = [nought, *places], ["0", *names]
    getattr(axis, f"set_{which}lim")((nought / 1.3 if nought else low), high)
    getattr(axis, f"set_{which}ticks")(places, names)
    getattr(axis, f"set_{which}ticks")([], minor=True)


def finish(
    pyplot: Any, drawn: Any, panel: Panel, arms: Sequence[str], looks: dict[str, Look], title: str, bars: bool = False
) -> Any:
    """Title and legend above, and below where and how it was measured; each at its distance in inches."""
    where = joined(*(f"{key} {value}" if key in _PREFIX else value for key, value in choices(panel)))
    width, height = drawn.get_size_inches()
    lines = textwrap.wrap(panel.facts, int(15 * width)) + textwrap.wrap(panel.remark, int(15 * width))
    columns = max(1, int(width / (0.6 + 0.085 * max(len(arm) for arm in arms))))
    head, foot = 0.42 + 0.25 * -(-len(arms) // columns), 0.12 + 0.16 * len(lines)
    drawn.get_layout_engine().set(rect=(0, foot / height, 1, 1 - (head + foot) / height))
    drawn.text(0.1 / width, 1 - 0.1 / height, f"{title}: {where}", fontsize=13, fontweight="bold", va="top")
    drawn.text(0.1 / width, 0.06 / height, "\n".join(lines), fontsize=9, color=_INK, va="bottom")
    if bars:
        handles = [pyplot.Rectangle((0, 0), 1, 1, **_bar_style(looks[arm])) for arm in arms]
    else:
        handles = [_line(pyplot, looks[arm]) for arm in arms]
    style = {"ncols": columns, "frameon": False, "fontsize": 11, "columnspacing": 1.5, "borderaxespad": 0.0}
    place = (0.1 / width, 1 - 0.36 / height)
    drawn.legend(handles, [_cut(arm) for arm in arms], loc="upper left", bbox_to_anchor=place, **style).set_in_layout(
        False
    )
    return drawn


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _line(pyplot: Any, look: Look) -> Any:
    face = "white" if look.fill != "solid" else look.colour
    shape = {"marker": MARKERS[look.marker], "markerfacecolor": face, "markersize": 7}
    return pyplot.Line2D([], [], color=look.colour, linestyle=dash(look), **shape)


DRAWINGS: dict[str, Drawing] = {
    "throughput": _throughput,
    "frontier": _frontier,
    "latency": _latency,
    "weights": _weights,
}
