"""What `ladder report` reads: the lines of all files, by kind, each checked. No torch here."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder.bench.trace.lanes import KINDS, Span, Step
from ladder.errors import LadderError
from ladder.perf.measurements import read_lines
from ladder.report.lines.loads import MEASURES, LoadLines, LoadRun
from ladder.report.lines.one_rank import as_row, fastest, is_step
from ladder.report.lines.rows import Lanes, Row, row_of
from ladder.report.lines.values import LARGEST, harmless_text, short
from ladder.report.trainings import Training, is_log, label_of


@dataclass(frozen=True)
class ReportData:
    """What the files hold. `not_drawn`: a sentence for each file with lines that are not drawn."""

    sources: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    lanes: list[Lanes] = field(default_factory=list)
    not_drawn: list[str] = field(default_factory=list)
    loads: list[LoadRun] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)


def load(inputs: Sequence[Path]) -> ReportData:
    """What all files hold, in order; a file with nothing to draw is refused."""
    if not inputs:
        raise LadderError("no file of measurements: make one with `ladder bench`")
    data = ReportData()
    for path in inputs:
        _read(path, data)
    return data


def _read(path: Path, data: ReportData) -> None:
    name = harmless_text(path.name)
    rows: list[Row] = []
    single: list[Row] = []  # of one rank
    steps: dict[int, list[tuple[Step, dict[str, str]]]] = {}
    served, log = LoadLines(), Training(label_of(path, [run.label for run in data.trainings]))
    lines = read_lines(path)
    others: Counter[str] = Counter({"torn last line": 1} if lines.torn else {})
    for number, raw in lines.objects:
        where = f"{path} line {number}"
        if raw.get("measure") in MEASURES:
            served.add(raw, where)
        elif raw.get("tpot_ms_p50") is not None:
            rows.append(row_of(raw, where))
        elif is_step(raw):
            single.append(row_of(as_row(raw), where))
        elif is_log(raw):
            log.add(raw, where)
        elif (step := _step(raw)) is not None:
            facts = {key: harmless_text(raw[key]) for key in _FACTS if isinstance(raw.get(key), str)}
            steps.setdefault(step.rank, []).append((step, facts))
        else:
            others[_kind(raw)] += 1
    runs, without = served.runs()
    if without:
        others["line of a request whose run has no line"] = without
    if not (rows or single or steps or runs or log.values):
        found = f" (it has {_counted(others)})" if others else ""
        raise LadderError(
            f"{path} has nothing to draw{found}: give what `ladder bench`, `ladder trace`, `ladder load` or a training "
            "wrote"
        )
    data.sources.append(name)
    data.rows.extend([*rows, *fastest(single)])
    data.lanes.extend(Lanes(name, rank, [step for step, _ in own], own[0][1]) for rank, own in sorted(steps.items()))
    data.loads.extend(runs)
    data.trainings.extend([log] if log.values else [])
    if others:
        data.not_drawn.append(f"{name}: not drawn are {_counted(others)}.")


_FACTS = ("chip", "mode", "link", "link_kind", "commit", "time")


def _step(raw: dict[str, Any]) -> Step | None:
    """A step's spans, where the line has them and they can be drawn."""
    try:
        whole = Step.read(raw)
        lanes = [[Span(harmless_text(s.name), float(s.begin), float(s.end)) for s in lane] for lane in _lanes(whole)]
        step = Step(harmless_text(whole.wiring), int(whole.rank), *lanes)
        possible = all(0 <= span.begin <= span.end <= LARGEST for lane in lanes for span in lane)
        known = all(span.name.split()[0] in KINDS for span in step.compute)
        return step if step.compute and possible and known and step.ms > 0 else None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return None


def _lanes(step: Step) -> tuple[Sequence[Span], ...]:
    return step.compute, step.comm, step.waits


def _kind(raw: dict[str, Any]) -> str:
    """What a line calls itself, or else what it holds."""
    if isinstance(raw.get("measure"), str):
        return f"line of {short(harmless_text(raw['measure']))!r}"
    keys = ", ".join(list(raw)[:3]) or "nothing"
    return f"line with {short(harmless_text(keys))}"


def _counted(others: Counter[str]) -> str:
    shown = [
        f"{count} {re.sub('^line', 'lines', kind) if count > 1 else kind}" for kind, count in others.most_common(5)
    ]
    left = sum(others.values()) - sum(count for _, count in others.most_common(5))
    return ", ".join(shown) + (f" and {left} more" if left else "")
