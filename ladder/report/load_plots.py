"""The pictures of `ladder load`'s runs."""

from typing import Any

from ladder.report.figures import Panel
from ladder.report.looks import Look
from ladder.report.plots import Drawing, dash, dot, finish, log_ticks

COLUMNS = 2


def _distributions(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    """One small plot for each latency: the share of requests against the time they took at most."""
    drawn, shown = _grid(pyplot, panel)
    arms = [arm for arm in looks if arm in panel.arms]
    for axis, name in shown:
        marks = panel.marks[name]
        low, high = min(mark.x for mark in marks), max(mark.x for mark in marks)
        _lines(axis, panel, name, arms, looks, points_in_front=True)
        if high > 8 * low > 0:
            axis.set_xscale("log")
            log_ticks(axis, "x", low / 1.1, high * 1.1)
        else:
            axis.set_xlim(0, high * 1.05 or 1)
        axis.set_ylim(0, 102)
        axis.set_xlabel(f"{name}, ms")
        axis.set_ylabel("% of tokens" if name == "ITL" else "% of requests")
    return finish(pyplot, drawn, panel, arms, looks, "Latency of requests (points: p50, p90, p99)")


def _against_rate(pyplot: Any, panel: Panel, looks: dict[str, Look]) -> Any:
    drawn, shown = _grid(pyplot, panel)
    arms = [arm for arm in looks if arm in panel.arms]
    for axis, name in shown:
        _lines(axis, panel, name, arms, looks, points_in_front=False)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.08 * max(mark.y for mark in panel.marks[name]) or 1)
        axis.set_xlabel(panel.keys["against"])
        axis.set_ylabel(name)
    return finish(pyplot, drawn, panel, arms, looks, "Load")


def _grid(pyplot: Any, panel: Panel) -> tuple[Any, list[tuple[Any, str]]]:
    """An axis for each name that has marks."""
    names = [name for name, marks in panel.marks.items() if marks]
    rows = -(-len(names) // COLUMNS)
    drawn, axes = pyplot.subplots(rows, COLUMNS, figsize=(11, 1.2 + 2.9 * rows), squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for axis in flat[len(names) :]:
        axis.set_visible(False)
    for axis in flat:
        axis.grid(alpha=0.25)
    return drawn, list(zip(flat, names, strict=False))


def _lines(axis: Any, panel: Panel, name: str, arms: list[str], looks: dict[str, Look], points_in_front: bool) -> None:
    for arm in arms:
        look = looks[arm]
        own = sorted((mark.x, mark.y, mark.front) for mark in panel.marks[name] if mark.arm == arm)
        points = [(x, y) for x, y, front in own if front or not points_in_front]
        axis.plot(
            [x for x, _, _ in own], [y for _, y, _ in own], dash(look), color=look.colour, linewidth=1.6, zorder=2
        )
        axis.scatter([x for x, _ in points], [y for _, y in points], **dot(look), zorder=3)


LOAD_DRAWINGS: dict[str, Drawing] = {"load-latency": _distributions, "load-rate": _against_rate}
