"""Figures from the lines of `results/`, and tables of them as Markdown."""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent.parent.parent / "results"
Line = dict[str, Any]
Table = Callable[[], str]


@cache
def lines(name: str) -> list[Line]:
    """Every line of a file of `results/`, named without its ending."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def those(name: str, **wanted: Any) -> list[Line]:
    """The lines that have all these values; None: that lack the key, or have null."""
    found = [line for line in lines(name) if all(line.get(key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no line of {name} has {wanted}")
    return found


def one(name: str, **wanted: Any) -> Line:
    """The only such line."""
    found = those(name, **wanted)
    if len(found) > 1:
        raise LookupError(f"{len(found)} lines of {name} have {wanted}")
    return found[0]


def least(name: str, key: str, **wanted: Any) -> float:
    return float(min(line[key] for line in those(name, **wanted)))


@cache
def published() -> list[Line]:
    """The runs of the paper's code."""
    with (RESULTS / "published/h100_70b_runs.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_ms(wiring: str, p2p: str, batch: int, leave_out: float | None = None) -> float:
    """Milliseconds per token at TP 8: the median of the runs, without those slower than `leave_out` times the
    fastest.
    """
    wanted = {"wiring": wiring, "p2p": p2p, "batch": str(batch), "tp": "8"}
    times = [float(run["decode_s"]) for run in published() if all(run[key] == value for key, value in wanted.items())]
    return 1000 * median(t for t in times if leave_out is None or t <= leave_out * min(times)) / 512


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As it stands in a page, without an end of line behind it."""
    drawn = [f"| {' | '.join(cells)} |".replace("  ", " ") for cells in (header, *rows)]
    return "\n".join([drawn[0], "|" + "---|" * len(header), *drawn[1:]])


def fixed(value: float, digits: int) -> str:
    """Rounded as on paper: lines have decimal figures, and a half goes up."""
    return str(Decimal(str(round(value, 9))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def times(value: float) -> str:
    return f"{fixed(value, 2)}x"


def gain(slow: float, fast: float) -> str:
    """How much faster, in percent."""
    return f"+{fixed(100 * (slow / fast - 1), 0)}%"
