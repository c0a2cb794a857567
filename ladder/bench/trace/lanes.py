"""Steps as lanes of compute and communication: the figures of a step, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.perf.measurements import current
from ladder.plotting import load_pyplot

# after Okabe and Ito: colour-blind readers can tell them apart
COLOURS = {"attention": "#0072b2", "MLP": "#56b4e9", "comm": "#e69f00", "wait": "#d55e00"}


@dataclass(frozen=True)
class Span:
    """Something that took time, in milliseconds since the step began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What one rank did during one step under one wiring."""

    wiring: str
    rank: int
    compute: Sequence[Span]
    comm: Sequence[Span]
    waits: Sequence[Span]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Step":
        """From what `asdict` wrote."""
        raw = current(raw)
        lanes = {lane: [Span(**span) for span in raw[lane]] for lane in ("compute", "comm", "waits")}
        return cls(raw["wiring"], raw["rank"], **lanes)

    @property
    def ms(self) -> float:
        return max(span.end for span in (*self.compute, *self.waits))

    def account(self) -> dict[str, Any]:
        """The figures that are printed, without the embedding's all-reduce, which every wiring waits for."""
        comm = _busy(self.comm[1:])
        exposed = sum(span.end - span.begin for span in self.waits[1:])
        figures = {"all_reduces": len(self.comm) - 1, "step_ms": self.ms, "comm_ms": comm, "exposed_ms": exposed}
        return {"wiring": self.wiring, "rank": self.rank, **figures, "hidden": 1 - exposed / comm if comm else None}

    @property
    def title(self) -> str:
        """Its figures in a line."""
        figures = self.account()
        share = figures["hidden"]
        hidden = "no all-reduces" if share is None else f"{max(0.0, share):.0%} of the communication hidden"
        return f"{self.wiring}: {self.ms:.2f} ms, {figures['all_reduces']} all-reduces, {hidden}"


def first_layers(step: Step, count: int) -> Step:
    """The step until its first `count` layers are computed: what a picture has room for."""
    until = step.compute[: 2 * count][-1].end
    lanes = ([span for span in lane if span.begin < until] for lane in (step.compute, step.comm, step.waits))
    return Step(step.wiring, step.rank, *lanes)


def _busy(spans: Sequence[Span]) -> float:
    """Milliseconds with at least one of them under way: all-reduces that queue for a link use it one by one."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def draw(steps: Sequence[Step], title: str, path: Path) -> None:
    """Two lanes per wiring, compute above communication, all on one time axis."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(13, 1.2 + 1.7 * len(steps)), layout="constrained")
    ticks: list[tuple[float, str]] = []
    for index, step in enumerate(steps):
        top = -3.0 * index
        for span in step.compute:
            _bar(axes, top, span, COLOURS[span.name.split()[0]])
        for span in step.waits:
            _bar(axes, top, span, COLOURS["wait"])
        for span in step.comm:
            _bar(axes, top - 1, span, COLOURS["comm"])
        axes.text(0, top + 0.55, step.title, fontsize=11, fontweight="bold", va="bottom")
        ticks += [(top, "compute"), (top - 1, "communication")]
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(-3.0 * len(steps) + 1.2, 1.3)
    axes.set_xlim(0, 1.01 * max(step.ms for step in steps))
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title(title, fontsize=11, loc="left")
    names = {"attention": "attention", "MLP": "MLP", "comm": "all-reduce", "wait": "waiting for an all-reduce"}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[key]) for key in names]
    axes.legend(handles, names.values(), loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axes: Any, at: float, span: Span, colour: str) -> None:
    axes.barh(at, span.end - span.begin, left=span.begin, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
