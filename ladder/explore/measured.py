"""Measured points beside predictions: lines of the same model, chip, GPUs and weights. No torch here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder.explore.choices import WIRINGS, Choice
from ladder.perf.chips import Chip
from ladder.perf.plan import BASE
from ladder.report.figures import ANY_LINK, by_link, grouped
from ladder.report.lines.read import load
from ladder.report.lines.rows import Row

NEAR = 1.5  # times as long a context is still the same


class Measured:
    """Rows of `ladder bench` and one-rank lines."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if row.layers == row.of_layers]

    @classmethod
    def of(cls, files: Sequence[Path]) -> "Measured":
        return cls(load(files).rows if files else [])

    def speedups(self, choice: Choice) -> list[dict[str, Any]]:
        """Over standard on the same link, at the link's latency."""
        rows = [row for row in self._of(choice) if row.batch == choice.batch and row.tp == choice.tp]
        found = []
        for group in grouped(rows, lambda row: row.setting).values():
            for cells in by_link(group, lambda row: row.compared_on).values():
                base = next((row for row in cells if row.arm == BASE and row.timing is not None), None)
                if base is None or base.timing is None:
                    continue
                for row in cells:
                    if row.arm in WIRINGS and row.arm != BASE:
                        ratio = base.tpot_ms_p50 / row.tpot_ms_p50
                        found.append({"wiring": row.arm, "alpha": base.timing.alpha * 1e6, "y": ratio, **_about(row)})
        return found

    def rates(self, choice: Choice) -> list[dict[str, Any]]:
        """Tokens/s for each user and GPU on the chosen link."""
        rows = [row for row in self._of(choice) if row.link == choice.link or row.arm in ANY_LINK]
        wanted = [row for row in rows if row.arm in WIRINGS and row.tokens_per_s is not None]
        return [
            {"wiring": row.arm, "user": row.per_user, "gpu": row.per_gpu, "tp": row.tp, **_about(row)} for row in wanted
        ]

    def _of(self, choice: Choice) -> list[Row]:
        chip = Chip.parse(choice.chip)
        mean = choice.prompt + choice.new / 2
        return [
            row
            for row in self._rows
            if row.size == choice.size
            and row.weights == choice.weights
            and (Chip.of(row.chip or "") == chip)
            and row.context is not None
            and mean / NEAR <= row.context <= mean * NEAR
        ]


def _about(row: Row) -> dict[str, Any]:
    kind = "one rank, " if row.mode == "one-rank" else ""
    link = f"{row.link_kind} link" if row.link_kind else "link unknown"
    return {
        "batch": row.batch,
        "ms": row.tpot_ms_p50,
        "context": row.context,
        "how": f"{kind}{link}",
        "commit": row.commit,
    }
