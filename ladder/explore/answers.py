"""What the performance model says of a choice: figures, timelines and a recommendation; curves; the frontier.
No torch here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from ladder.errors import LadderError
from ladder.explore.advice import advice
from ladder.explore.choices import WIRINGS, Choice, Offer
from ladder.explore.measured import Measured
from ladder.perf.plan import BASE, SWEEPS, Deployment, known_link, plan, predict
from ladder.perf.timeline import Timeline, timeline

REMEMBERED = 50_000  # predictions that a server keeps
FRONTIER = ("standard", "ladder", "ladder-2", "parallel-1", "none")

Predict = Callable[[Deployment], dict[str, Any]]


class Answers:
    """Of one page: predictions are made once."""

    def __init__(self, offer: Offer, measured: Measured, alphas: Sequence[float] = tuple(SWEEPS["link"])) -> None:
        self._offer, self._measured, self._alphas = offer, measured, alphas
        self._predict: Predict = lru_cache(REMEMBERED)(predict)

    def of(self, choice: Choice) -> dict[str, Any]:
        """All that the page shows of a choice at once, or why it cannot be."""
        try:
            rows = plan([choice.deployment(wiring) for wiring in WIRINGS])
        except LadderError as error:
            return {"refused": str(error), "command": choice.command}
        measured = self._measured.here(choice)
        steps = [timeline(choice.deployment(wiring)) for wiring in WIRINGS]
        return {
            "command": choice.command,
            "rows": rows,
            "measured": measured,
            "advice": advice(dict(zip(WIRINGS, rows, strict=True)), measured.get("ladder", {}).get("y")),
            "timelines": [_packed(step) for step in steps],
            "remarks": list(dict.fromkeys(text for row in rows for text in (row["remark"], row["assumed"]) if text)),
        }

    def curve(self, choice: Choice) -> dict[str, Any]:
        """Speed-up against the link's latency, its bandwidth as it is; measured points; the chosen link's place."""
        found: dict[str, list[list[float]]] = {}
        for alpha in self._alphas:
            wanted = [replace(choice.deployment(wiring), alpha_us=alpha) for wiring in WIRINGS]
            rows = self._rows(wanted)
            for wiring, row in zip(WIRINGS, rows, strict=True):
                if row is not None and rows[0] is not None and wiring != BASE:
                    found.setdefault(wiring, []).append([alpha, rows[0]["tpot_ms"] / row["tpot_ms"]])
        chosen = None if choice.tp == 1 else known_link(choice.link)[0].alpha * 1e6
        measured = self._measured.speedups(choice)
        # `none` soon leaves all others behind
        heights = [y for wiring, points in found.items() if wiring != "none" for _, y in points]
        heights += [point["y"] for point in measured if point["wiring"] != "none"]
        reach = [min([0.96, *heights]) / 1.02, max([1.2, *heights]) * 1.08]
        return {"curves": found, "chosen": chosen, "measured": measured, "reach": reach}

    def frontier(self, choice: Choice) -> dict[str, Any]:
        """Tokens/s for each GPU against tokens/s for each user, over the batches and GPUs that are offered; with which
        of them no other beats both ways.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for wiring in FRONTIER:
            rows = []
            for tp in sorted(self._offer.tp):
                link = _alike(self._offer, choice, tp)
                if link is not None:
                    each = replace(choice, tp=tp, link=link)
                    rows += self._rows(replace(each, batch=batch).deployment(wiring) for batch in self._offer.batch)
            points = [_point(row) for row in rows if row is not None]
            found[wiring] = _front(points)
        return {"points": found, "measured": self._measured.rates(choice)}

    def _rows(self, deployments: Iterable[Deployment]) -> list[dict[str, Any] | None]:
        """Of each, or None where it cannot be."""
        found: list[dict[str, Any] | None] = []
        for deployment in deployments:
            try:
                found.append(self._predict(deployment))
            except LadderError:
                found.append(None)
        return found


def _packed(step: Timeline) -> dict[str, Any]:
    """Bars as lists: kind, name, lane, begin, end, after, since."""
    bars = [
        [bar.kind, bar.name, bar.lane, _short(bar.begin), _short(bar.end), bar.after, bar.since and _short(bar.since)]
        for bar in step.bars
    ]
    about = {"wiring": step.wiring, "lanes": step.lanes, "first": step.first, "layers": step.layers}
    return {**about, "us": _short(step.microseconds), "bars": bars}


def _short(value: float) -> float:
    return round(value, 2)


def _alike(offer: Offer, choice: Choice, tp: int) -> str | None:
    """The link of the same kind that joins so many GPUs, if there is one."""
    if tp in (1, choice.tp):
        return choice.link
    stem = choice.link.split("_tp")[0]
    return next((name for name in offer.links(choice.chip, tp) if name.split("_tp")[0] == stem), None)


def _point(row: dict[str, Any]) -> dict[str, Any]:
    return {"tp": row["tp"], "batch": row["batch"], "user": row["tokens_per_s_user"], "gpu": row["tokens_per_s_gpu"]}


def _front(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the fastest for a user on; `front`: no other point of the wiring beats it both ways."""
    best, found = -inf, []
    for point in sorted(points, key=lambda point: (-point["user"], -point["gpu"])):
        found.append({**point, "front": point["gpu"] > best})
        best = max(best, point["gpu"])
    return found
