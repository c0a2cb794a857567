"""The data of the figures: pictures and page draw the same numbers. No torch here."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ladder.charts.looks import TIMES, figure
from ladder.comm.link import Link
from ladder.errors import LadderError
from ladder.perf.predict import tpot_ms
from ladder.report.lines.rows import Row

BASE = "standard"  # what speed-ups are over
ANY_LINK = ("standard-fused", "none")  # arms that have their own link, or none: they join the rows of every link
TOKENS, SPEEDUP = "tokens/s", "speed-up over standard"
CURVE = 41  # points of a curve

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Mark:
    """One number of one arm: at `x`, with the spread of its repetitions and its tooltip."""

    arm: str
    x: float
    y: float
    low: float | None
    high: float | None
    title: str
    tips: Sequence[tuple[str, str]]
    front: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture: which choices lead to it, what was measured, where and when."""

    keys: dict[str, str]
    facts: str
    marks: Mapping[str, Sequence[Mark]]
    remark: str = ""
    curves: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # the model's, by arm
    lead: float = 0.0  # ladder's over standard: of panels that show as much, the page opens the one with most
    ticks: Sequence[str] = ()  # names of the places 0, 1, ... along `x`, where it has names
    rank: str = "GPU"  # what one of several is: a GPU, or a rank on a CPU

    @property
    def arms(self) -> set[str]:
        return {mark.arm for marks in self.marks.values() for mark in marks}


def throughput(rows: Sequence[Row]) -> list[Panel]:
    """Tokens per second and speed-up over standard, by batch and arm: a panel for each size, TP degree and link."""
    panels = []
    for (size, tp, _), group in grouped(rows, lambda row: (row.size, row.tp, row.setting)).items():
        for link, cells in by_link(group, lambda row: row.compared_on).items():
            bases = {row.batch: row for row in cells if row.arm == BASE}
            speedups = [_speedup(row, bases[row.batch]) for row in cells if row.batch in bases]
            keys = {"size": size, "TP": str(tp), **_format(rows, cells), "link": link_name(link, cells)}
            keys["measured"] = setting(cells)
            remark = "" if bases else f"No row of the arm {BASE} here, so no speed-up."
            marks = {TOKENS: [_total(row, bases.get(row.batch)) for row in cells], SPEEDUP: speedups}
            lead = max((mark.y for mark in speedups if mark.arm == "ladder"), default=0.0)
            panels.append(Panel(keys, facts(cells), marks, remark, lead=lead))
    return panels


def frontier(rows: Sequence[Row]) -> list[Panel]:
    """Tokens/s/GPU against tokens/s/user over batch and TP. Links named for a TP degree are one here."""
    panels = []
    for (size, _), group in grouped(rows, lambda row: (row.size, row.setting)).items():
        for link, cells in by_link(group, lambda row: re.sub(r"_tp\d+$", "", row.compared_on or "") or None).items():
            if len({(row.tp, row.batch) for row in cells}) < 2:
                continue  # single points make no frontier
            marks = [mark for arm in grouped(cells, lambda row: row.arm).values() for mark in _front(arm)]
            keys = {"size": size, **_format(rows, cells), "link": link_name(link, cells), "measured": setting(cells)}
            best = {arm: max((mark.x for mark in marks if mark.arm == arm), default=0.0) for arm in (BASE, "ladder")}
            lead = best["ladder"] / best[BASE] if best[BASE] else 0.0
            panels.append(Panel(keys, facts(cells), {"": marks}, lead=lead, rank=rank_name(cells)))
    return panels


def latency(rows: Sequence[Row]) -> list[Panel]:
    """Speed-up of decoding over standard against a link's alpha, with the model's curve: one panel for each batch."""
    panels = []
    for (size, tp, batch, _), group in grouped(rows, lambda row: (row.size, row.tp, row.batch, row.setting)).items():
        marks, used = [], []
        for cells in by_link(group, lambda row: row.compared_on).values():
            base = next((row for row in cells if row.arm == BASE and row.timing is not None), None)
            if base is not None:
                used.append(base)
                marks += [_against_alpha(row, base) for row in cells if row.arm != BASE]
        if marks:
            curves = _curves(used, [row for row in group if row.arm in {mark.arm for mark in marks}])
            chip = used[0].chip or "a chip without a name"
            remark = (
                "Lines: the performance model (ladder plan), its bandwidth taken between those of the links measured."
                if curves
                else f"No curve: the performance model does not know {chip}, or not this size."
            )
            keys = {"size": size, "TP": str(tp), "batch": str(batch), **_format(rows, group)}
            keys["measured"] = setting(group)
            lead = max((mark.y for mark in marks if mark.arm == "ladder"), default=0.0)
            panels.append(Panel(keys, facts(group), {"": marks}, remark, curves, lead))
    return panels


