"""The data of the figure of formats: speed-ups over standard as weights shrink, and their table. No torch here."""

from collections.abc import Sequence
from typing import Any

from ladder.config.quantization import NAMED
from ladder.report.figures import (
    BASE,
    Mark,
    Panel,
    by_link,
    decoding_speedup,
    facts,
    grouped,
    link_name,
    predicted_speedup,
    setting,
)
from ladder.report.lines.rows import Row

LINES = "Points: measured. Lines: predicted by the performance model (ladder plan)."
NO_LINES = "Points: measured. Nothing is predicted: the performance model does not know this chip, size or link."


def by_weights(rows: Sequence[Row]) -> list[Panel]:
    """Speed-up of decoding over standard with the same weights, format by format: a panel for each size, TP degree,
    batch and link that has several. `x` is the place of a format in `ticks`.
    """
    panels = []
    for (size, tp, batch, _), group in grouped(rows, lambda row: (row.size, row.tp, row.batch, row.machine)).items():
        found: dict[str | None, dict[str, list[Row]]] = {}
        for weights, own in sorted(grouped(group, lambda row: row.weights).items(), key=lambda one: _place(one[0])):
            for link, cells in by_link(own, lambda row: row.compared_on).items():
                if any(row.arm == BASE for row in cells):
                    found.setdefault(link, {})[weights] = cells
        for link, formats in found.items():
            if len(formats) > 1:
                keys = {"size": size, "TP": str(tp), "batch": str(batch)}
                panels.append(_panel(keys, link, formats))
    return panels


def _place(weights: str) -> tuple[int, str]:
    """Formats of the table in its order, then others."""
    return (list(NAMED).index(weights) if weights in NAMED else len(NAMED)), weights


def _panel(keys: dict[str, str], link: str | None, formats: dict[str, list[Row]]) -> Panel:
    marks: list[Mark] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for place, (weights, cells) in enumerate(formats.items()):
        base = next(row for row in cells if row.arm == BASE)
        for row in cells:
            if row.arm != BASE:
                marks.append(decoding_speedup(row, base, place, f"{row.arm} · {weights}"))
                if (predicted := predicted_speedup(row, base)) is not None:
                    curves.setdefault(row.arm, []).append((place, predicted))
    every = [row for cells in formats.values() for row in cells]
    keys |= {"link": link_name(link, every), "measured": setting(every)}
    lead = max((mark.y for mark in marks if mark.arm == "ladder"), default=0.0)
    remark = LINES if curves else NO_LINES
    return Panel(keys, facts(every), {"": marks}, remark, dict(curves), lead, list(formats))


def weights_table(panels: Sequence[Panel]) -> dict[str, Any]:
    """An arm's speed-up over standard in every format, measured and predicted."""
    formats = sorted({name for panel in panels for name in panel.ticks}, key=_place)
    heads = [(name, kind) for name in formats for kind in ("measured", "predicted")]
    given = ("size", "TP", "batch", "link", "measured")
    cells = []
    for panel in panels:
        for arm in dict.fromkeys(mark.arm for mark in panel.marks[""]):
            own: dict[tuple[str, str], float] = {}
            own |= {(panel.ticks[int(mark.x)], "measured"): mark.y for mark in panel.marks[""] if mark.arm == arm}
            own |= {(panel.ticks[int(x)], "predicted"): y for x, y in panel.curves.get(arm, ())}
            cells.append([arm, *(panel.keys[key] for key in given), *(own.get(head) for head in heads)])
    titles = ["arm", *given[:-1], "measured on", *(f"{name}, {kind}" for name, kind in heads)]
    columns = [{"title": title, "digits": None if n <= len(given) else 2} for n, title in enumerate(titles)]
    return {"columns": columns, "cells": cells}
