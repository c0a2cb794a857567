"""Runs of `ladder load`: their lines, read and checked. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladder.load.summary import REQUEST, SUMMARY
from ladder.report.lines.values import checked, filled

MEASURES = (REQUEST, SUMMARY)
TIMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}  # key of a request: its name


@dataclass(frozen=True)
class LoadRow:
    """The line of a run, named as there; None is what the line leaves out."""

    run: str
    label: str
    arrivals: str
    requests_per_s: float
    output_tokens_per_s: float
    api: str | None = None
    model: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    prompt_length: str | None = None
    output_length: str | None = None
    requests: int | None = None
    completed: int | None = None
    failed: int | None = None
    duration_s: float | None = None
    total_tokens_per_s: float | None = None
    goodput_per_s: float | None = None
    goodput_share: float | None = None
    ttft_ms_p50: float | None = None
    ttft_ms_p90: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p90: float | None = None
    tpot_ms_p99: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p90: float | None = None
    itl_ms_p99: float | None = None
    e2e_ms_p50: float | None = None
    e2e_ms_p90: float | None = None
    e2e_ms_p99: float | None = None
    lag_ms_p99: float | None = None
    client_cpu_share: float | None = None
    url: str | None = None
    chip: str | None = None
    commit: str | None = None
    time: str | None = None

    @property
    def arrived(self) -> str:
        """How its requests arrived."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "all at once" if self.rate is None else f"{self.rate:g}/s"

    @property
    def lengths(self) -> str:
        return f"prompts {self.prompt_length or 'unknown'}, outputs {self.output_length or 'unknown'}"


@dataclass(frozen=True)
class LoadRun:
    """A run, and the sorted times of its requests that succeeded, by name."""

    row: LoadRow
    times: Mapping[str, list[float]]


class LoadLines:
    """The lines of a file: requests come before the line of their run."""

    def __init__(self) -> None:
        self._rows: list[LoadRow] = []
        self._times: dict[str, dict[str, list[float]]] = {}  # by run
        self._counts: dict[str, int] = {}

    def add(self, raw: Mapping[str, Any], where: str) -> None:
        if raw["measure"] == SUMMARY:
            self._rows.append(filled(LoadRow, raw, where))
            return
        run = checked(raw.get("run"), str, "run", where)
        times = self._times.setdefault(run, {name: [] for name in TIMES.values()})
        self._counts[run] = self._counts.get(run, 0) + 1
        if raw.get("error") is not None:
            return
        for key, name in TIMES.items():
            value = raw.get(key)
            found = value if isinstance(value, list) else [] if value is None else [value]
            times[name] += [checked(one, float, key, where) for one in found]

    def runs(self) -> tuple[list[LoadRun], int]:
        """The runs, and how many requests have no line of their run: it was killed."""
        runs = []
        for row in self._rows:
            times = {name: sorted(values) for name, values in self._times.get(row.run, {}).items() if values}
            runs.append(LoadRun(row, times))
        known = {row.run for row in self._rows}
        return runs, sum(count for run, count in self._counts.items() if run not in known)