def heights(panel: Panel) -> tuple[float, float]:
    """From where to where the axis of a latency panel reaches: `none` soon leaves all others behind."""
    values = [value for mark in panel.marks[""] for value in (mark.y, mark.low or mark.y, mark.high or mark.y)]
    values += [y for arm, curve in panel.curves.items() if arm != "none" for _, y in curve]
    return min(0.95, *values) / 1.03, max(1.2, *values) * 1.06


def grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    """Rows by key, in order."""
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def predicted_ms(row: Row, link: Link | None = None) -> float | None:
    """The performance model's time of a token, where it knows the chip, the size and the link."""
    link = link or row.timing or (Link(0.0, math.inf) if row.arm == "none" else None)
    context = row.context
    if context is None and row.prompt is not None:
        context = row.prompt + (row.new or 0) // 2
    if link is None or context is None or row.chip is None:
        return None
    try:
        return tpot_ms(row.size, row.wiring, row.tp, row.batch, context, link, row.chip, row.layers, row.weights)
    except LadderError:  # a size or a format that is not in the table
        return None


def setting(rows: Sequence[Row]) -> str:
    """Chip, mode and shape of the run, as one line."""
    row = rows[0]
    kind = {"emulated": "emulated link", "real": "real link"}.get(row.link_kind or "", "kind of link unknown")
    shape = f"prompt {row.prompt} + {row.new} new" if row.prompt and row.new else ""
    context = "" if shape or row.context is None else f"context {row.context}"
    part = f"{row.layers} of {row.of_layers} layers" if row.layers != row.of_layers else ""
    mode = "mode unknown" if row.mode is None else "real ranks" if row.mode == "ranks" else row.mode
    weights = f"weights {row.weights}" if {row.weights for row in rows} == {row.weights} != {"bf16"} else ""
    return joined(row.chip or "chip unknown", mode, kind, row.dtype or "", weights, shape, context, part)


def rank_name(rows: Sequence[Row]) -> str:
    """What one of several ranks is computed on: CPUs share a machine."""
    return "GPU" if all(row.chip is None or re.search("NVIDIA|AMD Instinct", row.chip) for row in rows) else "rank"


def facts(rows: Sequence[Row]) -> str:
    """Where a figure comes from: setting, commits, dates."""
    commits = ", ".join(sorted({row.commit for row in rows if row.commit})) or "unknown"
    dates = sorted({row.time[:10] for row in rows if row.time})
    span = "date unknown" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return joined(setting(rows), f"commit {commits}", span)


def joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def link_name(link: str | None, rows: Sequence[Row]) -> str:
    """A link with its latency, where all its rows have one; a link without a name is its times already."""
    alphas = {row.link_alpha_us for row in rows if row.arm not in ANY_LINK}
    alpha = alphas.pop() if len(alphas) == 1 else None
    return (link or "as built in") + (f" ({alpha:g} µs)" if alpha and "," not in (link or "") else "")


def _format(rows: Sequence[Row], cells: Sequence[Row]) -> dict[str, str]:
    """The format of a panel's weights, a choice where any row is of quantized ones."""
    return {"weights": cells[0].weights} if any(row.weights != "bf16" for row in rows) else {}


def by_link(rows: Sequence[Row], name: Callable[[Row], str | None]) -> dict[str | None, list[Row]]:
    """The newest row of each cell by link; arms that have their own link join all others."""
    anywhere = [row for row in rows if row.arm in ANY_LINK]
    bound = [row for row in rows if row.arm not in ANY_LINK] or anywhere
    found = {}
    for link, own in grouped(bound, name).items():
        joining = [row for row in anywhere if name(row) != link] + [row for row in anywhere if name(row) == link]
        found[link] = list({(row.arm, row.tp, row.batch, _distinct(row)): row for row in [*joining, *own]}.values())
    return found


def _distinct(row: Row) -> str | None:
    """An arm of any link counts once; other rows are distinguished by the full name of their link."""
    return None if row.arm in ANY_LINK else row.link


def _total(row: Row, base: Row | None) -> Mark:
    low, high = row.total_spread or (None, None)
    return _mark(row, row.batch, row.total, low, high, base)


def _speedup(row: Row, base: Row) -> Mark:
    low, high = (None, None) if row.total_spread is None else (s / base.total for s in row.total_spread)
    return _mark(row, row.batch, row.total / base.total, low, high, base)


