"""Steps as lanes of compute and communication: the figures of a step, and its picture."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.charts import specs
from ladder.charts.library import picture
from ladder.perf.measurements import current

KINDS = ("attention", "MLP")  # of sub-blocks
NUMBERED = 0.014  # of the chart's width: a bar that is wider has room for its layer's number
GAPS = "Gaps: the rest of the step, such as norms, the residual stream, the embedding and the host."


@dataclass(frozen=True)
class Span:
    """Something that took time, in milliseconds since the step began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What one rank did during one step under one wiring. On two lanes, waits are named as what waits."""

    wiring: str
    rank: int
    compute: Sequence[Span]
    comm: Sequence[Span]
    waits: Sequence[Span]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Step":
        """From what `asdict` wrote."""
        raw = current(raw)
        spans = {key: [Span(**span) for span in raw[key]] for key in ("compute", "comm", "waits")}
        return cls(raw["wiring"], raw["rank"], **spans)

    @property
    def ms(self) -> float:
        return max(span.end for span in (*self.compute, *self.waits))

    @property
    def layers(self) -> int:
        return (len(self.compute) + 1) // 2

    @property
    def two_lanes(self) -> bool:
        """Whether an attention and an MLP were ever computed at the same time."""
        attention = _busy([span for span in self.compute if _is_attention(span)])
        mlp = _busy([span for span in self.compute if not _is_attention(span)])
        return _busy(self.compute) < 0.999 * (attention + mlp)  # it may be less by rounding

    def account(self) -> dict[str, Any]:
        """The figures that are printed, without the embedding's all-reduce, which every wiring waits for. On two lanes
        the wait of one is exposed while the other does not compute. An all-reduce beside which no sub-block computes is
        exposed as a whole: where a CPU is busy with something else, nobody may seem to wait for it.
        """
        comm = _busy(self.comm[1:])
        alone = [span for span in self.comm[1:] if _alone(span, self.compute)]
        if self.two_lanes:
            exposed = _busy([*self.compute, *self.waits[1:], *alone]) - _busy(self.compute)
        else:
            exposed = _busy([*self.waits[1:], *alone])
        figures = {"all_reduces": len(self.comm) - 1, "step_ms": self.ms, "comm_ms": comm, "exposed_ms": exposed}
        hidden = max(0.0, 1 - exposed / comm) if comm else None
        return {"wiring": self.wiring, "rank": self.rank, **figures, "hidden": hidden}

    @property
    def title(self) -> str:
        """Its figures in a line."""
        return self.title_of(self.ms)

    def title_of(self, ms: float) -> str:
        """The same, of a step that took so long with what comes after the layers."""
        figures = self.account()
        share = figures["hidden"]
        hidden = "no all-reduces" if share is None else f"{share:.0%} of the communication hidden"
        return f"{self.wiring}: {ms:.2f} ms, {figures['all_reduces']} all-reduces, {hidden}"


def first_layers(step: Step, count: int) -> Step:
    """The step until its first `count` layers are computed: what a picture has room for, not for figures."""
    if count >= step.layers:
        return step  # with what it waits for in the end
    compute, later = step.compute[: 2 * count], {span.name for span in step.compute[2 * count :]}
    until = max(span.end for span in compute)
    comm = [span for span in step.comm if span.begin < until]
    waits = [span for span in step.waits if span.begin < until and span.name not in later]
    return Step(step.wiring, step.rank, compute, comm, waits)


def _is_attention(span: Span) -> bool:
    return span.name.startswith("attention")


def _alone(comm: Span, compute: Sequence[Span]) -> bool:
    """Whether no sub-block computes beside an all-reduce, other than its own, which may return a moment after that
    has begun: the one that ends nearest to its begin.
    """
    begun = [span for span in compute if span.begin < comm.begin]
    own = min(begun, key=lambda span: abs(span.end - comm.begin), default=None)
    return not any(min(span.end, comm.end) > max(span.begin, comm.begin) for span in compute if span is not own)


def _busy(spans: Sequence[Span]) -> float:
    """Milliseconds with at least one of them under way: all-reduces that queue for a link use it one by one."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def timeline(steps: Sequence[Step], count: int, titles: Sequence[str] = ()) -> specs.Spec:
    """The steps' first `count` layers below each other, all on one time axis. The titles are of the whole steps; other
    ones may be given.
    """
    shown = [first_layers(step, count) for step in steps]
    until = max(step.ms for step in shown)
    records: list[dict[str, Any]] = []
    for order, (step, whole) in enumerate(zip(shown, steps, strict=True)):
        heading = {"heading": titles[order] if titles else whole.title, "order": order}
        records += [{**bar, **heading} for bar in _bars(step, until)]
    return specs.timeline("milliseconds since the step began", records)


def _bars(step: Step, until: float) -> list[dict[str, Any]]:
    """Computation on one lane or on two, the link's below."""
    found = []
    two = step.two_lanes
    for kind, spans in (("wait", step.waits), ("compute", step.compute), ("all-reduce", step.comm)):
        for span in (span for span in spans if span.end > span.begin):
            top, bottom = (2.1, 2.95) if kind == "all-reduce" else (0.05, 1.9)
            title = f"waits for {span.name}" if kind == "wait" else span.name
            if two and kind != "all-reduce":
                top, bottom = (0.05, 0.95) if _is_attention(span) else (1.0, 1.9)
                title = f"{span.name} waits for an all-reduce" if kind == "wait" else span.name
            took = f"{1e3 * (span.end - span.begin):.1f} \N{MICRO SIGN}s"
            told = {"title": title, "tips": [("took", took), ("began at", f"{span.begin:.3f} ms")]}
            bar = {"kind": span.name.split()[0] if kind == "compute" else kind, "begin": span.begin, "end": span.end}
            wide = kind == "compute" and span.end - span.begin > NUMBERED * until
            label = {"label": span.name.split()[-1]} if wide else {}
            found.append({**bar, "top": top, "bottom": bottom, **label, **told})
    return found


def draw(steps: Sequence[Step], title: str, path: Path, titles: Sequence[str] = (), count: int | None = None) -> None:
    """The picture: of all layers, or of the first `count`."""
    most = max(step.layers for step in steps)
    chart = timeline(steps, min(count or most, most), titles)
    names = "Numbers: layers. Grey with a broken line: waits for an all-reduce."
    facts = [*textwrap.wrap(title, 170), f"{names} {GAPS}"]
    inner = {**chart["spec"], "width": 1000}
    inner["layer"] = [specs.with_kinds(layer) for layer in inner["layer"]]
    picture(specs.titled({**chart, "spec": inner}, "Computation and communication", facts), path)
