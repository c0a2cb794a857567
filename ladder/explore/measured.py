"""Measured points beside predictions: lines of the same model, chip, GPUs and weights. No torch here."""

from collections.abc import Iterable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ladder.charts.looks import TWO_LANES
from ladder.explore.choices import WIRINGS, Choice
from ladder.perf.chips import Chip
from ladder.perf.plan import BASE
from ladder.report.figures import ANY_LINK, by_link, grouped
from ladder.report.lines.read import load
from ladder.report.lines.rows import Row

NEAR = 1.5  # times as long a context is still the same
OWN = "measured.jsonl"  # lines of this repository's results that come with the package


class Measured:
    """Rows of `ladder bench` and one-rank lines: our own, and those of a user's files."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if row.layers == row.of_layers]

    @classmethod
    def of(cls, inputs: Sequence[Path]) -> "Measured":
        with as_file(files("ladder.explore") / OWN) as own:
            return cls(load([own, *inputs]).rows)

    def here(self, choice: Choice) -> dict[str, dict[str, Any]]:
        """By wiring: times as fast as standard in this very setting."""
        found: dict[str, dict[str, Any]] = {}
        for base, row in self._pairs(choice):
            if choice.tp == 1 or base.link == choice.link:
                found[_wiring(row)] = {"y": base.tpot_ms_p50 / row.tpot_ms_p50, **_about(row)}
        return found

    def speedups(self, choice: Choice) -> list[dict[str, Any]]:
        """Over standard on the same link, at the link's latency."""
        found = []
        for base, row in self._pairs(choice):
            if base.timing is not None and base.timing.alpha > 0:
                y = base.tpot_ms_p50 / row.tpot_ms_p50
                found.append({"wiring": _wiring(row), "alpha": base.timing.alpha * 1e6, "y": y, **_about(row)})
        return found

    def rates(self, choice: Choice) -> list[dict[str, Any]]:
        """Tokens/s for each user and GPU on the chosen link, of lines that have a prompt's time."""
        rows = [row for row in self._of(choice) if row.link == choice.link or row.arm in ANY_LINK]
        wanted = {
            (row.arm, row.tp, row.batch): row for row in rows if row.arm in WIRINGS and row.tokens_per_s is not None
        }
        points = [
            {"wiring": row.arm, "user": row.per_user, "gpu": row.per_gpu, "tp": row.tp} for row in wanted.values()
        ]
        return [{**point, **_about(row)} for point, row in zip(points, wanted.values(), strict=True)]

    def _pairs(self, choice: Choice) -> Iterable[tuple[Row, Row]]:
        """Standard and another wiring on one link, the faster of one lane and two."""
        rows = [row for row in self._of(choice) if row.batch == choice.batch and row.tp == choice.tp]
        for group in grouped(rows, lambda row: row.setting).values():
            for cells in by_link(group, lambda row: row.compared_on).values():
                base = next((row for row in cells if row.arm == BASE), None)
                fastest: dict[str, Row] = {}
                for row in cells:
                    name = _wiring(row)
                    if name not in fastest or row.tpot_ms_p50 < fastest[name].tpot_ms_p50:
                        fastest[name] = row
                for name, row in fastest.items():
                    if base is not None and name in WIRINGS and name != BASE:
                        yield base, row

    def _of(self, choice: Choice) -> list[Row]:
        chip, mean = Chip.parse(choice.chip), choice.prompt + choice.new / 2
        rows = [row for row in self._rows if row.size == choice.size and row.weights == choice.weights]
        rows = [row for row in rows if row.context is not None and mean / NEAR <= row.context <= mean * NEAR]
        return [row for row in rows if Chip.of(row.chip or "") == chip]


def _wiring(row: Row) -> str:
    return row.arm.removesuffix(TWO_LANES)


def _about(row: Row) -> dict[str, Any]:
    kind = "one rank" if row.mode == "one-rank" else "real ranks" if row.mode == "ranks" else "mode unknown"
    link = f", {row.link_kind} link" if row.link_kind else ""
    about = {"batch": row.batch, "ms": row.tpot_ms_p50, "context": row.context, "commit": row.commit}
    return {**about, "how": f"{kind}{link}"}