def _against_alpha(row: Row, base: Row) -> Mark:
    assert base.timing is not None
    return decoding_speedup(row, base, base.timing.alpha * 1e6)


def decoding_speedup(row: Row, base: Row, x: float, title: str | None = None) -> Mark:
    """How much faster than `base` it decodes, measured, with the model's beside it."""
    ratio = base.tpot_ms_p50 / row.tpot_ms_p50
    low, high = (None, None) if row.spread is None else (s * ratio for s in row.spread)
    tips = [("decoding speed-up", f"{ratio:.2f}{TIMES}")]
    if (predicted := predicted_speedup(row, base)) is not None:
        tips.append(("the model's", f"{predicted:.2f}{TIMES}"))
    mark = _mark(row, x, ratio, low, high, None, [*tips, ("over standard on", base.link or "-")])
    return mark if title is None else replace(mark, title=title)


def predicted_speedup(row: Row, base: Row) -> float | None:
    """The same as the performance model has it, where it knows both."""
    mine, its = predicted_ms(row, None if row.arm in ANY_LINK else base.timing), predicted_ms(base)
    return its / mine if mine and its else None


def _front(rows: Sequence[Row]) -> list[Mark]:
    """An arm's points from left to right; those that no other point beats both ways are its frontier."""
    marks, best = [], -math.inf
    for row in sorted(rows, key=lambda row: (-row.per_user, -row.per_gpu)):
        front = row.per_gpu > best
        best = max(best, row.per_gpu)
        tips = [("tokens/s/user", figure(row.per_user)), (f"tokens/s/{rank_name([row])}", figure(row.per_gpu))]
        marks.append(_mark(row, row.per_user, row.per_gpu, None, None, None, tips, front))
    return marks[::-1]


def _curves(bases: Sequence[Row], rows: Sequence[Row]) -> dict[str, Sequence[tuple[float, float]]]:
    """Each arm's speed-up as the model has it, from somewhat below the shortest latency to above the longest."""
    betas: dict[float, float] = {}
    for row in bases:
        if row.timing is not None and row.timing.alpha > 0:
            betas[row.timing.alpha] = row.timing.beta
    if not betas:
        return {}
    first, last = min(betas) / 1.5, max(betas) * 1.5
    alphas = [first * (last / first) ** (n / (CURVE - 1)) for n in range(CURVE)]
    links = [Link(alpha, _between(betas, alpha)) for alpha in alphas]
    base = [predicted_ms(bases[0], link) for link in links]
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for arm, own in grouped(rows, lambda row: row.arm).items():
        times = [predicted_ms(own[0], None if arm in ANY_LINK else link) for link in links]
        points = [(alpha * 1e6, its / ms) for alpha, its, ms in zip(alphas, base, times, strict=True) if its and ms]
        if points:
            curves[arm] = points
    return curves


def _between(known: dict[float, float], at: float) -> float:
    """Between the two nearest known values, on logarithmic scales; beyond the ends the end's."""
    below = max((x for x in known if x <= at), default=min(known))
    above = min((x for x in known if x >= at), default=max(known))
    if below == above or math.inf in (known[below], known[above]):
        return known[below]
    share = math.log(at / below) / math.log(above / below)
    return float(known[below] ** (1 - share) * known[above] ** share)


def _mark(
    row: Row,
    x: float,
    y: float,
    low: float | None,
    high: float | None,
    base: Row | None,
    tips: Sequence[tuple[str, str]] = (),
    front: bool = False,
) -> Mark:
    title = f"{row.arm} · TP {row.tp} · batch {row.batch}"
    shown = [*tips] or [("tokens/s", figure(row.total))]
    if base is not None:
        shown.append(("over standard", f"{row.total / base.total:.2f}{TIMES}"))
    quartiles = "" if not row.tpot_ms_q1 or not row.tpot_ms_q3 else f" ({row.tpot_ms_q1:.2f} to {row.tpot_ms_q3:.2f})"
    shown.append(("ms per token", f"{row.tpot_ms_p50:.2f}{quartiles}"))
    model = predicted_ms(row)
    if model is not None:
        shown.append(("the model's", f"{model:.2f}"))
    if row.ttft_ms is not None:
        shown.append(("first token", f"{figure(row.ttft_ms)} ms"))
    if row.hidden is not None:
        shown.append(("communication hidden", f"{row.hidden:.0%}"))
    if row.arm in ANY_LINK or row.wiring != row.arm:
        shown.append(("wiring, link", joined(row.wiring, row.link or "as built in")))
    return Mark(row.arm, x, y, low, high, title, shown, front)
